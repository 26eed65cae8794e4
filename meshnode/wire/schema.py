"""What turns frozen dataclasses into CBOR maps with integer keys, and back.

A message class declares each field with its key and its kind; a kind bounds what it lets in. Key 0 holds the message's
type. Unknown odd keys are ignored, unknown even ones refuse the message: so an old node survives what it may ignore
and refuses what it must understand.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from typing import Any, TypeVar, dataclass_transform

from ..errors import MeshError
from ..ids import Layers
from . import cbor

M = TypeVar("M")
TYPE_KEY = 0
_INTEGERS = frozenset((int,))


@dataclass(frozen=True)
class Kind:
    """How values of one kind look on the wire; both functions raise ValueError for what it does not let in."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def _refuse(why: str) -> ValueError:
    return ValueError(why)


def uint(limit: int = (1 << 53) - 1) -> Kind:
    def check(value: Any) -> int:
        if type(value) is not int or not 0 <= value <= limit:
            raise _refuse(f"no integer in 0..{limit}")
        return value

    return Kind(check, check)


def integer(low: int, high: int) -> Kind:
    def check(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise _refuse(f"no integer in {low}..{high}")
        return value

    return Kind(check, check)


def octets(least: int, most: int | None = None) -> Kind:
    top = least if most is None else most

    def check(value: Any) -> bytes:
        if type(value) is not bytes or not least <= len(value) <= top:
            raise _refuse(f"no byte string of {least}..{top}")
        return value

    return Kind(check, check)


def text(most: int, least: int = 0) -> Kind:
    def check(value: Any) -> str:
        if type(value) is not str or not least <= len(value.encode()) <= most:
            raise _refuse(f"no text of {least}..{most} bytes")
        return value

    return Kind(check, check)


def shaped(shape: str) -> Kind:
    """Text of one shape, a regular expression."""
    pattern = re.compile(shape)

    def check(value: Any) -> str:
        if type(value) is not str or not pattern.fullmatch(value):
            raise _refuse(f"not of the shape {shape}")
        return value

    return Kind(check, check)


def prose(most: int) -> Kind:
    """Text for people: what is too long is cut when it is sent."""
    kind = text(most)
    return Kind(lambda value: value.encode(errors="replace")[:most].decode(errors="ignore"), kind.decode)


def word(*choices: str) -> Kind:
    def check(value: Any) -> str:
        if type(value) is not str or value not in choices:
            raise _refuse(f"none of {', '.join(choices)}")
        return value

    return Kind(check, check)


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise _refuse("neither true nor false")
    return value


flag = Kind(_flag, _flag)


def listing(of: Kind, most: int, least: int = 0) -> Kind:
    """Decodes to a tuple."""

    def walk(values: Any, each: Callable[[Any], Any]) -> list[Any]:
        if not isinstance(values, (list, tuple)) or not least <= len(values) <= most:
            raise _refuse(f"no list of {least}..{most}")
        return [each(value) for value in values]

    return Kind(lambda values: walk(values, of.encode), lambda values: tuple(walk(values, of.decode)))


def pair(first: Kind, second: Kind) -> Kind:
    """Decodes to a tuple of two."""

    def walk(values: Any, a: Callable[[Any], Any], b: Callable[[Any], Any]) -> list[Any]:
        if not isinstance(values, (list, tuple)) or len(values) != 2:
            raise _refuse("no pair")
        return [a(values[0]), b(values[1])]

    return Kind(
        lambda values: walk(values, first.encode, second.encode),
        lambda values: tuple(walk(values, first.decode, second.decode)),
    )


def integers(limit: int, most: int, least: int = 0) -> Kind:
    """A list of integers in 0..limit, checked at once: prompts are long."""

    def check(values: Any) -> tuple[int, ...]:
        if not isinstance(values, (list, tuple)) or not least <= len(values) <= most:
            raise _refuse(f"no list of {least}..{most}")
        if any(type(value) is not int for value in values) or (values and not 0 <= min(values) <= max(values) <= limit):
            raise _refuse(f"not integers in 0..{limit}")
        return tuple(values)

    return Kind(lambda values: list(check(values)), check)


def _layers(value: Any) -> Layers:
    if not isinstance(value, (list, tuple)) or len(value) != 2 or any(type(v) is not int for v in value):
        raise _refuse("no pair of layers")
    try:
        return Layers(*value)
    except MeshError as error:
        raise _refuse(error.message) from error


layers = Kind(lambda value: [value.begin, value.end], _layers)


def nested(cls: type) -> Kind:
    return Kind(_encode_fields, lambda value: _decode_fields(cls, value))


def field(key: int, kind: Kind, *, default: Any = MISSING) -> Any:
    """A field of a message. With a default it is optional, and left out when it has that value."""
    metadata = {"key": key, "kind": kind}
    if default is MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


_BY_TYPE: dict[int, type] = {}


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def message(number: int) -> Callable[[type[M]], type[M]]:
    """Makes a class a message of its own: frozen, and named by a number on the wire."""

    def register(cls: type[M]) -> type[M]:
        made = dataclass(frozen=True)(cls)
        made.type_number = number  # type: ignore[attr-defined]
        assert number not in _BY_TYPE, number
        _BY_TYPE[number] = made
        return made

    return register


def messages() -> dict[int, type]:
    return dict(_BY_TYPE)


def encode(value: Any) -> bytes:
    """The deterministic bytes of a message."""
    return cbor.dumps({TYPE_KEY: type(value).type_number} | _encode_fields(value))


def decode(raw: bytes, *expected: type[M], max_items: int = cbor.MAX_ITEMS) -> M:
    """The message in `raw`; MeshError bad_frame unless it is a sound one of an expected type."""
    value = cbor.loads(raw, max_items=max_items)
    if not isinstance(value, dict):
        raise MeshError("bad_frame", "a message that is no map")
    number = value.pop(TYPE_KEY, None)
    cls = _BY_TYPE.get(number) if type(number) is int else None
    if cls is None or cls not in expected:
        names = " or ".join(c.__name__ for c in expected)
        raise MeshError("bad_frame", f"a message of type {number!r} where {names} was due")
    try:
        return _decode_fields(cls, value)  # type: ignore[no-any-return]
    except ValueError as error:
        raise MeshError("bad_frame", f"{cls.__name__}: {error}") from error


@functools.cache  # walked for every message, fixed for every class
def _fields(cls: type) -> tuple[tuple[str, int, Kind, Any], ...]:
    return tuple((f.name, f.metadata["key"], f.metadata["kind"], f.default) for f in dataclasses.fields(cls))


def _encode_fields(value: Any) -> dict[int, Any]:
    out = {}
    for name, key, kind, default in _fields(type(value)):  # type: ignore[arg-type]  # a class is hashable
        item = getattr(value, name)
        if default is not MISSING and item == default:
            continue
        try:
            out[key] = kind.encode(item)
        except ValueError as error:  # ours, before it is anybody's: a message we must not send
            raise ValueError(f"{type(value).__name__}.{name}: {error}") from error
    return out


def _decode_fields(cls: type, value: Any) -> Any:
    if not isinstance(value, dict) or not _INTEGERS.issuperset(map(type, value)):
        raise _refuse("no map with integer keys")
    taken = {}
    for name, key, kind, default in _fields(cls):
        if key in value:
            try:
                taken[name] = kind.decode(value.pop(key))
            except ValueError as error:
                raise _refuse(f"{name}: {error}") from error
            if default is not MISSING and taken[name] == default:
                raise _refuse(f"{name}: a default that is spelled out")
        elif default is MISSING:
            raise _refuse(f"{name} is missing")
    if value and (unknown := [key for key in value if key % 2 == 0]):
        raise _refuse(f"unknown even keys {unknown}")
    return cls(**taken)


def encode_nested(value: Any) -> bytes:
    """The deterministic bytes of a value that is no message of its own, for hashing."""
    return cbor.dumps(_encode_fields(value))
