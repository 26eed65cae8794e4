"""The sweep's short form: six architectures of different kinds still do what their certificates say."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshnode.artifact.architectures import ARCHITECTURES, REFUSED
from meshnode.worker import build

from .arch_sweep import Sweep, explain

pytestmark = pytest.mark.live
MODELS = {  # an attention, a window, experts, a compressed cache, a recurrence, both of them
    "llama": "dense", "gemma3": "dense", "qwen3moe": "moe", "deepseek2": "moe", "mamba2": "dense", "lfm2": "dense",
}  # fmt: skip


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return Sweep(build.build("sweep"), tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_a_certificate_holds(sweep: Sweep, name: str) -> None:
    certificate = ARCHITECTURES[name]
    model = next(path for path in sweep.models(name) if path.stem.endswith(MODELS[name]))
    quantized = sweep.requantized(model, ("Q4_K", "Q8_0"))
    assert quantized is not None
    for path in (model, quantized):
        found = sweep.compute(path)
        assert found.invariant, (path.name, found)
        assert found.said["truncates"] == (certificate.truncate == "any")
        assert found.said["certificate"]["planes"] == certificate.planes
    assert {"F32", "Q4_K", "Q8_0"} <= certificate.invariant


def test_what_cannot_be_cut_is_refused_with_its_reason(sweep: Sweep) -> None:
    for name, reason in {
        "plamo2": "its layers do not pass one residual on",
        "dream": "it does not write from left to right",
    }.items():
        [model] = sweep.models(name)
        found = sweep.compute(model)
        assert (found.exact, found.why) == (False, reason)
    assert explain(-1, "") == "it hangs"
    assert explain(-6, "x.c:1: GGML_ASSERT(a == b) failed") == "the pinned engine aborts: a == b"


def test_a_stage_goes_by_the_list(sweep: Sweep) -> None:
    [drifts], [refused] = sweep.models("minimax-01"), sweep.models("plamo2")
    _, out, _ = sweep.run("test_exact", drifts)
    assert out.startswith("FAIL unproven_numerics: invariant numerics are not proven for the architecture 'minimax-01'")
    _, out, _ = sweep.run("test_exact", drifts, "--fast")
    assert "\nok: " in out
    _, out, _ = sweep.run("test_exact", refused)
    assert out == f"FAIL unsupported_architecture: architecture 'plamo2' is refused: {REFUSED['plamo2']}\n"


def test_what_an_architecture_computes_looks_like_text_behind_a_cut(sweep: Sweep) -> None:
    """glm4 without sections of positions aborts when its input is no text."""
    [model] = sweep.models("glm4")
    content, key = model.read_bytes(), b"glm4.rope.dimension_sections"
    assert content.count(key) == 1
    model.write_bytes(content.replace(key, key[:-1] + b"z"))
    found = sweep.compute(model)
    assert found.invariant
    assert found.said["certificate"]["planes"] == 1
