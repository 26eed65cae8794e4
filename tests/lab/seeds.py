"""Simulated meshes, many seeds at once."""

from __future__ import annotations

import collections
from collections.abc import Iterable

from meshnode.lab.simulate import simulate


def check(seeds: Iterable[int]) -> None:
    """No promise is broken in any of them, and they are not all of one kind."""
    ended, injected, wrong = collections.Counter[str](), collections.Counter[str](), dict[int, list[str]]()
    for seed in seeds:
        run = simulate(seed)
        ended.update(outcome.ended for outcome in run.outcomes)
        injected.update(run.injected)
        if run.faults:
            wrong[seed] = run.faults
    assert not wrong
    assert ended["ok"] > ended.total() / 2
    assert {"kill", "freeze", "part", "loss", "worker"} <= set(injected)
    assert {"no_route", "cancelled"} <= set(ended)
