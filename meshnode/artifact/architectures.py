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
    invariant: types of weights with which the bits of a position depend on nothing but the session's own tokens;
    fast: types of weights with which the fast kernels are exact at every cut, too.
    """

    truncate: Literal["any", "none"]
    planes: int
    invariant: frozenset[str]
    fast: frozenset[str]


def _read() -> tuple[dict[str, Certificate], dict[str, str], dict[str, tuple[str, ...]]]:
    table = json.loads(SOURCE.read_text(encoding="utf-8"))
    sets = {name: tuple(types) for name, types in table["types"].items()}
    exact = {}
    for name, row in table["exact"].items():
        invariant, fast = (frozenset(sets[row[numerics]]) for numerics in ("invariant", "fast"))
        exact[name] = Certificate(row["truncate"], row["planes"], invariant, fast)
    return exact, table["refused"], sets


_EXACT, _REFUSED, SETS = _read()
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
    rows = []
    for name, c in sorted(ARCHITECTURES.items()):
        invariant, fast = (f"{sum(number[t] for t in types):#x}u" for types in (c.invariant, c.fast))
        rows.append(f'    {{"{name}", {str(c.truncate == "any").lower()}, {c.planes}, {invariant}, {fast}}},')
    refused = [f"    {{{json.dumps(name)}, {json.dumps(why)}}}," for name, why in sorted(REFUSED.items())]
    first = "// Written by meshnode/artifact/architectures.py"
    tables = ("inline constexpr Certificate kCertificates[] = {", *rows, "};")
    return "\n".join([first, *tables, "inline constexpr Refusal kRefused[] = {", *refused, "};", ""])


def page() -> str:
    """docs/architectures.md."""
    names = {frozenset(types): name for name, types in SETS.items()}
    rows = [
        f"| `{name}` | {c.truncate} | {c.planes} | {names[c.invariant]} | {names[c.fast]} |"
        for name, c in sorted(ARCHITECTURES.items())
    ]
    refused = [f"| `{name}` | {why} |" for name, why in sorted(REFUSED.items())]
    sets = [f"- **{name}**: {', '.join(types) or 'with no weights'}" for name, types in sorted(SETS.items())]
    return _PAGE.format(rows="\n".join(rows), refused="\n".join(refused), sets="\n".join(sets))


_PAGE = """# Architectures

Written by `make arch-sweep`, from what it found (`meshnode/artifact/architectures.json`).

The sweep builds the pinned engine's own generator of test models, which writes a small model of random weights for
every architecture that it can, and cuts each at every layer. A chain of two stages has to give the very bits of the
whole model, in a prefill, a chunked prefill and decode. Under invariant numerics a session also has to give the same
bits alone and beside others, at once, in chunks of 7 and one by one; and after it was taken back or forked, the bits of
one that never was. Each model is tried with weights of F32, of F16 and BF16 by turns, and of quantized types by turns,
with one expert of several in use. In three architectures (an attention, experts, a recurrence) each type is also tried
alone. What is not listed is refused by name, before anything is loaded.

## Served

Positions that a session can keep when it is taken back (sliding windows lose none, for the cache of their layers is as
long as the others'; a recurrent state is the sum of all it saw: it keeps none); values that make up a position; the
weights that invariant and fast numerics are offered with.

| architecture | keeps | planes | invariant | fast |
|---|---|---|---|---|
{rows}

{sets}

Where a file brings two sets of rotary factors (phi3, minicpm3), the engine chooses by the context that it is loaded
with. The recipe says which, so hops that chose differently are never taken for alike.

`dots3note` and `minimax-01` have no fast numerics with quantized weights: they multiply arrays of four dimensions, on
which the pinned engine's kernels for repacked weights abort. `minimax-01` has no invariant ones either: its linear
attention sums each chunk by itself, so the bits depend on how a prompt was cut.

## Refused

`cogvlm` is exact at every cut, but its graph never picks the positions whose logits are wanted: with several sessions
in a batch each gets those of others.

| architecture | reason |
|---|---|
{refused}
"""


def main(arguments: list[str]) -> int:
    path = Path(__file__).parents[2] / "docs" / "architectures.md"
    if "--check" in arguments:
        return 0 if path.read_text(encoding="utf-8") == page() else 1
    path.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
