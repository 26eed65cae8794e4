"""Which statements a ledger holds, in a form that two ledgers can compare cheaply. Pure.

Digests fall into BUCKETS by their first byte; a bucket's mark is the exclusive or of its digests' first bytes. Two
ledgers that differ in little exchange 2 KiB of marks, and then the digests of the few buckets whose marks differ.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..wire.accounts import BUCKETS, MARK_BYTES, MAX_BUCKET


class Index:
    def __init__(self, digests: Iterable[bytes] = ()) -> None:
        self._buckets: list[dict[bytes, None]] = [{} for _ in range(BUCKETS)]
        self._marks = [0] * BUCKETS
        for digest in digests:
            self.add(digest)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._buckets[digest[0]]

    def __len__(self) -> int:
        return sum(map(len, self._buckets))

    def add(self, digest: bytes) -> None:
        if digest not in self:
            self._buckets[digest[0]][digest] = None
            self._marks[digest[0]] ^= int.from_bytes(digest[:MARK_BYTES], "big")

    def discard(self, digest: bytes) -> None:
        if digest in self:
            del self._buckets[digest[0]][digest]
            self._marks[digest[0]] ^= int.from_bytes(digest[:MARK_BYTES], "big")

    def marks(self) -> bytes:
        return b"".join(mark.to_bytes(MARK_BYTES, "big") for mark in self._marks)

    def bucket(self, number: int) -> list[bytes]:
        """The newest first, as many as one message holds."""
        return list(reversed(self._buckets[number]))[:MAX_BUCKET]

    def differing(self, marks: bytes) -> list[int]:
        """The buckets in which another ledger, whose marks these are, has something else."""
        own = self.marks()
        size = MARK_BYTES
        return [n for n in range(BUCKETS) if own[n * size : (n + 1) * size] != marks[n * size : (n + 1) * size]]

    def missing(self, digests: Iterable[bytes]) -> list[bytes]:
        return [digest for digest in digests if digest not in self]
