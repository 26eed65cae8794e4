"""GBNF for tests: reads a grammar, writes texts of it by chance, and says whether a text is one."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

# ("chars", [(low, high)]) | ("rule", name) | ("any", [sequences]) | ("times", item, least, most)
Item = tuple
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


@dataclass
class Gbnf:
    text: str
    at: int = 0
    rules: dict[str, Item] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._space(True)
        while self.at < len(self.text):
            name = self._name()
            self._space(False)
            assert self._take("::="), self.text[self.at :][:40]
            self._space(True)
            assert name not in self.rules, name
            self.rules[name] = self._alternates(False)
            self._space(True)

    def _space(self, lines: bool) -> None:
        while self.at < len(self.text) and self.text[self.at] in (" \t\r\n" if lines else " \t"):
            self.at += 1

    def _take(self, what: str) -> bool:
        found = self.text.startswith(what, self.at)
        self.at += len(what) if found else 0
        return found

    def _name(self) -> str:
        match = re.compile(r"[A-Za-z0-9-]+").match(self.text, self.at)
        assert match, self.text[self.at :][:40]
        self.at = match.end()
        return match[0]

    def _alternates(self, nested: bool) -> Item:
        options = [self._sequence(nested)]
        while self._take("|"):
            self._space(True)
            options.append(self._sequence(nested))
        return ("any", options)

    def _sequence(self, nested: bool) -> list[Item]:
        items: list[Item] = []
        while self.at < len(self.text):
            c = self.text[self.at]
            if c == '"':
                self.at += 1
                item: Item = ("any", [[]])
                while not self._take('"'):
                    one = self._character()
                    item[1][0].append(("chars", [(one, one)]))
            elif c == "[":
                item = self._set()
            elif c == "(":
                self.at += 1
                self._space(True)
                item = self._alternates(True)
                assert self._take(")")
            elif c.isalnum() or c == "-":
                item = ("rule", self._name())
            else:
                break
            for mark, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
                if self._take(mark):
                    item = ("times", item, *bounds)
            if self._take("{"):
                inner, _, _ = self.text[self.at :].partition("}")
                self.at += len(inner) + 1
                low, comma, high = inner.partition(",")
                item = ("times", item, int(low), int(low) if not comma else int(high) if high else None)
            items.append(item)
            self._space(nested)
        return items

    def _set(self) -> Item:
        self.at += 1
        opposite = self._take("^")
        given = []
        while not self._take("]"):
            low = high = self._character()
            if self.text[self.at] == "-" and self.text[self.at + 1] != "]":
                self.at += 1
                high = self._character()
            given.append((low, high))
        if not opposite:
            return ("chars", given)
        left, at = [], 0
        for low, high in sorted(given):
            left += [(at, low - 1)] if low > at else []
            at = max(at, high + 1)
        return ("chars", [*left, (at, 0x10FFFF)])

    def _character(self) -> int:
        c = self.text[self.at]
        self.at += 1
        if c != "\\":
            return ord(c)
        c = self.text[self.at]
        self.at += 1
        if c in "xuU":
            digits = {"x": 2, "u": 4, "U": 8}[c]
            self.at += digits
            return int(self.text[self.at - digits : self.at], 16)
        return ord(_ESCAPES.get(c, c))

    # writing

    def write(self, draw: random.Random, item: Item = ("rule", "root"), depth: int = 0) -> str:
        kind = item[0]
        if kind == "rule":
            return self.write(draw, self.rules[item[1]], depth + 1)
        if kind == "any":
            options = item[1]
            if depth > 30:  # the way out: what has the fewest rules in it
                options = sorted(options, key=lambda one: str(one).count("rule"))[:1]
            return "".join(self.write(draw, one, depth) for one in draw.choice(options))
        if kind == "times":
            _, inner, least, most = item
            count = draw.randint(least, min(least + (0 if depth > 30 else 3), most if most is not None else 1 << 30))
            return "".join(self.write(draw, inner, depth) for _ in range(count))
        low, high = draw.choice(item[1])
        return chr(draw.randint(low, min(high, max(low, 0x7E)) if draw.random() < 0.9 or high > 0xFFFF else high))

    # reading

    def takes(self, text: str) -> bool:
        return len(text) in self._ends(("rule", "root"), text, 0, {})

    def _ends(self, item: Item, text: str, at: int, known: dict) -> frozenset[int]:
        key = (id(item) if item[0] != "rule" else item[1], at)
        if key in known:
            return known[key]
        known[key] = frozenset()  # a left recursion would go round here
        kind = item[0]
        if kind == "rule":
            found = self._ends(self.rules[item[1]], text, at, known)
        elif kind == "chars":
            fits = at < len(text) and any(low <= ord(text[at]) <= high for low, high in item[1])
            found = frozenset({at + 1} if fits else ())
        elif kind == "any":
            ends: set[int] = set()
            for sequence in item[1]:
                now = {at}
                for one in sequence:
                    now = {end for begin in now for end in self._ends(one, text, begin, known)}
                ends |= now
            found = frozenset(ends)
        else:
            _, inner, least, most = item
            now, ends, count = {at}, {at} if least == 0 else set(), 0
            while now and (most is None or count < most):
                now = {end for begin in now for end in self._ends(inner, text, begin, known)} - (
                    ends if count >= least else set()
                )
                count += 1
                if count >= least:
                    ends |= now
            found = frozenset(ends)
        known[key] = found
        return found
