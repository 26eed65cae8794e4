"""What a hop keeps of a session over its epochs: what the worker holds, and what was made of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from tempfile import SpooledTemporaryFile

from ..errors import MeshError
from ..session import Sampler
from ..wire.messages import Tokens
from ..worker import Worker

IN_MEMORY = 4 << 20  # bytes of a session's retained rows; beyond it they lie on disk: 1,800 positions of SmolLM2


class Retained:
    """The rows of every position that was computed, from the first on: so many bytes as the lease's context has rows.

    The file has no name: it is gone with the session, and with the process.
    """

    def __init__(self, width: int) -> None:
        self._width = width  # bytes of one position
        self._file = SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115
        self._whole = True

    def add(self, first: int, rows: bytes) -> None:
        """A disk that is full costs the replay, not the session."""
        if self._whole:
            try:
                self._file.seek(first * self._width)
                self._file.write(rows)
            except OSError:
                self._whole = False
                self.close()

    def read(self, first: int, count: int) -> bytes:
        """MeshError cache_miss when they could not be kept."""
        rows = b""
        if self._whole:
            with contextlib.suppress(OSError):
                self._file.seek(first * self._width)
                rows = self._file.read(count * self._width)
        if len(rows) != count * self._width:
            raise MeshError("cache_miss", "the activations of the session could not be retained")
        return rows

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


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
