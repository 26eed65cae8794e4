"""Typed access to metadata: the type the engine demands of a key, and the values it does not abort or go wrong on."""

from __future__ import annotations

from .cursor import bad, quote
from .header import Array, Header

MAX_LAYERS = 512  # the engine's


class Keys:
    """The metadata of one header. Every getter raises bad_gguf for a wrong type or a value out of its bounds."""

    def __init__(self, header: Header, prefix: str = "") -> None:
        self._metadata, self._prefix = header.metadata, prefix

    def __contains__(self, key: str) -> bool:
        return self._prefix + key in self._metadata

    def whole(self, key: str, low: int, high: int, default: int | None = None, kind: str = "u32") -> int:
        """A whole number in [low, high]; default None: the key has to be there."""
        value = self._get(key, kind, default)
        assert isinstance(value, int)
        if key in self and not low <= value <= high:
            raise bad(f"{self.name(key)} is {value}, not within {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A number in [low, high]."""
        value = self._get(key, "f32", default)
        assert isinstance(value, int | float)
        if not low <= value <= high:  # so written, it refuses a NaN too
            raise bad(f"{self.name(key)} is {value}, not within {low:g} to {high:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._get(key, "bool", default))

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, "str", default)
        assert isinstance(value, str)
        return value

    def array(self, key: str, kinds: tuple[str, ...], *, required: bool) -> Array | None:
        """An array with elements of one of these types."""
        if key not in self and not required:
            return None
        value = self._get(key, "arr", None)
        assert isinstance(value, Array)
        if value.type not in kinds:
            raise bad(f"{self.name(key)} is an array of {value.type}, not of {' or '.join(kinds)}")
        return value

    def alike(self, key: str, n_layer: int, low: int, high: int, default: int | None = None) -> int:
        """A whole number for all layers: one, or an array of one a layer whose values are equal."""
        found = self._metadata.get(self._prefix + key)
        if found is None or found.type != "arr":
            return self.whole(key, low, high, default)
        values = self.array(key, ("u32", "i32"), required=True)
        assert values is not None
        if values.count != n_layer:
            raise bad(f"{self.name(key)} has {values.count} values for {n_layer} layers")
        if len(distinct := set(values.values())) != 1:
            raise bad(f"{self.name(key)} differs between layers, which this architecture cannot")
        value = int(distinct.pop())
        if not low <= value <= high:
            raise bad(f"{self.name(key)} is {value}, not within {low} to {high}")
        return value

    def each(self, key: str, n_layer: int, low: int, high: int) -> tuple[int, ...]:
        """A whole number for each layer, from one for all or from an array; none where the key is not there."""
        found = self._metadata.get(self._prefix + key)
        if found is None:
            return ()
        if found.type != "arr":
            return (self.whole(key, low, high),) * n_layer
        array = self.array(key, ("u32", "i32"), required=True)
        assert array is not None
        if array.count != n_layer:
            raise bad(f"{self.name(key)} has {array.count} values for {n_layer} layers")
        values = tuple(int(value) for value in array.values())
        if wrong := [value for value in values if not low <= value <= high]:
            raise bad(f"{self.name(key)} is {wrong[0]} in one layer, not within {low} to {high}")
        return values

    def name(self, key: str) -> str:
        """As it may stand in a message."""
        return quote(self._prefix + key)[1:-1]

    def _get(self, key: str, kind: str, default: object) -> object:
        found = self._metadata.get(self._prefix + key)
        if found is None:
            if default is None:
                raise bad(f"{self.name(key)} is missing")
            return default
        if found.type != kind:
            raise bad(f"{self.name(key)} has the type {found.type}, not {kind}")
        return found.value
