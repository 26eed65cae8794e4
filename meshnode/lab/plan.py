"""What a lab is to run, checked against the model before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..artifact.identity import describe, open_artifact
from ..config import NUMERICS, cores
from ..errors import MeshError
from ..ids import Layers, gaps, share_evenly

DEFAULT_NODES = 3
MAX_NODES = 32  # each is a process of 100 MB and more


@dataclass(frozen=True)
class Plan:
    """One serving node a range, in order, and an entry node."""

    model: Path
    n_layer: int
    layers: tuple[Layers, ...]
    threads: int
    numerics: str = NUMERICS[0]


def plan(
    model: Path,
    nodes: int | None = None,
    layers: Sequence[Layers] | None = None,
    threads: int | None = None,
    numerics: str | None = None,
) -> Plan:
    """MeshError bad_layers when ranges do not fit the model or leave a gap; usage; those of the model's file."""
    with open_artifact(model) as artifact:
        n_layer = describe(artifact).n_layer
    if layers is None:
        count = DEFAULT_NODES if nodes is None else nodes
        _bounded(count)
        if count > n_layer:
            raise MeshError(
                "bad_layers",
                f"the model has {count_of(n_layer, 'layer')}: at most {count_of(n_layer, 'node')}, not {count}",
            )
        ranges = tuple(share_evenly(n_layer, count))
    else:
        if nodes is not None and nodes != len(layers):
            raise MeshError(
                "bad_layers",
                f"{count_of(nodes, 'node')} cannot hold {count_of(len(layers), 'range')}",
                hint="give one range a node",
            )
        _bounded(len(layers))
        ranges = tuple(part.within(n_layer) for part in layers)
        if missing := gaps(list(ranges), n_layer):
            named = ", ".join(map(str, missing))
            raise MeshError("bad_layers", f"no node holds the layers {named}", hint=f"add a node for {named}")
    if threads is not None and threads < 1:
        raise MeshError("usage", f"{threads} threads cannot work")
    return Plan(model.absolute(), n_layer, ranges, threads or max(1, cores() // len(ranges)), numerics or NUMERICS[0])


def count_of(number: int, thing: str) -> str:
    """`1 node`, `2 nodes`"""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _bounded(count: int) -> None:
    if not 1 <= count <= MAX_NODES:
        raise MeshError("usage", f"a lab has 1 to {MAX_NODES} serving nodes, not {count}")
