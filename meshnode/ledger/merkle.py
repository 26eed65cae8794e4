"""Merkle trees as in RFC 6962: leaves and inner nodes hashed apart, an odd node carried up as the left part's peer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

EMPTY = hashlib.sha256(b"").digest()


def leaf(first: int, count: int, digest: bytes) -> bytes:
    """The hash of one leaf: positions [first, first + count) whose bytes have `digest`."""
    return hashlib.sha256(b"\x00" + first.to_bytes(8, "big") + count.to_bytes(4, "big") + digest).digest()


def root(leaves: Sequence[bytes]) -> bytes:
    """The root over leaf hashes, in order; EMPTY for none."""
    if not leaves:
        return EMPTY
    level = list(leaves)
    while len(level) > 1:
        pairs = [hashlib.sha256(b"\x01" + level[i] + level[i + 1]).digest() for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]
