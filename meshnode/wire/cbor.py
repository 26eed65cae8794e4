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
_WHOLE = 24  # an integer below it is its own first byte
_KNOWN_SIMPLE = (20, 21, 22)  # false, true, null


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
    """One pass over the bytes. Every message of a decode step takes it, so it is written for speed: most items are
    whole in their first byte, and those are not worth a call."""

    def __init__(self, raw: bytes, max_items: int) -> None:
        self.raw = raw
        self.end = len(raw)
        self.left = max_items - 1

    def item(self, at: int, depth: int) -> int:
        """Checks the item at `at` and gives where it ends."""
        if at >= self.end:
            raise MeshError("bad_frame", "a message that ends early")
        first = self.raw[at]
        at += 1
        kind, number = first >> 5, first & 31
        if kind == _SIMPLE:
            if number not in _KNOWN_SIMPLE:
                raise MeshError("bad_frame", "a simple value that no message has")
            return at
        if number > 23:
            if number > 27:
                raise MeshError("bad_frame", "an item of indefinite length")
            width = 1 << (number - 24)
            number, at = self.number(at, width), at + width
        if kind <= _NEGATIVE:
            return at
        if kind <= _TEXT:
            return self.string(kind, number, at)
        if kind == _TAG:
            raise MeshError("bad_frame", "a message with a CBOR tag")
        items = number * (kind - _BYTES - 1)  # a map has two for each that it counts
        if items > self.end - at:
            raise MeshError("bad_frame", "a count larger than its message")
        self.left -= items
        if self.left < 0:
            raise MeshError("bad_frame", "a message of too many items")
        if depth > MAX_DEPTH:
            raise MeshError("bad_frame", "a message nested too deeply")
        return self.items(number, at, depth + 1) if kind == _ARRAY else self.pairs(number, at, depth + 1)

    def items(self, number: int, at: int, depth: int) -> int:
        raw, last = self.raw, self.end - 1
        for _ in range(number):
            at = at + 1 if at <= last and raw[at] < _WHOLE else self.item(at, depth)
        return at

    def pairs(self, number: int, at: int, depth: int) -> int:
        raw, last, previous = self.raw, self.end - 1, b""
        for _ in range(number):
            end = at + 1 if at < last and raw[at] < _WHOLE else self.item(at, depth)
            key = raw[at:end]
            if key <= previous:
                raise MeshError("bad_frame", "map keys that repeat or are out of order")
            previous = key
            at = end + 1 if end <= last and raw[end] < _WHOLE else self.item(end, depth)
        return at

    def string(self, kind: int, length: int, at: int) -> int:
        end = at + length
        if end > self.end:
            raise MeshError("bad_frame", "a string longer than its message")
        if kind == _TEXT:
            try:
                self.raw[at:end].decode()
            except UnicodeDecodeError as error:
                raise MeshError("bad_frame", "text that is not UTF-8") from error
        return end

    def number(self, at: int, width: int) -> int:
        if at + width > self.end:
            raise MeshError("bad_frame", "a message that ends early")
        number = int.from_bytes(self.raw[at : at + width], "big")
        if number < (24 if width == 1 else 1 << (4 * width)):
            raise MeshError("bad_frame", "a number that is not in its shortest form")
        return number
