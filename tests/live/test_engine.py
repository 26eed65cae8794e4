"""The engine on the real model: native tests of its exactness, and of what it refuses."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import trio

from meshnode.worker.build import build

from ..bench.engine import measure, ratio

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]  # 20 s on two idle cores
SPIN = {"GOMP_SPINCOUNT": "5000"}  # as the node sets it: idle threads must not take the cores from the busy ones


@pytest.fixture(scope="session")
def native_tests() -> Path:
    return build("tests")


def passes(*command: Path | str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, env=SPIN)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def test_no_bit_changes_at_any_cut(native_tests: Path, model: Path) -> None:
    said = passes(native_tests / "test_exact", model)
    assert "30 layers" in said
    assert "max |difference| 0\n" in said


def test_no_bit_changes_with_the_fast_kernels(native_tests: Path, model: Path) -> None:
    assert "\nok: " in passes(native_tests / "test_exact", model, "--fast", "--cut", "1", "--cut", "17", "--cut", "29")


def test_no_bit_changes_in_company(native_tests: Path, model: Path) -> None:
    """Short: the whole of it is `make exact-engine`."""
    assert "\nok: 28 comparisons" in passes(native_tests / "test_company", model, "--prompt", "24")


def test_the_fingerprint_tells_kernels_apart(native_tests: Path) -> None:
    assert passes(native_tests / "test_probe").endswith("ok\n")


def test_what_a_stage_refuses(native_tests: Path, model: Path) -> None:
    assert passes(native_tests / "test_stage", model) == "ok\n"


def test_the_bench_runs_and_a_stage_maps_what_it_owns_alone() -> None:
    """Of `make bench-engine` the row that does not depend on time."""
    figures = trio.run(measure, ["rss_over_owned"], 1)["rss_over_owned"]
    assert 0 < ratio(figures) <= 1.05
