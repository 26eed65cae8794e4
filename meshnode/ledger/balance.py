"""Who did work for whom, as far as two signed sides of a link say so. Pure.

Work is counted in layer-positions: positions times the layers that they went through. A hop's work in a segment counts
when its entry node countersigned it, or as far as one of its links has both its sides; so a hop that dies takes only
its own account with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ..ids import PeerId
from ..wire.accounts import Receipt
from .chain import Chain
from .rules import Side, sides

KINDS = ("prompt", "residual", "ring", "answer")


@dataclass
class Balance:
    """In layer-positions."""

    served: int = 0
    used: int = 0


@dataclass(frozen=True)
class Credit:
    """What one receipt is worth. entry: who asked for the work, as its head or its tail say."""

    node: PeerId
    entry: PeerId | None
    work: bytes  # its id
    amount: int  # layer-positions


def credits(chains: Iterable[Chain]) -> list[Credit]:
    """One for each receipt that somebody else stands beside: its entry node, or the other end of one of its links."""
    made: dict[tuple[bytes, PeerId], Credit] = {}
    for chain in chains:
        at_odds = {peer for fault in chain.faults for peer in fault.by}
        named = {digest for acceptance in chain.accepted for digest in acceptance.receipts}
        agreed = _agreed(chain)
        for filed in (filed for hop in chain.hops for filed in hop):
            receipt = filed.receipt
            positions = receipt.positions
            if receipt.node in at_odds or filed.digest not in named:
                positions = min(positions, _two_sided(receipt, agreed))
            if positions:
                credit = Credit(receipt.node, chain.entry, receipt.work, positions * len(receipt.effective))
                made.setdefault((receipt.work, receipt.node), credit)
    return list(made.values())


def _agreed(chain: Chain) -> set[tuple[int, Side]]:
    """The sides of a chain's links, by segment, of which both ends say the same."""
    said: dict[str, set[tuple[int, Side]]] = {"in": set(), "out": set()}
    accounts = [(r.segment, r.node, r.links) for hop in chain.hops for f in hop for r in [f.receipt]]
    accounts += [(a.segment, a.entry, a.links) for a in chain.accepted]
    for segment, node, links in accounts:
        for way, found in said.items():
            found |= {(segment, side) for side in sides(node, links, way, *KINDS)}
    return said["in"] & said["out"]


def _two_sided(receipt: Receipt, agreed: set[tuple[int, Side]]) -> int:
    """Positions that came in, or went out, as another node says too."""

    def count(direction: str) -> list[int]:
        own = sides(receipt.node, receipt.links, direction, *KINDS)
        return [side[4] for side in own if not side[3] and (receipt.segment, side) in agreed]

    return max(sum(count("in")), *count("out"), 0)


def balances(found: Iterable[Credit]) -> dict[PeerId, Balance]:
    """Of everybody. Work for oneself is neither served nor used."""
    every: dict[PeerId, Balance] = defaultdict(Balance)
    for credit in found:
        if credit.entry != credit.node:
            every[credit.node].served += credit.amount
            if credit.entry is not None:
                every[credit.entry].used += credit.amount
    return dict(every)


def standing(found: Iterable[Credit], trusted: Collection[PeerId]) -> dict[PeerId, int]:
    """What each peer did for those in `trusted`: the only work that ranks a request.

    Strangers can sign each other any amount of work, and it ranks nobody.
    """
    ranks: dict[PeerId, int] = defaultdict(int)
    for credit in found:
        if credit.entry in trusted and credit.node != credit.entry:
            ranks[credit.node] += credit.amount
    return dict(ranks)
