"""A short run of the fuzzer, on the worker around the toy engine, with sanitizers."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from fake_worker import FLAGS, SOURCES, compile_native
from fuzz import Failure, fuzz
from meshnode.wire import worker_messages as say

SECONDS = 3.0
PLAIN = tuple(flag for flag in FLAGS if flag not in ("-O1", "-g"))  # optimised with sanitizers it compiles for a minute
SANITIZED = (*PLAIN, "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.fixture(scope="module")
def sanitized(pytestconfig: pytest.Config) -> Path:
    assert pytestconfig.cache is not None
    return compile_native(pytestconfig.cache.mkdir("native"), "meshnode-worker-sanitized", SOURCES, SANITIZED)


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    path = tmp_path / "toy"
    path.write_text("meshnode-fake 6 16 300")
    return path


def test_no_frame_ends_a_worker(sanitized: Path, toy: Path) -> None:
    tally = fuzz(sanitized, toy, seed=1, seconds=SECONDS)
    assert tally["Stepped"] > 50
    assert {"bad_frame", "cache_miss", "unknown_session", "Opened", "Tokens", "PieceList", "Closed"} <= set(tally)
    assert "internal" not in tally, "nothing that was not foreseen"


def test_a_worker_that_ends_is_found(sanitized: Path, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Failure, match="seed 7: the worker ended with -6"), monkeypatch.context() as patch:
        patch.setenv("MESHNODE_FAKE_ABORT", "step")
        fuzz(sanitized, toy, seed=7, rounds=1)


def test_a_request_that_is_not_answered_is_found(sanitized: Path, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzz.PATIENCE_S", 0.5)
    monkeypatch.setattr("fuzz.ENVIRONMENT", {})
    frames = itertools.cycle([say.Open(1), say.Step(1, 0, (0, 6), tokens=(272,))])
    monkeypatch.setattr("fuzz.meant", lambda rng, loaded: next(frames))
    monkeypatch.setattr("fuzz.mutated", lambda rng, body, other: body)
    with pytest.raises(Failure, match="no answer within"):
        fuzz(sanitized, toy, seed=1, rounds=1)
