"""Which offers can run the layers from a given one on, where to hand over to them, and in which order to ask them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from ..ids import Layers, PeerId, gaps
from ..wire.messages import Contract, Failed, Offer, Sampling
from . import cost

ATTEMPTS_A_HOP = 4  # candidates one hop tries before it refuses
ATTEMPTS_A_REQUEST = 32  # route-opens sent for one request, over all hops
TIE = 7  # digits of seconds: costs that are equal but for their rounding are so
MAX_PASSED_ON = 64  # failures that go along with a route-open: twice the attempts of a request


def is_of_the_request(code: str, sampling: Sampling) -> bool:
    """Whether a refusal of this code is the request's own fault, so that no other candidate need be asked.

    Only of what the request does ask for: a hop that lies ends no other search.
    """
    return (code == "bad_grammar" and bool(sampling.grammar)) or (code == "bad_bias" and bool(sampling.biases))


@dataclass(frozen=True)
class Heard:
    """An offer as it reached us, and the round trip to its owner (seconds).

    factor: what its claims are multiplied by, as far as answers over it were measured.
    """

    offer: Offer
    round_trip: float
    blamed: bool = False  # it failed us lately: others first
    factor: float = 1.0

    def cost(self, begin: int) -> float:
        """Seconds a token from here to the tail, when it takes over at layer `begin`: the way there and its claim."""
        return self.round_trip / 2 + cost.HANDOVER_S + self.factor * cost.at(self.offer.pairs, begin)


@dataclass(frozen=True)
class Verdict:
    """Whether an offer can take the layers from `begin` on; if not, why."""

    heard: Heard
    reason: str | None
    begin: int = 0

    @property
    def usable(self) -> bool:
        return self.reason is None or self.waits

    @property
    def waits(self) -> bool:
        """It is full, but takes requests that wait for a place: it is asked when nobody else can be."""
        return self.reason is not None and self.reason.startswith("busy")


@dataclass(frozen=True)
class Stand:
    """What a hop has when it looks for who goes on: the layers that it could run, and seconds a token for each."""

    node: PeerId
    could_run: Layers
    layer_s: float


@dataclass(frozen=True)
class Way:
    """A way on from a hop: who takes over and at which layer. heard None: nobody, the hop is the tail itself.

    cost: seconds a token from the hop's entry to the tail.
    """

    heard: Heard | None
    cut: int
    cost: float


def ways(
    heard: Iterable[Heard],
    stand: Stand,
    contract: Contract,
    context: int = 0,
    excluded: Collection[PeerId] = (),
    failed: Collection[tuple[PeerId, int]] = (),
) -> tuple[list[Way], list[Verdict]]:
    """(the best way over each candidate, the best first; what is said of those that cannot take over).

    A hop may hand over before its own layers end, where another goes on for less. failed: (node, layer) that were tried
    for this request in vain.
    """
    own, found, unfit = stand.could_run, list[Way](), list[Verdict]()
    if own.end == contract.n_layer:
        found.append(Way(None, own.end, stand.layer_s * len(own)))
    for h in heard:
        if h.offer.node == stand.node and own.begin in h.offer.holding:
            continue  # this very hop
        verdict = judge(h, _entry(h.offer.holding, own), contract, context, excluded)
        if not verdict.usable:
            unfit.append(verdict)
            continue
        cuts = range(max(own.begin + 1, h.offer.holding.begin), min(own.end + 1, h.offer.holding.end))
        over = [
            Way(h, cut, stand.layer_s * (cut - own.begin) + h.cost(cut))
            for cut in cuts
            if (h.offer.node, cut) not in failed
        ]
        if over:
            found.append(min(over, key=lambda way: (round(way.cost, TIE), -way.cut)))
        else:
            unfit.append(Verdict(h, "it was tried for this request in vain", own.end))
    return sorted(found, key=_order), unfit


def shortlist(found: Sequence[Way]) -> list[Way]:
    """Those that a hop tries: the best of the others, and always itself where it can be the tail."""
    asked = [way for way in found if way.heard is not None][:ATTEMPTS_A_HOP]
    return [way for way in found if way.heard is None or way in asked]


def _entry(holding: Layers, own: Layers) -> int:
    """The last layer at which a holding can go on from a hop; the hop's end when there is none."""
    last = min(own.end, holding.end - 1)
    return last if last > own.begin and last in holding else own.end


def _order(way: Way) -> tuple[bool, float, int, str]:
    if way.heard is None:
        return False, way.cost, 0, ""
    return way.heard.blamed or not way.heard.offer.free, way.cost, -way.heard.offer.free, way.heard.offer.node


def pairs(heard: Iterable[Heard], stand: Stand, contract: Contract) -> cost.Pairs:
    """What a hop states of itself: the least cost from each of its layers to the tail."""
    own, from_cut = stand.could_run, dict[int, float]()
    if own.end == contract.n_layer:
        from_cut[own.end] = 0
    for h in heard:
        if (h.offer.node == stand.node and own.begin in h.offer.holding) or h.blamed:
            continue
        if judge(h, _entry(h.offer.holding, own), contract, 0, ()).reason is None:
            for cut in range(max(own.begin + 1, h.offer.holding.begin), min(own.end + 1, h.offer.holding.end)):
                from_cut[cut] = min(from_cut.get(cut, math.inf), h.cost(cut))
    return cost.stated(own, stand.layer_s, from_cut)


def failures(failed: Iterable[Failed]) -> set[tuple[PeerId, int]]:
    """What need not be tried again for the same request."""
    return {(f.node, f.layer) for f in failed}


def passed_on(failed: Iterable[Failed]) -> tuple[Failed, ...]:
    """What those who are asked next need not try either. Where only the link failed, theirs may hold."""
    return tuple(replace(f, say="") for f in failed if f.code != "unreachable")[:MAX_PASSED_ON]


def judge(heard: Heard, begin: int, contract: Contract, context: int, excluded: Collection[PeerId]) -> Verdict:
    offer = heard.offer
    reason = None
    if offer.contract != contract:
        reason = "contract_mismatch: " + ", ".join(differences(offer.contract, contract))
    elif begin not in offer.holding:
        reason = f"holds {offer.holding}, layer {begin} is needed"
    elif offer.node in excluded:
        reason = "excluded from this route"
    elif offer.context < context:
        reason = f"context_exceeded: offers {offer.context} positions, {context} are needed"
    elif not offer.free:
        reason = f"busy: every session is taken ({offer.sessions})"
    return Verdict(heard, reason, begin)


def patience(left: float, last: bool) -> float:
    """Seconds for one candidate of those that remain: one that never answers must leave time for the others."""
    return left if last else left / 2


def differences(ours: Contract, theirs: Contract) -> list[str]:
    """Names of the parts in which two contracts differ."""
    return [name for name in ours.__dataclass_fields__ if getattr(ours, name) != getattr(theirs, name)]


def rank(verdicts: Iterable[Verdict]) -> list[Heard]:
    """Usable offers, best first: those that cost a token the least time from here to the tail."""

    def order(verdict: Verdict) -> tuple[bool, float, int, str]:
        h = verdict.heard
        return h.blamed or verdict.waits, h.cost(verdict.begin), -h.offer.free, h.offer.node

    return [v.heard for v in sorted((v for v in verdicts if v.usable), key=order)]


def missing(offers: Iterable[Offer], n_layer: int) -> list[Layers]:
    """The layers that no offer holds."""
    return gaps([offer.holding for offer in offers], n_layer)


def agreeing(heard: Sequence[Heard]) -> list[Heard]:
    """The offers of the contract that covers most: those who differ from it cannot be in one route with the others."""
    by_contract: dict[Contract, list[Heard]] = {}
    for h in heard:
        by_contract.setdefault(h.offer.contract, []).append(h)

    def standing(contract: Contract) -> tuple[bool, int, int]:
        offers = by_contract[contract]
        return not missing((h.offer for h in offers), contract.n_layer), len(offers), -contract.n_layer

    return by_contract[max(by_contract, key=standing)]
