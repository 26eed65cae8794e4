"""Rows of a session's positions, kept while they may be needed again."""

from __future__ import annotations

import contextlib
from tempfile import SpooledTemporaryFile

from ..errors import MeshError

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
