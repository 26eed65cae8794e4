"""Which offers can run the layers from a given one on, and in which order to ask them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ..ids import Layers, PeerId, gaps
from ..wire.messages import Contract, Offer, Sampling

ATTEMPTS_A_HOP = 4  # candidates one hop tries before it refuses
ATTEMPTS_A_REQUEST = 32  # route-opens sent for one request, over all hops


def is_of_the_request(code: str, sampling: Sampling) -> bool:
    """Whether a refusal of this code is the request's own fault, so that no other candidate need be asked.

    Only of what the request does ask for: a hop that lies ends no other search.
    """
    return (code == "bad_grammar" and bool(sampling.grammar)) or (code == "bad_bias" and bool(sampling.biases))


@dataclass(frozen=True)
class Heard:
    """An offer as it reached us, and how long its owner took to answer (seconds)."""

    offer: Offer
    round_trip: float
    blamed: bool = False  # it failed us lately: others first

    @property
    def cost(self) -> float:
        """Seconds a token from here to the tail, as its owner claims, and the way there."""
        claimed = min((cost for _, cost in self.offer.pairs), default=0)
        return self.round_trip / 2 + claimed / 1e6


@dataclass(frozen=True)
class Verdict:
    """Whether an offer can take the layers from `begin` on; if not, why."""

    heard: Heard
    reason: str | None

    @property
    def usable(self) -> bool:
        return self.reason is None


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
    return Verdict(heard, reason)


def patience(left: float, last: bool) -> float:
    """Seconds for one candidate of those that remain: one that never answers must leave time for the others."""
    return left if last else left / 2


def differences(ours: Contract, theirs: Contract) -> list[str]:
    """Names of the parts in which two contracts differ."""
    return [name for name in ours.__dataclass_fields__ if getattr(ours, name) != getattr(theirs, name)]


def rank(verdicts: Iterable[Verdict]) -> list[Heard]:
    """Usable offers, best first: those that reach farthest make the fewest hops; among them the cheapest."""
    usable = [v.heard for v in verdicts if v.usable]
    return sorted(usable, key=lambda h: (h.blamed, -h.offer.holding.end, h.cost, -h.offer.free, h.offer.node))


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
