"""Schemas as grammars: all that is written keeps the schema, and what people expect can be written."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest

from meshnode.api.openai.gbnf import JSON_RULES, natural, real, whole
from meshnode.api.openai.pattern import PatternFault
from meshnode.api.openai.pattern import to_gbnf as of_pattern
from meshnode.api.openai.schema import ANY_OBJECT, SchemaFault, to_gbnf

from .gbnf import Gbnf

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 9},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "nick": {"type": ["string", "null"]},
        "tags": {"type": "array", "items": {"enum": ["a", 'b"\\', 3, None]}, "maxItems": 3},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "number"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value"],
        }
    },
    "$ref": "#/$defs/node",
}
SCHEMAS: list[tuple[Any, list[Any], list[Any]]] = [  # a schema, values that it is to take, and values that it is not
    (
        PERSON,
        [{"name": "Jo", "tags": []}, {"name": "é", "age": 7, "nick": None, "tags": ["a", 3]}],
        [
            {"name": "", "tags": []},
            {"name": "Jo"},
            {"name": "Jo", "age": 131, "tags": []},
            {"name": "Jo", "tags": [], "x": 1},
            {"name": "Jo", "tags": ["a"] * 4},
            {"name": "0123456789", "tags": []},
        ],
    ),
    (TREE, [{"value": 1}, {"value": -1.5e3, "children": [{"value": 2, "children": []}]}], [{"children": []}, []]),
    ({"anyOf": [{"const": "x"}, {"type": "integer"}]}, ["x", 5, -3], ["y", 1.5]),
    (
        {"oneOf": [{"$ref": "#/definitions/a"}, {"type": "null"}], "definitions": {"a": {"type": "boolean"}}},
        [True, None],
        [0],
    ),
    (
        {"type": "object", "properties": {"ab": {"const": 1}}, "additionalProperties": {"type": "boolean"}},
        [{}, {"ab": 1}, {"ab": 1, "x": True, "a": False, "abc": True}, {"x": True}],
        [{"ab": True}, {"x": 1}],
    ),
    (
        {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}, "c": {"type": "null"}}},
        [{}, {"a": None}, {"b": None}, {"c": None}, {"a": None, "c": None}, {"a": None, "b": None, "c": None}],
        [{"d": None}],
    ),
    ({"type": "array", "items": {"type": "boolean"}, "minItems": 2}, [[True, False], [True] * 5], [[], [True], [1, 2]]),
    (
        {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": {"const": 3}, "minItems": 1},
        [[1], [1, 2], [1, 2, 3, 3]],
        [[], [2], [1, 3]],
    ),
    ({"type": "array", "prefixItems": [{"const": 1}, {"const": 2}]}, [[], [1], [1, 2]], [[1, 2, 3]]),
    ({"type": "array"}, [[], [1, "a", {"b": [None]}]], [{}]),
    ({}, [1, "a", None, [], {"a": {}}], []),
    ({"type": "object"}, [{}, {"a": [1, {"b": "c"}]}], [1]),
    ({"type": "object", "required": ["a"]}, [{"a": 1}, {"a": {}, "b": 2}], [{}, {"b": 1}]),
    ({"type": "integer", "minimum": -17, "exclusiveMaximum": 305}, [-17, -9, 0, 1, 99, 100, 304], [-18, 305, 1000]),
    ({"type": "integer", "exclusiveMinimum": 9.5}, [10, 11, 99, 123456], [9, 0, -5]),
    ({"type": "integer", "maximum": -3}, [-3, -4, -1000], [-2, 0, 5]),
    ({"type": "number", "minimum": 0, "maximum": 1}, [0, 0.25, 1, 1.0], [1.5, -0.1, 2]),
    ({"type": "number", "exclusiveMinimum": 0}, [0.001, 1, 22.5], [0, -1]),
    ({"type": "number", "maximum": -2}, [-2, -2.5, -100.125], [-1.9, 0, 3]),
    ({"type": "string", "pattern": '^[A-Z]{2}-\\d+(a|"b")?$'}, ["AB-1", "ZZ-999a", 'QQ-0"b"'], ["A-1", "AB-", "AB-1x"]),
    ({"type": "string", "pattern": "b+c"}, ["bc", "xxbbcyy"], ["b", "c"]),
    (
        {"type": "string", "format": "date-time"},
        ["2024-02-28T23:59:59Z", "1999-12-01T00:00:00.5+02:00"],
        ["2024-02-28"],
    ),
    ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123"]),
    ({"type": "string", "format": "email"}, ["ab.c@d-e.org"], ["a@", "@b.c"]),
    ({"type": "string", "format": "ipv4"}, ["127.0.0.1", "255.249.199.99"], ["256.1.1.1", "1.2.3"]),
    (
        {
            "allOf": [{"$ref": "#/$defs/a"}, {"properties": {"y": {"const": 2}}, "required": ["y"]}],
            "$defs": {"a": {"type": "object", "properties": {"x": {"const": 1}}}},
        },
        [{"x": 1, "y": 2}, {"y": 2}],
        [{"x": 1}],
    ),
    ({"type": "string", "nullable": True}, ["a", None], [1]),
]


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_what_a_schema_allows_and_nothing_else_is_written(number: int) -> None:
    schema, good, bad = SCHEMAS[number]
    grammar = Gbnf(to_gbnf(schema))
    for value in good:
        for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, separators=(",", ":"))):
            assert grammar.takes(text), text
    for value in bad:
        assert not grammar.takes(json.dumps(value)), value
    draw = random.Random(number)
    checker = jsonschema.FormatChecker()
    plain = json.loads(
        json.dumps(schema)
        .replace('"nullable": true', '"title": "x"')
        .replace('"string", "title"', '["string", "null"], "title"')
    )
    for _ in range(60):
        text = grammar.write(draw)
        value = json.loads(text)
        jsonschema.validate(value, plain, format_checker=checker)
        text.encode()
        assert grammar.takes(text)


def test_a_property_of_the_schema_does_not_come_again_among_the_others() -> None:
    schema = {"properties": {"ab": {"const": 1}}, "additionalProperties": {"type": "boolean"}}
    grammar = Gbnf(to_gbnf(schema))
    assert grammar.takes('{"ab": 1, "b\\u0061": true}')
    assert not grammar.takes('{"ab": 1, "ab": true}')
    assert not grammar.takes('{"ab": 1, "a\\u0062": true}')


def test_any_object_is_an_object() -> None:
    grammar = Gbnf(ANY_OBJECT)
    assert grammar.takes('{"a": [1, {"b": "\\u00e9"}], "c": -1.5e+10}')
    assert not grammar.takes("[]")
    assert not grammar.takes('{"a": "\\ud800"}')  # half a character
    for seed in range(100):
        assert isinstance(json.loads(grammar.write(random.Random(seed))), dict)


@pytest.mark.parametrize("low", [None, -1234, -100, -10, -9, -1, 0, 1, 5, 9, 10, 19, 100, 987])
@pytest.mark.parametrize("high", [None, -987, -10, -1, 0, 1, 9, 10, 11, 99, 100, 1000, 1234])
def test_ranges_of_numbers_are_exact(low: int | None, high: int | None) -> None:
    integers, reals = whole(low, high), real(low, high)
    if low is not None and high is not None and low > high:
        assert integers is None
        return
    assert integers
    assert reals
    both = Gbnf(f"root ::= {integers}\n"), Gbnf(f"root ::= {reals}\n")
    edges = {n + d for n in (low or 0, high or 0) for d in (-2, -1, 0, 1, 2)} | {-2000, -99, -5, 0, 7, 50, 1999}
    for value in edges:
        inside = (low is None or value >= low) and (high is None or value <= high)
        for grammar in both:
            assert grammar.takes(str(value)) == inside, value
        beside = value + 0.5
        inside = (low is None or beside >= low) and (high is None or beside <= high)
        assert both[1].takes(str(beside)) == inside, beside


def test_numbers_have_no_leading_zeros() -> None:
    grammar = Gbnf(f"root ::= {natural(0, None)}\n")
    assert grammar.takes("0")
    assert not grammar.takes("01")


PATTERNS = [
    "^a$",
    "^[^a-c\\s]+$",
    "^\\w+@\\w+\\.(com|org)$",
    "x",
    "^(ab|cd){1,3}$",
    "^.{3}$",
    '^["\\\\]+$',
    "^\\u00e9?é*$",
    "^a|b",
    "^(?:\\D\\d)+",
    "a*?b$",
    "^[-a]+[b-]$",
    "^[\\]\\[]$",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_mean_what_they_mean_elsewhere(pattern: str) -> None:
    if pattern == "^a|b":
        with pytest.raises(PatternFault):
            of_pattern(pattern)
        return
    grammar = Gbnf(f'root ::= "\\"" {of_pattern(pattern)} "\\""\n{JSON_RULES}')
    for seed in range(100):
        assert re.search(pattern, json.loads(grammar.write(random.Random(seed))), re.ASCII)
    for text in (
        "a",
        "b",
        "ab",
        "x",
        "éé",
        "abcd",
        "xyz",
        "a@b.com",
        '"\\"',
        "1 2",
        "a-b",
        "]",
        "",
        "aab\n",
        "\t",
        "😀ab",
    ):
        for said in (json.dumps(text), json.dumps(text, ensure_ascii=False)):
            if "\\u" not in said:
                assert grammar.takes(said) == bool(re.search(pattern, text, re.ASCII)) or text == "aab\n", said


@pytest.mark.parametrize(
    "schema",
    [
        False,
        5,
        "x",
        {"type": "thing"},
        {"not": {}},
        {"type": "array", "uniqueItems": True},
        {"if": {}, "then": {}},
        {"$ref": "http://example.org/schema"},
        {"$ref": "#/$defs/none"},
        {"$ref": "#"},
        {"enum": []},
        {"anyOf": []},
        {"type": "string", "format": "color"},
        {"type": "string", "pattern": "(?=a)"},
        {"type": "string", "pattern": "("},
        {"type": "string", "pattern": "a\\1"},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "integer", "minimum": 2, "maximum": 1},
        {"type": "number", "multipleOf": 0.1},
        {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
        {"type": "array", "minItems": 5, "maxItems": 1},
        {"type": "object", "properties": [], "required": []},
        {"required": [1]},
        {"enum": ["\ud800"]},
        {"type": "object", "required": ["x"], "properties": {"y": {}}},
        {"type": "array", "minItems": 10**9},
        {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}, "$ref": "#/$defs/a"},
        {"enum": ["x" * 70000]},
        {"type": []},
        {"type": [[]]},
        {"enum": [float("nan")]},
        {"$ref": []},
    ],
)
def test_what_cannot_be_kept_is_refused(schema: Any) -> None:
    with pytest.raises(SchemaFault):
        to_gbnf(schema)


def test_schemas_are_bounded() -> None:
    deep: Any = {"type": "string"}
    for _ in range(50):
        deep = {"type": "array", "items": deep}
    wide = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(3000)}}
    const: Any = []
    for _ in range(900):
        const = [const]
    for schema in (deep, wide, {"type": "object", "properties": {"a" * 2000: {}}, "additionalProperties": True}):
        with pytest.raises(SchemaFault):
            to_gbnf(schema)
    assert to_gbnf({"const": const})
