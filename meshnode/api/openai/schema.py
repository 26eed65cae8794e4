"""JSON schemas as grammars: every text of the grammar is JSON that the schema allows. Pure, and bounded.

Where GBNF cannot say all that a schema allows, less of it is said, never more: properties come in the order of the
schema, properties that it does not name only where it asks for them, and a `oneOf` is an `anyOf` as long as the text
that a model writes fits one of them. What would need more (`not`, `if`, `uniqueItems`, ...) is refused by its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from . import pattern as patterns
from .gbnf import (
    CHAR,
    JSON_RULES,
    WS,
    characters,
    either,
    inverse,
    json_literal,
    literal,
    natural,
    real,
    times,
    whole,
)
from .pattern import PatternFault

ANY_OBJECT = "root ::= object\n" + JSON_RULES
MAX_BYTES = 1 << 16  # of a grammar, as the wire has it
MAX_SCHEMAS = 2000  # looked at, each reference counted once
MAX_DEPTH = 40
MAX_NAME = 100  # of a property, in characters, where others must differ from it
MAX_REPEAT = 4096  # of characters or items
_ANNOTATIONS = frozenset(
    (
        "title", "description", "default", "examples", "example", "$schema", "$id", "$comment", "$defs", "definitions",
        "deprecated", "readOnly", "writeOnly", "$anchor", "contentEncoding", "contentMediaType", "strict",
    )
)  # fmt: skip
_OF_TYPE = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "boolean": set[str](),
    "null": set[str](),
}
_DATE = r"[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])"  # days that every month has
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[-+](?:0[0-9]|1[0-4]):[0-5][0-9])"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = r"[a-zA-Z0-9](?:[-a-zA-Z0-9]{0,30}[a-zA-Z0-9])?"
_FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "duration": r"^P(?:[0-9]{1,6}D|[0-9]{1,6}W|(?:[0-9]{1,4}D)?T(?:[0-9]{1,6}H|[0-9]{1,6}M|[0-9]{1,6}S))$",
    "uuid": r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
    "ipv4": rf"^{_BYTE}(?:\.{_BYTE}){{3}}$",
    "ipv6": r"^[0-9a-f]{1,4}(?::[0-9a-f]{1,4}){7}$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL}){{0,4}}$",
    "email": rf"^[a-zA-Z0-9_+-]{{1,30}}(?:\.[a-zA-Z0-9_+-]{{1,20}}){{0,2}}@{_LABEL}(?:\.{_LABEL}){{1,3}}$",
    "uri": rf"^https?://{_LABEL}(?:\.{_LABEL}){{0,4}}(?:/[-a-zA-Z0-9._~%]{{0,60}}){{0,8}}$",
}


class SchemaFault(ValueError):
    """Why a schema is not taken, and where in it."""


def to_gbnf(schema: Any) -> str:
    """The grammar of a schema. SchemaFault names what cannot be kept."""
    writer = _Writer(schema)
    try:
        body = writer.visit(schema, "#", 0)
    except RecursionError:
        raise SchemaFault("it is nested too deeply") from None
    rules = "".join(f"{name} ::= {said}\n" for name, said in writer.rules.items())
    base = JSON_RULES if writer.uses_any else f'string ::= "\\"" char* "\\""\n{CHAR}\n{WS}\n'
    text = f"root ::= {body}\n{rules}{base}"
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise SchemaFault("it has a text that is no valid Unicode") from None
    if size > MAX_BYTES:
        raise SchemaFault(f"its grammar has {size} bytes; {MAX_BYTES} are taken")
    return text


class _Writer:
    def __init__(self, root: Any) -> None:
        self._root = root
        self.rules: dict[str, str] = {}
        self.uses_any = False
        self._names: dict[str, str] = {}  # of what is referred to
        self._open: set[str] = set()  # references on the way to here, nothing having been written since
        self._seen = 0

    def rule(self, said: str) -> str:
        name = f"r{len(self.rules)}"
        self.rules[name] = said
        return name

    def visit(self, schema: Any, at: str, depth: int) -> str:
        """What a value of a schema looks like; at: where the schema stands."""
        self._seen += 1
        if self._seen > MAX_SCHEMAS or depth > MAX_DEPTH:
            raise SchemaFault(f"it is larger than {MAX_SCHEMAS} schemas or deeper than {MAX_DEPTH}")
        if schema is True or (isinstance(schema, dict) and not set(schema) - _ANNOTATIONS):
            self.uses_any = True
            return "value"
        if not isinstance(schema, dict):
            raise SchemaFault(f"{at} allows nothing or is no schema")
        keys = set(schema) - _ANNOTATIONS
        if schema.get("nullable") is True:
            inner = {key: value for key, value in schema.items() if key != "nullable"}
            return either([self.visit(inner, at, depth + 1), '"null"'])
        keys.discard("nullable")
        for key, write in (("$ref", self._ref), ("const", self._const), ("enum", self._enum), ("allOf", self._all)):
            if key in keys:
                self._alone(keys - ({"type"} if key in ("const", "enum") else set()), {key}, at)
                return write(schema, at, depth)
        for key in ("anyOf", "oneOf"):
            if key in keys:
                self._alone(keys - {"type"}, {key}, at)
                options = schema[key]
                if not isinstance(options, list) or not options:
                    raise SchemaFault(f"{at}/{key} is no list of schemas")
                return either([self.visit(one, f"{at}/{key}/{n}", depth + 1) for n, one in enumerate(options)])
        return self._typed(schema, keys, at, depth)

    def _alone(self, keys: set[str], allowed: set[str], at: str) -> None:
        if others := sorted(keys - allowed):
            raise SchemaFault(f"{at} has {others[0]!r} beside {' '.join(allowed)!r}, which is not offered")

    def _typed(self, schema: dict[str, Any], keys: set[str], at: str, depth: int) -> str:
        given = schema.get("type")
        if given is None:
            given = next((kind for kind, own in _OF_TYPE.items() if own & keys), None)
        kinds: list[Any] = given if isinstance(given, list) and given else [given]
        known = {"type"}
        for kind in kinds:
            if not isinstance(kind, str) or kind not in _OF_TYPE:
                unknown = sorted(keys - known)
                raise SchemaFault(f"{at} has a type or {unknown[0] if unknown else 'keyword'!r} that is not offered")
            known |= _OF_TYPE[kind]
        if others := sorted(keys - known):
            raise SchemaFault(f"{at} has {others[0]!r}, which is not offered")
        write: dict[str, Callable[[dict[str, Any], str, int], str]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "number": self._number,
            "integer": self._integer,
            "boolean": lambda *_: '("true" | "false")',
            "null": lambda *_: '"null"',
        }
        return either([write[kind](schema, at, depth) for kind in kinds])

    # references and choices

    def _ref(self, schema: dict[str, Any], at: str, depth: int) -> str:
        pointer = schema["$ref"]
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise SchemaFault(f"{at} refers to something outside of the schema")
        if pointer in self._open:
            raise SchemaFault(f"{at} refers to itself and nothing else")
        if pointer not in self._names:
            name = self._names[pointer] = self.rule("")
            self._open.add(pointer)
            self.rules[name] = self.visit(self._at(pointer), pointer, depth + 1)
            self._open.discard(pointer)
        return self._names[pointer]

    def _at(self, pointer: str) -> Any:
        found = self._root
        for step in pointer.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
                found = found[int(step)]
            elif isinstance(found, dict) and step in found:
                found = found[step]
            else:
                raise SchemaFault(f"it has nothing at {pointer[:80]!r}")
        return found

    def _const(self, schema: dict[str, Any], at: str, depth: int) -> str:
        return self._values([schema["const"]], at)

    def _enum(self, schema: dict[str, Any], at: str, depth: int) -> str:
        if not isinstance(schema["enum"], list) or not schema["enum"]:
            raise SchemaFault(f"{at}/enum is no list of values")
        return self._values(schema["enum"], at)

    def _values(self, values: list[Any], at: str) -> str:
        try:
            return either(json_literal(value) for value in values)
        except ValueError:
            raise SchemaFault(f"{at} has a value that is no JSON") from None

    def _all(self, schema: dict[str, Any], at: str, depth: int) -> str:
        """One schema, or objects that are put together."""
        parts = schema["allOf"]
        if not isinstance(parts, list) or not parts:
            raise SchemaFault(f"{at}/allOf is no list of schemas")
        if len(parts) == 1:
            return self.visit(parts[0], f"{at}/allOf/0", depth + 1)
        merged: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
        for part in parts:
            for _ in range(MAX_DEPTH):
                if isinstance(part, dict) and set(part) - _ANNOTATIONS == {"$ref"} and isinstance(part["$ref"], str):
                    part = self._at(part["$ref"])
            own = part.get("properties", {}) if isinstance(part, dict) else None
            if not isinstance(own, dict) or set(part) - _ANNOTATIONS - {"type", "properties", "required"}:
                raise SchemaFault(f"{at}/allOf is offered only of objects with properties")
            if set(own) & set(merged["properties"]):
                raise SchemaFault(f"{at}/allOf names a property twice")
            merged["properties"] |= own
            merged["required"] += part.get("required", [])
        return self._object(merged, at, depth)

    # objects and arrays

    def _inside(self, schema: Any, at: str, depth: int) -> str:
        """A value within an object or array: what is referred to on the way there may come again."""
        held, self._open = self._open, set()
        said = self.visit(schema, at, depth + 1)
        self._open = held
        return said

    def _object(self, schema: dict[str, Any], at: str, depth: int) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        lists = isinstance(properties, dict) and isinstance(required, list)
        if not lists or any(type(name) is not str for name in required):
            raise SchemaFault(f"{at} has properties or required that are none")
        more = schema.get("additionalProperties", not properties)
        required = dict.fromkeys(required)
        missing = [name for name in required if name not in properties]
        if missing and more is False:
            raise SchemaFault(f"{at} asks for the property {str(missing[0])[:80]!r}, which it does not allow")
        named = properties | {name: (more if isinstance(more, dict) else True) for name in missing}
        members = [
            (f'{json_literal(name)} ":" ws {self._inside(one, f"{at}/properties/{name}", depth)}', name in required)
            for name, one in named.items()
        ]
        other = None
        if more is not False:
            value = self._inside(more, f"{at}/additionalProperties", depth)
            other = f'{self._other_name(list(named))} ":" ws {value}'
        return f'"{{" ws {self._members(members, other)} ws "}}"'

    def _members(self, members: list[tuple[str, bool]], other: str | None) -> str:
        """In order; (member, whether it has to be there). Written from the end: what follows when one has come."""
        comma = 'ws "," ws'
        after = f"({comma} {other})*" if other else ""
        options = ['""', f"{other} {after}"] if other else ['""']  # what an object may begin with from here on
        for said, is_required in reversed(members):
            name = self.rule(said)
            if len(after) > 40:
                after = self.rule(after)
            options = [f"{name} {after}"] + ([] if is_required else options)
            following = f"{comma} {name}"
            after = f"{following} {after}" if is_required else f"({following})? {after}"
        return either(option.strip() for option in options)

    def _other_name(self, names: list[str]) -> str:
        """A property's name that is none of these. Only what differs from them early on may be escaped."""
        if not names:
            return "string"
        if any(len(name) > MAX_NAME for name in names):
            raise SchemaFault(f"a property's name is longer than {MAX_NAME} where others are allowed beside it")
        tree: dict[str, Any] = {}
        for name in names:
            node = tree
            for character in name:
                node = node.setdefault(character, {})
            node[""] = {}
        return f'"\\"" {self._unlike(tree)} "\\""'

    def _unlike(self, tree: dict[str, Any]) -> str:
        """The rest of a text that does not end where the tree has an end."""
        branches = {c: node for c, node in tree.items() if c}
        taken = sorted((ord(c), ord(c)) for c in branches)
        others = inverse([*taken, (0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0xD800, 0xDFFF)])
        different = characters(others)
        options = [] if "" in tree else ['""']
        options += [f"{different} char*"] if different else []
        for c, node in branches.items():
            if c not in '"\\' and ord(c) >= 0x20:
                options.append(f"{literal(c)} {self.rule(self._unlike(node))}")
        return either(options)

    def _array(self, schema: dict[str, Any], at: str, depth: int) -> str:
        first, items = schema.get("prefixItems", []), schema.get("items", True)
        least = self._count(schema, "minItems", at) or 0
        most = self._count(schema, "maxItems", at)
        if not isinstance(first, list):
            raise SchemaFault(f"{at}/prefixItems is no list of schemas")
        if "prefixItems" in schema and "items" not in schema:
            items = False
        if items is False:
            most = len(first) if most is None else min(most, len(first))
        if most is not None and least > most:
            raise SchemaFault(f"{at} asks for more items than it allows")
        own = [self._inside(one, f"{at}/prefixItems/{n}", depth) for n, one in enumerate(first[:most])]
        comma = 'ws "," ws'
        said = ""
        if most is None or most > len(own):
            item = self.rule(self._inside(items, f"{at}/items", depth))
            low, high = max(0, least - len(own)), None if most is None else most - len(own)
            if own:
                said = times(f"({comma} {item})", low, high)
            else:
                said = f"{item} {times(f'({comma} {item})', max(0, low - 1), None if high is None else high - 1)}"
                said = f"({said})?" if low == 0 else said
        for number, one in reversed(list(enumerate(own))):
            said = f"{f'{comma} ' if number else ''}{one} {said}".strip()
            said = f"({said})?" if number >= least else said
        return f'"[" ws {said} ws "]"' if said else '"[" ws "]"'

    def _count(self, schema: dict[str, Any], key: str, at: str) -> int | None:
        value = schema.get(key)
        if value is not None and (type(value) is not int or not 0 <= value <= MAX_REPEAT):
            raise SchemaFault(f"{at}/{key} is a number up to {MAX_REPEAT}")
        return value

    # scalars

    def _string(self, schema: dict[str, Any], at: str, depth: int) -> str:
        least, most = self._count(schema, "minLength", at) or 0, self._count(schema, "maxLength", at)
        pattern, form = schema.get("pattern"), schema.get("format")
        if most is not None and least > most:
            raise SchemaFault(f"{at} asks for more characters than it allows")
        if form is not None:
            if not isinstance(form, str) or form not in _FORMATS:
                raise SchemaFault(f"{at} has the format {str(form)[:40]!r}; offered are {', '.join(_FORMATS)}")
            if pattern is not None:
                raise SchemaFault(f"{at} has a format and a pattern, of which one is offered")
            pattern = _FORMATS[form]
        if pattern is not None:
            if (least, most) != (0, None):
                raise SchemaFault(f"{at} has a pattern or format and a length, of which one is offered")
            try:
                return self.rule(f'"\\"" {patterns.to_gbnf(str(pattern))} "\\""')
            except PatternFault as error:
                raise SchemaFault(f"{at}/pattern is not offered: {error}") from error
        if (least, most) == (0, None):
            return "string"
        return f'"\\"" {times("char", least, most)} "\\""'

    def _bounds(self, schema: dict[str, Any], at: str) -> tuple[float | None, bool, float | None, bool]:
        """(low, whether without it, high, whether without it)"""
        found: list[Any] = []
        for inclusive, exclusive, stricter in (
            ("minimum", "exclusiveMinimum", max),
            ("maximum", "exclusiveMaximum", min),
        ):
            bound, without = schema.get(inclusive), schema.get(exclusive)
            if isinstance(without, bool):  # of an older draft
                without, bound = (bound, None) if without else (None, bound)
            for value in (bound, without):
                if value is not None and (type(value) not in (int, float) or not abs(value) < 10**15):
                    raise SchemaFault(f"{at} has a bound that is no number below 10^15")
            if without is not None and (bound is None or stricter(bound, without) == without):
                found += [without, True]
            else:
                found += [bound, False]
        low, above, high, below = found
        return low, above, high, below

    def _integer(self, schema: dict[str, Any], at: str, depth: int) -> str:
        if schema.get("multipleOf", 1) != 1:
            raise SchemaFault(f"{at}/multipleOf is not offered")
        low, above, high, below = self._bounds(schema, at)
        least = None if low is None else math.floor(low) + 1 if above else math.ceil(low)
        most = None if high is None else math.ceil(high) - 1 if below else math.floor(high)
        said = whole(least, most)
        if said is None:
            raise SchemaFault(f"{at} allows no integer")
        return said

    def _number(self, schema: dict[str, Any], at: str, depth: int) -> str:
        if "multipleOf" in schema:
            raise SchemaFault(f"{at}/multipleOf is not offered")
        low, above, high, below = self._bounds(schema, at)
        if low is None and high is None:
            return f'"-"? {natural(0, None)} ("." [0-9]{{1,15}})? ([eE] [-+]? [0-9]{{1,2}})?'
        if any(bound is not None and bound != int(bound) for bound in (low, high)):
            raise SchemaFault(f"{at} has bounds that are not whole, which is not offered")
        said = real(None if low is None else int(low), None if high is None else int(high), above=above, below=below)
        if said is None:
            raise SchemaFault(f"{at} allows no number")
        return said
