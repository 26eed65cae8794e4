"""Deterministic CBOR (RFC 8949, 4.2), checked and bounded before it is decoded.

cbor2 accepts duplicate keys, trailing bytes, indefinite lengths and cycles, and a small input can decode to a hundred
times its size. `loads` walks the bytes first: what passes holds no tag and no float (the wire has none: durations and
parameters are integers in small units), at most MAX_ITEMS items and MAX_DEPTH levels, and is the only encoding of its
value.
"""

from __future__ import annotations

from typing import Any

import cbor2

from ..errors import MeshError

MAX_DEPTH = 8  # our deepest message, a route-ready of signed leases, has 5
MAX_ITEMS = 1 << 17  # a prompt of 131,072 tokens in one message

_UINT, _NEGATIVE, _BYTES, _TEXT, _ARRAY, _MAP, _TAG, _SIMPLE = range(8)


def dumps(value: Any) -> bytes:
    return cbor2.dumps(value, canonical=True)


def loads(raw: bytes, *, max_items: int = MAX_ITEMS) -> Any:
    """The value; MeshError bad_frame unless `raw` is exactly one item in its deterministic encoding."""
    end = _Walk(raw, max_items).item(0, 0)
    if end != len(raw):
        raise MeshError("bad_frame", f"{len(raw) - end} bytes after the message")
    try:
        return cbor2.loads(raw)
    except (cbor2.CBORDecodeError, ValueError, TypeError) as error:
        raise MeshError("bad_frame", f"no CBOR: {error}") from error


class _Walk:
    def __init__(self, raw: bytes, max_items: int) -> None:
        self.raw = raw
        self.left = max_items

    def item(self, at: int, depth: int) -> int:
        """Checks the item at `at` and gives where it ends."""
        self.left -= 1
        if self.left < 0:
            raise MeshError("bad_frame", "a message of too many items")
        if depth > MAX_DEPTH:
            raise MeshError("bad_frame", "a message nested too deeply")
        kind, number, at = self.head(at)
        if kind in (_UINT, _NEGATIVE):
            return at
        if kind in (_BYTES, _TEXT):
            return self.string(kind, number, at)
        if kind == _ARRAY:
            self.room(number, at)
            for _ in range(number):
                at = self.item(at, depth + 1)
            return at
        if kind == _MAP:
            self.room(2 * number, at)
            return self.pairs(number, at, depth)
        if kind == _TAG:
            raise MeshError("bad_frame", "a message with a CBOR tag")
        return at

    def pairs(self, number: int, at: int, depth: int) -> int:
        previous = b""
        for index in range(number):
            end = self.item(at, depth + 1)
            key = self.raw[at:end]
            if index and key <= previous:
                raise MeshError("bad_frame", "map keys that repeat or are out of order")
            previous = key
            at = self.item(end, depth + 1)
        return at

    def string(self, kind: int, length: int, at: int) -> int:
        end = at + length
        if end > len(self.raw):
            raise MeshError("bad_frame", "a string longer than its message")
        if kind == _TEXT:
            try:
                self.raw[at:end].decode()
            except UnicodeDecodeError as error:
                raise MeshError("bad_frame", "text that is not UTF-8") from error
        return end

    def room(self, items: int, at: int) -> None:
        if items > len(self.raw) - at:
            raise MeshError("bad_frame", "a count larger than its message")

    def head(self, at: int) -> tuple[int, int, int]:
        """(major type, its number, where the content begins)."""
        if at >= len(self.raw):
            raise MeshError("bad_frame", "a message that ends early")
        kind, short = self.raw[at] >> 5, self.raw[at] & 31
        at += 1
        if kind == _SIMPLE:
            return kind, 0, self.simple(short, at)
        if short < 24:
            return kind, short, at
        if short > 27:
            raise MeshError("bad_frame", "an item of indefinite length")
        width = 1 << (short - 24)
        if at + width > len(self.raw):
            raise MeshError("bad_frame", "a message that ends early")
        number = int.from_bytes(self.raw[at : at + width], "big")
        if number < (24 if width == 1 else 1 << (4 * width)):
            raise MeshError("bad_frame", "a number that is not in its shortest form")
        return kind, number, at + width

    def simple(self, short: int, at: int) -> int:
        if short in (20, 21, 22):  # false, true, null
            return at
        raise MeshError("bad_frame", "a simple value that no message has")
