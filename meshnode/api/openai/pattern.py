"""Regular expressions of JSON schemas as GBNF of what stands between a JSON string's quotes. Pure.

Taken: characters, sets, `.`, \\d \\w \\s and their opposites, groups, `|`, `* + ? {m} {m,} {m,n}` (lazy or not: it is
the same language), ^ at the beginning and $ at the end. Anything else is refused.
"""

from __future__ import annotations

from .gbnf import LARGEST, Ranges, characters, either, inverse, literal, times

MAX_DEPTH = 20  # of groups
MAX_REPEAT = 1000
_DIGIT: Ranges = [(0x30, 0x39)]
_WORD: Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACE: Ranges = [(0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x2028, 0x2029)]
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11}
_ANY = inverse([(10, 10), (13, 13), (0x2028, 0x2029)])


class PatternFault(ValueError):
    """Why a pattern is not taken."""


def to_gbnf(pattern: str) -> str:
    """PatternFault for what is not taken."""
    reader = _Reader(pattern)
    begin = "" if reader.take("^") else "char*"
    said = reader.alternatives(0)
    end = "" if reader.ended else "char*"
    if reader.at < len(pattern):
        raise PatternFault(f"{pattern[reader.at]!r} is out of place")
    if (not begin or not end) and reader.top_alternatives > 1:
        raise PatternFault("^ and $ beside | mean only one side of it: put a group around the alternatives")
    return " ".join(part for part in (begin, said, end) if part) or '""'


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self.at = 0
        self.ended = False  # by $
        self.top_alternatives = 1

    def take(self, what: str) -> bool:
        found = self._text.startswith(what, self.at)
        self.at += len(what) if found else 0
        return found

    def _next(self) -> str:
        if self.at >= len(self._text):
            raise PatternFault("it ends too early")
        self.at += 1
        return self._text[self.at - 1]

    def alternatives(self, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise PatternFault("its groups are nested too deeply")
        options = [self._sequence(depth)]
        while self.take("|"):
            options.append(self._sequence(depth))
        if depth == 0:
            self.top_alternatives = len(options)
        return either(option or '""' for option in options) if len(options) > 1 else options[0]

    def _sequence(self, depth: int) -> str:
        items = []
        while self.at < len(self._text) and self._text[self.at] not in "|)":
            if self._text[self.at] == "$" and depth == 0:
                self.at += 1
                self.ended = True
                if self.at < len(self._text):
                    raise PatternFault("$ stands before its end")
                break
            items.append(self._quantified(self._atom(depth)))
        return " ".join(item for item in items if item)

    def _atom(self, depth: int) -> str:
        c = self._next()
        if c == "(":
            if self.take("?") and not self.take(":"):
                raise PatternFault("of groups that begin with ? only (?: is taken")
            inner = self.alternatives(depth + 1)
            if not self.take(")"):
                raise PatternFault("a parenthesis is not closed")
            return f"({inner})" if inner else '("")'
        if c == "[":
            return _written(self._set())
        if c == ".":
            return _written(_ANY)
        if c == "\\":
            return _written(self._escape())
        if c in "*+?{}^$)":
            raise PatternFault(f"{c!r} is out of place")
        return _written([(ord(c), ord(c))])

    def _quantified(self, item: str) -> str:
        if self.take("*"):
            least, most = 0, None
        elif self.take("+"):
            least, most = 1, None
        elif self.take("?"):
            least, most = 0, 1
        elif self.take("{"):
            least, most = self._bounds()
        else:
            return item
        self.take("?")
        if self.at < len(self._text) and self._text[self.at] in "*+{":
            raise PatternFault("a repetition of a repetition")
        return times(item, least, most)

    def _bounds(self) -> tuple[int, int | None]:
        inner, closed, _ = self._text[self.at :].partition("}")
        low, comma, high = inner.partition(",")
        if not closed or not low.isdecimal() or not (high == "" or high.isdecimal()) or len(inner) > 9:
            raise PatternFault("a repetition is {m}, {m,} or {m,n}")
        self.at += len(inner) + 1
        least, most = int(low), int(low) if not comma else int(high) if high else None
        if max(least, most or 0) > MAX_REPEAT or (most is not None and most < least):
            raise PatternFault(f"a repetition has bounds up to {MAX_REPEAT}, in order")
        return least, most

    def _escape(self) -> Ranges:
        c = self._next()
        if c.lower() in _CLASSES:
            ranges = _CLASSES[c.lower()]
            return inverse(ranges) if c.isupper() else ranges
        if c in _CONTROLS:
            return [(_CONTROLS[c], _CONTROLS[c])]
        if c in "xu":
            digits = self._text[self.at : self.at + (2 if c == "x" else 4)]
            self.at += len(digits)
            try:
                code = int(digits, 16)
            except ValueError:
                raise PatternFault("an escape lacks its digits") from None
            return [(code, code)]
        if c.isalnum():
            raise PatternFault(f"\\{c} is not taken")
        return [(ord(c), ord(c))]

    def _set(self) -> Ranges:
        opposite = self.take("^")
        ranges: Ranges = []
        while not self.take("]"):
            low = self._member()
            if len(low) == 1 and low[0][0] == low[0][1] and self.take("-"):
                if self.take("]"):
                    ranges += [*low, (0x2D, 0x2D)]
                    break
                high = self._member()
                if len(high) != 1 or high[0][0] < low[0][0]:
                    raise PatternFault("a range of characters is the wrong way round")
                low = [(low[0][0], high[0][1])]
            ranges += low
        return inverse(ranges) if opposite else ranges

    def _member(self) -> Ranges:
        c = self._next()
        if c == "\\":
            return [(8, 8)] if self.take("b") else self._escape()
        return [(ord(c), ord(c))]


def _written(ranges: Ranges) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1] and 0x20 <= (code := ranges[0][0]) < 0xD800:
        return literal({'"': '\\"', "\\": "\\\\"}.get(chr(code), chr(code)))
    said = characters([(low, min(high, LARGEST)) for low, high in ranges])
    if said is None:
        raise PatternFault("it has a set of no characters")
    return said
