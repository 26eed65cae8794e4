"""Pieces of GBNF for JSON's scalars: texts, sets of characters, ranges of numbers. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable

DIGITS = 15  # of an integer or a fraction: what every reader of JSON keeps
LARGEST = 0x10FFFF
Ranges = list[tuple[int, int]]  # of code points, inclusive, sorted, apart

WS = 'ws ::= (" " | "\\n" " "{0,16})?'
# \u escapes only of what is a character by itself: all others can be written as they are
CHAR = (
    'char ::= [^"\\\\\\x00-\\x1f] | "\\\\" (["\\\\/bfnrt] | "u" ([0-9a-cefA-CEF] hex{3} | [dD] [0-7] hex{2}))\n'
    "hex ::= [0-9a-fA-F]"
)
JSON_RULES = f"""value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{{" ws (string ":" ws value (ws "," ws string ":" ws value)*)? ws "}}"
array ::= "[" ws (value (ws "," ws value)*)? ws "]"
string ::= "\\"" char* "\\""
number ::= "-"? ("0" | [1-9] [0-9]{{0,{DIGITS - 1}}}) ("." [0-9]{{1,{DIGITS}}})? ([eE] [-+]? [0-9]{{1,2}})?
{CHAR}
{WS}
"""
_ESCAPED: Ranges = [(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0xD800, 0xDFFF)]  # the last are halves of characters
_ESCAPES = {0x22: '"', 0x5C: "\\", 0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t"}


def literal(text: str) -> str:
    """A GBNF literal of a text."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'"{escaped}"'


def json_literal(value: object) -> str:
    return literal(json.dumps(value, ensure_ascii=False, allow_nan=False))


def either(options: Iterable[str]) -> str:
    """One of several; a group, so that it can stand anywhere."""
    given = list(dict.fromkeys(options))
    return given[0] if len(given) == 1 else "(" + " | ".join(given) + ")"


def times(item: str, least: int, most: int | None) -> str:
    """An item repeated."""
    if (least, most) == (1, 1):
        return item
    if most == 0:
        return ""
    return f"{item}{{{least},{'' if most is None else most}}}"


# sets of characters, as they stand within a JSON string


def inverse(ranges: Ranges) -> Ranges:
    left, at = [], 0
    for low, high in sorted(ranges):
        if low > at:
            left.append((at, low - 1))
        at = max(at, high + 1)
    return left + ([(at, LARGEST)] if at <= LARGEST else [])


def characters(ranges: Ranges) -> str | None:
    """A character of a set, escaped where JSON asks for it; None for a set without any that can be written."""
    plain = inverse([*inverse(ranges), *_ESCAPED])
    options = ["[" + "".join(map(_range, plain)) + "]"] if plain else []
    for code, escape in _ESCAPES.items():
        if any(low <= code <= high for low, high in ranges):
            options.append(literal("\\" + escape))
    return either(options) if options else None


def _range(pair: tuple[int, int]) -> str:
    low, high = pair
    return _code(low) if low == high else f"{_code(low)}-{_code(high)}"


def _code(code: int) -> str:
    if chr(code).isascii() and chr(code).isalnum():
        return chr(code)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


# numbers


def whole(low: int | None, high: int | None) -> str | None:
    """Integers from low to high, None for no bound; None for none of them."""
    if low is not None and high is not None and low > high:
        return None
    options = []
    if low is None or low < 0:
        below = 1 if high is None or high >= 0 else -high
        options.append('"-" ' + natural(below, None if low is None else -low))
    if high is None or high >= 0:
        options.append(natural(max(low or 0, 0), high))
    return either(options)


def natural(low: int, high: int | None) -> str:
    """Integers from low >= 0 to high without leading zeros; None: of as many digits as are kept."""
    top = 10 ** max(DIGITS, len(str(low))) - 1 if high is None else high
    options = []
    while low <= top:  # numbers of the same length together
        end = min(top, 10 ** len(str(low)) - 1)
        options += _same_length(str(low), str(end))
        low = end + 1
    return either(options)


def _same_length(low: str, high: str) -> list[str]:
    if not low:
        return [""]
    if set(low[1:]) <= {"0"} and set(high[1:]) <= {"9"}:
        return [_digit(low[0], high[0]) + (f" [0-9]{{{len(low) - 1}}}" if len(low) > 1 else "")]
    if low[0] == high[0]:
        return [f"{literal(low[0])} {either(_same_length(low[1:], high[1:]))}"]
    rest = len(low) - 1
    first, last = low[0], high[0]
    options = []
    if set(low[1:]) != {"0"}:
        options.append(f"{literal(first)} {either(_same_length(low[1:], '9' * rest))}")
        first = chr(ord(first) + 1)
    partial = set(high[1:]) != {"9"}
    until = chr(ord(last) - 1) if partial else last
    if first <= until:
        options.append(f"{_digit(first, until)} [0-9]{{{rest}}}")
    if partial:
        options.append(f"{literal(last)} {either(_same_length('0' * rest, high[1:]))}")
    return options


def _digit(low: str, high: str) -> str:
    return literal(low) if low == high else f"[{low}-{high}]"


def real(low: int | None, high: int | None, *, above: bool = False, below: bool = False) -> str | None:
    """Numbers from low to high, both whole; above, below: without the bound itself. None for none of them."""
    options = []
    if low is None or low < 0:
        ends_at_zero = high is None or high > 0
        least, most = 0 if ends_at_zero else -(high or 0), None if low is None else -low
        part = _positive(least, most, below and not ends_at_zero, above)
        options += ['"-" ' + either(part)] if part else []
    if high is None or high >= 0:
        from_zero = low is None or low < 0
        options += _positive(0 if from_zero else low or 0, high, above and not from_zero, below)
    return either(options) if options else None


def _positive(low: int, high: int | None, above: bool, below: bool) -> list[str]:
    """Options for low <= number <= high."""
    fraction = f'("." [0-9]{{1,{DIGITS}}})?'
    inner = None if high is None else high - 1
    options = []
    if above and (inner is None or low <= inner):
        options.append(f'{literal(str(low))} "." [0-9]{{0,{DIGITS - 1}}} [1-9]')
    first = low + above
    if inner is None or first <= inner:
        options.append(f"{natural(first, inner)} {fraction}")
    if high is not None and not below and not (above and high == low) and high >= low:
        options.append(f'{literal(str(high))} ("." "0")?')
    return options
