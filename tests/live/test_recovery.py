"""Real workers and nodes killed and frozen while they answer: a short form of `make soak-kills`."""

from __future__ import annotations

from pathlib import Path

from .soak_kills import soak


def test_whoever_dies_the_answer_is_the_undisturbed_one(worker_binary: Path, tmp_path: Path) -> None:
    found = soak(tmp_path, hops=3, kills=4, freezes=1, seed=4)
    assert found["errors"] == []
    assert {name: found[name] for name in ("wrong", "hung", "orphans", "sessions_left")} == {
        "wrong": 0, "hung": 0, "orphans": 0, "sessions_left": 0
    }  # fmt: skip
    assert found["recovered"] >= 4  # one may come when the answer is over
