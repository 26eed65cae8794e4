"""What a hop keeps of a session over its epochs: what the worker holds, and what was made of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..session import Sampler
from ..wire.messages import Tokens
from ..worker import Worker
from .exhibits import Exhibit
from .retained import Retained


@dataclass
class Kept:
    """One session at one hop. computed: positions that are in the worker's cache."""

    worker: Worker
    handle: int
    sampler: Sampler
    rows: Retained | None = None  # of a hop that has a successor
    computed: int = 0
    said: list[Tokens] = field(default_factory=list)  # the tail's, of which the entry node may not have heard
    lost: bool = False  # the worker no longer holds it
    exhibit: Exhibit | None = None  # kept for auditors

    def close(self) -> None:
        if self.rows is not None:
            self.rows.close()


def replays(first: int, end: int, borders: tuple[int, ...], known: int, most: int) -> Iterator[tuple[int, int, bool]]:
    """(first, count, sample) of the pushes that bring positions [first, end) to a successor that lacks them.

    known: positions whose ids the entry node has: from the last of them on each one is sampled after, as it was at
    first. borders: what no push may reach across. most: positions a push may have.
    """
    while first < end:
        limit = first + most if first < known else first + 1
        stop = min(end, limit, *(border for border in (known, *borders) if border > first))
        yield first, stop - first, stop >= known
        first = stop
