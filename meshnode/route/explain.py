"""The route that would be tried first, and what is said of every candidate, as far as one node can tell.

The hops choose for themselves, by round trips of their own; whoever looks from outside takes its own in their place.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ..ids import Layers, PeerId
from ..wire.messages import Contract
from . import choose, cost
from .choose import Heard, Stand, Verdict, Way

NOBODY = PeerId("")


@dataclass(frozen=True)
class Candidate:
    """heard may take over at `layer`, or not. cost: seconds a token from here to the tail over it; None: no way.

    reason: why it is not taken, and `step`, what would change that; both empty for the one that is.
    """

    heard: Heard
    layer: int
    usable: bool
    cost: float | None
    reason: str = ""
    step: str = ""

    @property
    def taken(self) -> bool:
        return self.usable and not self.reason


@dataclass(frozen=True)
class Chosen:
    heard: Heard
    effective: Layers


def route(heard: Sequence[Heard], contract: Contract) -> tuple[list[Chosen], list[Candidate]]:
    """(the hops, as far as they reach; every candidate at each layer where a hop begins)."""
    hops, candidates, at = list[Chosen](), list[Candidate](), 0
    while at < contract.n_layer:
        verdicts = [choose.judge(h, at, contract, 0, ()) for h in heard]
        best = next(iter(choose.rank(verdicts)), None)
        candidates += [_said(verdict, best) for verdict in verdicts]
        if best is None:
            break
        end = _handover(best, at, heard, contract)
        hops.append(Chosen(best, Layers(at, end)))
        at = end
    return hops, candidates


def layer_s(pairs: cost.Pairs) -> float:
    """Seconds a token and layer of who states these costs: what they fall by, where the way on stays the same."""
    _, costs = cost.table(pairs)
    return max((a - b for a, b in itertools.pairwise(costs)), default=0.0)


def _handover(hop: Heard, begin: int, heard: Sequence[Heard], contract: Contract) -> int:
    stand = Stand(hop.offer.node, Layers(begin, hop.offer.holding.end), max(0.0, layer_s(hop.offer.pairs)))
    found: list[Way] = choose.ways(heard, stand, contract)[0]
    return found[0].cut if found else stand.could_run.end


def _said(verdict: Verdict, best: Heard | None) -> Candidate:
    h, layer = verdict.heard, verdict.begin
    if verdict.reason is not None:
        return Candidate(h, layer, False, None, verdict.reason, _step(verdict.reason, layer))
    price = h.cost(layer)
    if h is best or best is None:
        return Candidate(h, layer, True, price)
    more = f"{(price - best.cost(layer)) * 1000:.2f} ms a token more than {best.offer.node[-8:]}"
    if h.blamed:
        return Candidate(h, layer, True, price, "did not answer lately: asked last", "look at its connection and load")
    if price >= cost.UNKNOWN_S:
        return Candidate(h, layer, True, price, "knows no way to the tail yet", "it looks again every few seconds")
    return Candidate(h, layer, True, price, more, "it is asked when those before it refuse")


def _step(reason: str, layer: int) -> str:
    """What an operator, or the one who asks, can do about a reason."""
    if reason.startswith("holds"):
        return f"serve --layers that has {layer} in it"
    if reason.startswith("busy"):
        return "wait, or serve with more --sessions"
    if reason.startswith("contract_mismatch"):
        return "serve the same version, with the same --numerics"
    if reason.startswith("context_exceeded"):
        return "ask for less, or serve with a larger --context"
    return "ask again later"
