"""Step through a file's header without trusting it: every length is held against the file and against a limit first."""

from __future__ import annotations

import os
import struct
from array import array
from dataclasses import dataclass

import numpy as np

from ..errors import MeshError

# Each limit is far above any model's need and keeps the whole under 2 s and 64 MiB.
MAX_HEADER = 64 << 20  # bytes before the tensor data; 262k tokens, their scores and 515k merges take 15 MiB
MAX_TEXTS = 8 << 20  # bytes of all texts and numbers that are kept
MAX_STRINGS = 5 << 18  # elements in all arrays of strings; the largest vocabulary has 780,000; each costs up to 0.7 us
MAX_STRING = 1 << 16  # bytes of an element of an array of strings
WINDOW = 256 << 10

MAX_BYTE_FORMS = 1024  # there are 256 in a vocabulary
BYTES = {b"<0x%02X>" % value: value for value in range(256)}
MARKS = frozenset({b"</s>", b"<unk>", b"<s>", b"<|endoftext|>"})  # tokens that the engine looks up by their text

_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Tokens:
    """What the token list was seen to be.

    byte_forms: the ids written "<0x..>"; byte_values: the bytes written "<0x00>" to "<0xFF>"; marks: those of MARKS.
    """

    count: int
    distinct: bool
    bad_text: int | None  # the first id that is no UTF-8
    byte_forms: frozenset[int]
    byte_values: frozenset[int]
    marks: frozenset[bytes]


def bad(fault: str) -> MeshError:
    return MeshError("bad_gguf", fault)


def quote(text: str) -> str:
    """A name out of the file, as it may stand in a message: short and on one line."""
    return repr(text if len(text) <= 80 else text[:77] + "...")


class Cursor:
    """Reads forward through a window; refuses what is not there before it asks for memory."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd, self._end = fd, min(size, MAX_HEADER)
        self._whole = size <= MAX_HEADER
        self._buffer, self._at, self._base = b"", 0, 0  # the window, the position in it, its offset in the file
        self.kept = 0
        self.strings = 0

    @property
    def position(self) -> int:
        return self._base + self._at

    def need(self, count: int, what: str) -> None:
        if count > self._end - self.position:
            limit = "the file ends" if self._whole else f"the header exceeds {MAX_HEADER >> 20} MiB"
            raise bad(f"{limit} inside the {what}")

    def take(self, count: int, what: str) -> bytes:
        self.need(count, what)
        if self._at + count > len(self._buffer):
            self._fill(count, what)
        self._at += count
        return self._buffer[self._at - count : self._at]

    def skip(self, count: int, what: str) -> None:
        self.need(count, what)
        if self._at + count <= len(self._buffer):
            self._at += count
        else:
            self._base, self._at, self._buffer = self.position + count, 0, b""

    def scalar(self, layout: str, what: str) -> int:
        value: int = struct.unpack(layout, self.take(struct.calcsize(layout), what))[0]
        return value

    def count(self, layout: str, limit: int, what: str) -> int:
        value = self.scalar(layout, what)
        if value > limit:
            raise bad(f"the {what} is {value}, more than {limit}")
        return value

    def name(self, limit: int, what: str) -> str:
        """A text that has to be UTF-8 and hold no NUL, at which the engine would end it."""
        name = self.text(limit, what)
        if "\ufffd" in name or "\0" in name:
            raise bad(f"the {what} is no text: {quote(name)}")
        return name

    def text(self, limit: int, what: str) -> str:
        length = self.scalar("<Q", f"length of the {what}")
        self.need(length, what)
        if length > limit:
            raise bad(f"the {what} is {length} bytes long, more than {limit}")
        self.kept += length
        if self.kept > MAX_TEXTS:
            raise bad(f"its texts exceed {MAX_TEXTS >> 20} MiB")
        return self.take(length, what).decode("utf-8", "replace")

    def string_array(self, count: int, what: str, *, tokens: bool) -> Tokens:
        """Step over an array of strings; for the token list also see that texts differ and are UTF-8."""
        self.strings += count
        if self.strings > MAX_STRINGS:
            raise bad(f"the {what} brings its lists of strings to {self.strings} elements, more than {MAX_STRINGS}")
        self.need(8 * count, what)
        hashes, bad_text = array("q"), None
        byte_forms, byte_values, marks = set[int](), set[int](), set[bytes]()
        for i in range(count):
            if self._at + 8 > len(self._buffer):
                self.need(8, what)
                self._fill(8, what)
            (length,) = _U64.unpack_from(self._buffer, self._at)
            self._at += 8
            if length > MAX_STRING:
                self.need(length, what)
                raise bad(f"element {i} of the {what} is {length} bytes long, more than {MAX_STRING}")
            if self._at + length > len(self._buffer):
                self.need(length, what)
                self._fill(length, what)
            if tokens:
                text = self._buffer[self._at : self._at + length]
                # the engine reads texts up to their first NUL, and names empty ones so
                hashes.append(hash(text.partition(b"\0")[0] or b"[EMPTY_%d]" % i))
                if length == 6 and text.startswith(b"<0x") and len(byte_forms) < MAX_BYTE_FORMS:
                    byte_forms.add(i)
                    if text in BYTES:
                        byte_values.add(BYTES[text])
                if text in MARKS:
                    marks.add(text)
                if bad_text is None and not text.isascii() and not _is_utf8(text):
                    bad_text = i
            self._at += length
        ordered = np.sort(np.frombuffer(hashes, dtype=np.int64))
        distinct = not bool((ordered[1:] == ordered[:-1]).any())
        return Tokens(count, distinct, bad_text, frozenset(byte_forms), frozenset(byte_values), frozenset(marks))

    def _fill(self, count: int, what: str) -> None:
        """Make at least `count` more bytes stand in the window; need() has seen that the file is long enough."""
        self._base, self._at, self._buffer = self.position, 0, self._buffer[self._at :]
        wanted = min(max(count, WINDOW), self._end - self._base)
        while len(self._buffer) < count:
            try:
                more = os.pread(self._fd, wanted - len(self._buffer), self._base + len(self._buffer))
            except OSError as error:
                raise MeshError("unreadable", f"the header cannot be read: {error.strerror}") from None
            if not more:
                raise bad(f"the file ends inside the {what}")
            self._buffer += more


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
