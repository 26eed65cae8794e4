"""The architectures that the engine is proven to cut at any layer, and why others are refused.

ARCHITECTURES: name -> Certificate      what is served
refusal(name) -> str                    why another one is not: the end of the sentence "architecture X is refused: ..."
header() -> str                         the same tables as C++, for the worker

All of it is read from architectures.json beside this file, which `make arch-sweep` writes: what each architecture of
the pinned engine did when a small model of it was cut at every layer. docs/architectures.md says how.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

from ..errors import MeshError
from .ggml import TENSOR_TYPES

SOURCE = Path(__file__).with_suffix(".json")
NEVER_SWEPT = "it was never proven"


class Certificate(NamedTuple):
    """What an architecture was proven to do, beyond being exact at every cut.

    truncate: what a session can keep: any number of its positions, or none; planes: values that make up a position;
    invariant: types of weights with which the bits of a position depend on nothing but the session's own tokens.
    """

    truncate: Literal["any", "none"]
    planes: int
    invariant: frozenset[str]


def _read() -> tuple[dict[str, Certificate], dict[str, str]]:
    table = json.loads(SOURCE.read_text(encoding="utf-8"))
    types = {kind: frozenset(names) for kind, names in table["types"].items()}
    exact = {
        name: Certificate(row["truncate"], row["planes"], types[row["types"]]) for name, row in table["exact"].items()
    }
    return exact, table["refused"]


_EXACT, _REFUSED = _read()
ARCHITECTURES = MappingProxyType(_EXACT)
REFUSED = MappingProxyType(_REFUSED)


def refusal(name: str) -> str:
    return REFUSED.get(name, NEVER_SWEPT)


def check(name: str) -> Certificate:
    """The certificate of an architecture; unsupported_architecture, with the reason, when it has none."""
    if name not in ARCHITECTURES:
        said = "".join(c if c.isprintable() else "?" for c in name)[:40]
        raise MeshError("unsupported_architecture", f"architecture '{said}' is refused: {refusal(name)}")
    return ARCHITECTURES[name]


def header() -> str:
    """A C++ header for native/certificate.h; types are bits, counted as the file format numbers them."""
    number = {kind.name: 1 << n for n, kind in TENSOR_TYPES.items()}
    rows = [
        f'    {{"{name}", {str(c.truncate == "any").lower()}, {c.planes}, {sum(number[t] for t in c.invariant):#x}u}},'
        for name, c in sorted(ARCHITECTURES.items())
    ]
    refused = [f"    {{{json.dumps(name)}, {json.dumps(why)}}}," for name, why in sorted(REFUSED.items())]
    return "\n".join(
        [
            "// Written by meshnode/artifact/architectures.py",
            "inline constexpr Certificate kCertificates[] = {",
            *rows,
            "};",
            "inline constexpr Refusal kRefused[] = {",
            *refused,
            "};",
            "",
        ]
    )


if __name__ == "__main__":
    sys.stdout.write(header())
