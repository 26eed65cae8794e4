"""Which of an installation's workers a CPU gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshnode.errors import MeshError
from meshnode.worker import variants
from meshnode.worker.variants import PROGRAM, VARIANTS, bundled, cpu_flags, fitting, settings


@pytest.fixture
def workers(tmp_path: Path) -> Path:
    for level in ("x86-64-v2", "x86-64-v3"):
        (tmp_path / level).mkdir()
        (tmp_path / level / PROGRAM).touch()
    return tmp_path


def cpuinfo(tmp_path: Path, flags: frozenset[str]) -> Path:
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor\t: 0\nflags\t\t: {' '.join(sorted(flags))}\n\nprocessor\t: 1\nflags\t\t: sse\n")
    return path


@pytest.mark.parametrize("level", VARIANTS)
def test_a_cpu_gets_its_own_level_and_none_above(level: str) -> None:
    assert fitting(VARIANTS[level].flags | {"sse", "fpu"}) == level
    for missing in VARIANTS[level].flags:
        assert fitting(VARIANTS[level].flags - {missing}) != level


def test_the_best_of_what_is_there_is_chosen(workers: Path, tmp_path: Path) -> None:
    more = VARIANTS["x86-64-v3"].flags | {"avx512f"}
    assert bundled(workers, cpuinfo(tmp_path, more)) == workers / "x86-64-v3" / PROGRAM
    assert bundled(workers, cpuinfo(tmp_path, VARIANTS["x86-64-v2"].flags)) == workers / "x86-64-v2" / PROGRAM


def test_a_cpu_below_all_of_them_is_told(workers: Path, tmp_path: Path) -> None:
    with pytest.raises(MeshError, match="x86-64-v2") as told:
        bundled(workers, cpuinfo(tmp_path, frozenset({"sse"})))
    assert told.value.code == "unsupported_cpu"
    with pytest.raises(MeshError):
        bundled(workers, tmp_path / "nothing")


def test_a_checkout_has_none(tmp_path: Path) -> None:
    assert bundled(tmp_path) is None
    assert not variants.WORKERS.exists()
    assert cpu_flags()


@pytest.mark.parametrize("level", VARIANTS)
def test_nothing_of_the_building_machine_is_left(level: str) -> None:
    made = settings(level)
    assert made["GGML_NATIVE"] == "OFF"
    assert made["CMAKE_CXX_FLAGS"] == made["CMAKE_C_FLAGS"] == f"-march={level}"
