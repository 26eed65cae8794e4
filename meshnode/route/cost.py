"""What a token costs from a layer to the tail: pairs that an owner states, and how its predecessors read them.

The cost of a route is the sum of what its hops compute, of the ways between them (half a round trip each), and of
HANDOVER_S a hop. The ring's way back to the head is the same for all that go on from a hop, and is left out.
Layers only grow along a route, so that costs which are made from successors' costs cannot chase each other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import TypeAlias

from ..errors import MeshError
from ..ids import Layers

Pairs: TypeAlias = tuple[tuple[int, int], ...]  # (entry layer, us a token from there to the tail), layers rising

MAX_PAIRS = 16
HANDOVER_S = 0.0005  # a hop more: its framing, hashing and the way into its worker take 0.2 to 0.8 ms
LOAD = 0.5  # what a session more adds to a token's time: 8 at once, batched, take 3 to 5 times as long as one
UNKNOWN_S = 10.0  # from a hop that states no way to the tail: it is asked last, but asked


def entries(holding: Layers) -> list[int]:
    """The layers of a holding whose costs are stated: all, or MAX_PAIRS spread evenly over it."""
    count, last = min(MAX_PAIRS, len(holding)), len(holding) - 1
    return [holding.begin + (last * n // (count - 1) if count > 1 else 0) for n in range(count)]


@lru_cache(4096)
def table(pairs: Pairs) -> tuple[int, tuple[float, ...]]:
    """(the first layer with a known cost, seconds a token from it and from each that follows to the tail).

    In proportion between two layers whose costs are stated.
    """
    costs: list[float] = []
    for (a, cost_a), (b, cost_b) in itertools.pairwise(pairs):
        costs += [(cost_a + (cost_b - cost_a) * n / (b - a)) / 1e6 for n in range(b - a)]
    return (pairs[0][0], (*costs, pairs[-1][1] / 1e6)) if pairs else (0, ())


def at(pairs: Pairs, layer: int) -> float:
    """Seconds a token from a layer to the tail, as stated; UNKNOWN_S where nothing is."""
    first, costs = table(pairs)
    return costs[layer - first] if 0 <= layer - first < len(costs) else UNKNOWN_S


def check(pairs: Pairs, holding: Layers) -> None:
    """MeshError bad_frame unless the layers of a peer's pairs rise and are of its holding."""
    entry = [layer for layer, _ in pairs]
    if any(layer not in holding for layer in entry) or any(a >= b for a, b in itertools.pairwise(entry)):
        raise MeshError("bad_frame", "an offer whose costs are not of its layers, in their order")


def loaded(token_s: float, busy: int) -> float:
    """What a token takes on a hop that has so many sessions already."""
    return token_s * (1 + LOAD * busy)


def stated(holding: Layers, layer_s: float, from_cut: Mapping[int, float]) -> Pairs:
    """What an owner states. layer_s: its seconds a token and layer; from_cut: the least that a token costs from each
    layer at which it could hand over, 0 behind the last one. Layers from which it knows no way are left out.
    """
    least, costs = math.inf, dict[int, float]()
    for layer in range(holding.end - 1, holding.begin - 1, -1):
        least = layer_s + min(least, from_cut.get(layer + 1, math.inf))
        costs[layer] = least
    return tuple((layer, round(costs[layer] * 1e6)) for layer in entries(holding) if costs[layer] < UNKNOWN_S)
