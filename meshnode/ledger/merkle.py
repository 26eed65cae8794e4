"""Merkle trees as in RFC 6962: leaves and inner nodes hashed apart, an odd node carried up as the left part's peer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

EMPTY = hashlib.sha256(b"").digest()


def leaf(blind: bytes, first: int, count: int, digest: bytes) -> bytes:
    """The hash of one leaf: positions [first, first + count) whose bytes have `digest`.

    blind: 16 bytes that a stranger cannot guess; without them the bytes themselves could be guessed from the hash.
    """
    return hashlib.sha256(b"\x00" + blind + first.to_bytes(8, "big") + count.to_bytes(4, "big") + digest).digest()


def root(leaves: Sequence[bytes]) -> bytes:
    """The root over leaf hashes, in order; EMPTY for none."""
    if not leaves:
        return EMPTY
    level = list(leaves)
    while len(level) > 1:
        level = _above(level)
    return level[0]


def proof(leaves: Sequence[bytes], index: int) -> tuple[bytes, ...]:
    """What shows that leaves[index] is under root(leaves): its siblings, from the leaf up."""
    level, path = list(leaves), []
    while len(level) > 1:
        if index ^ 1 < len(level):
            path.append(level[index ^ 1])
        level, index = _above(level), index // 2
    return tuple(path)


def is_under(top: bytes, leaf_hash: bytes, index: int, count: int, path: Sequence[bytes]) -> bool:
    """Whether `path` proves that the leaf is number `index` of the `count` under the root `top`."""
    if not 0 <= index < count:
        return False
    left, at = list(path), leaf_hash
    while count > 1:
        if index ^ 1 < count:
            if not left:
                return False
            beside = left.pop(0)
            at = hashlib.sha256(b"\x01" + (beside + at if index & 1 else at + beside)).digest()
        index, count = index // 2, (count + 1) // 2
    return not left and at == top


def _above(level: Sequence[bytes]) -> list[bytes]:
    pairs = [hashlib.sha256(b"\x01" + level[i] + level[i + 1]).digest() for i in range(0, len(level) - 1, 2)]
    return pairs + list(level[len(pairs) * 2 :])
