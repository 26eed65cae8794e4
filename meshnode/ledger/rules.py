"""Whether receipts hold: each by itself, and all of an epoch with each other. Pure.

A fault is either something that is missing, which may still come, or something wrong, which names who is at odds.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..errors import MeshError
from ..ids import PeerId
from ..wire import statements
from ..wire.accounts import Acceptance, LinkSide, Receipt
from ..wire.messages import Signed
from .account import SEGMENT_POSITIONS, work_id

_Said = tuple[PeerId, tuple[LinkSide, ...]]
Side = tuple[PeerId, PeerId, str, bool, int, int, bytes]  # sender, receiver, kind, replay, positions, leaves, root


@dataclass(frozen=True)
class Filed:
    """A receipt whose signature was checked."""

    receipt: Receipt
    signed: Signed

    @cached_property
    def digest(self) -> bytes:
        return statements.digest(self.signed)


@dataclass(frozen=True)
class Fault:
    """by: who is at odds; nobody when something is only missing."""

    say: str
    by: tuple[PeerId, ...] = ()


def check_receipt(receipt: Receipt) -> None:
    """MeshError bad_receipt unless a receipt is sound by itself."""
    n_layer = receipt.contract.n_layer
    effective, holding = receipt.effective, receipt.holding
    if not holding.begin <= effective.begin < effective.end <= holding.end <= n_layer:
        raise _bad(receipt, "its layers do not lie in each other")
    if receipt.work != work_id(receipt.tag, receipt.epoch, receipt.hop, receipt.segment):
        raise _bad(receipt, "it has a wrong work id")
    if (receipt.segment == 0) != (receipt.previous is None):
        raise _bad(receipt, "its first segment has none before it, and each other one has")
    named = [(link.peer, link.direction, link.kind, link.replay) for link in receipt.links]
    if len(set(named)) != len(named) or not all(_is_due(receipt, link) for link in receipt.links):
        raise _bad(receipt, "it accounts for links that its place does not have")
    computed, came = (receipt.positions, receipt.steps), came_in(receipt)
    if computed[0] > came[0] or computed[1] > came[1] or (computed != came and not receipt.final):
        raise _bad(receipt, "it counts other steps or positions than came in")
    if receipt.segment == 0 and receipt.first != 0 and receipt.epoch <= 1:  # a later one may go on with what is held
        raise _bad(receipt, "it begins elsewhere")
    if receipt.positions > SEGMENT_POSITIONS and not receipt.final:
        raise _bad(receipt, "its segment is too long")
    if any(link.leaves > link.positions for link in receipt.links):
        raise _bad(receipt, "it has more leaves than positions")


def came_in(receipt: Receipt) -> tuple[int, int]:
    """Positions and leaves, replays apart. A hop that ends has not computed all of it."""
    links = [link for link in receipt.links if link.direction == "in" and not link.replay]
    return sum(link.positions for link in links), sum(link.leaves for link in links)


def _bad(receipt: Receipt, fault: str) -> MeshError:
    return MeshError("bad_receipt", f"the receipt of {receipt.node}: {fault}")


def _is_due(receipt: Receipt, link: LinkSide) -> bool:
    """Whether a hop of this place has such a link. The tail's successor is the head: the way of the ring."""
    head, tail = is_head(receipt), is_tail(receipt)
    if link.direction == "in":
        if link.kind == "ring":
            return head
        return link.peer == receipt.predecessor and link.kind == ("prompt" if head else "residual")
    if not tail:
        return link.peer == receipt.successor and link.kind == "residual"
    return link.kind == "answer" or (link.kind == "ring" and link.peer == receipt.successor)


def is_head(receipt: Receipt) -> bool:
    return receipt.effective.begin == 0


def is_tail(receipt: Receipt) -> bool:
    return receipt.effective.end == receipt.contract.n_layer


def sides(node: PeerId, links: Sequence[LinkSide], direction: str, *kinds: str) -> set[Side]:
    """Each link of one direction, named by its ends, so that its two sides compare equal when they agree."""
    found = set()
    for link in links:
        if link.direction == direction and link.kind in kinds:
            ends = (node, link.peer) if direction == "out" else (link.peer, node)
            found.add((*ends, link.kind, link.replay, link.positions, link.leaves, link.root))
    return found


def epoch_faults(hops: Sequence[Sequence[Filed]], accepted: Mapping[int, Acceptance]) -> list[Fault]:
    """What is wrong or missing in an epoch. hops: each one's receipts by segment, the head's first, none of them empty.

    accepted: the entry node's countersignatures, by segment.
    """
    first = hops[0][0].receipt
    entry = first.predecessor if is_head(first) else "the entry node"
    faults = [fault for hop in hops for fault in _hop_faults(hop)]
    faults += _route_faults([hop[0].receipt for hop in hops])
    last = max(filed.receipt.segment for hop in hops for filed in hop)
    for segment in range(last + 1):
        there = [filed for hop in hops for filed in hop if filed.receipt.segment == segment]
        missing = [hop[0].receipt.node for hop in hops if all(f.receipt.segment != segment for f in hop)]
        faults += [Fault(f"the receipt of {node} for segment {segment} is missing") for node in missing]
        acceptance = accepted.get(segment)
        if acceptance is None:
            faults.append(Fault(f"the countersignature of {entry} for segment {segment} is missing"))
        faults += _link_faults(there, acceptance)
        hop_numbers = [filed.receipt.hop for filed in there]
        whole = (
            not missing and hop_numbers == list(range(len(hops))) and is_head(first) and is_tail(hops[-1][0].receipt)
        )
        if acceptance is not None:
            faults += _acceptance_faults(there, acceptance, whole=whole)
    return faults


def _acceptance_faults(there: Sequence[Filed], acceptance: Acceptance, *, whole: bool) -> list[Fault]:
    """The entry node may leave out what did not reach it, but names nothing else."""
    named = set(acceptance.receipts)
    if whole and named - {filed.digest for filed in there}:
        return [Fault(f"{acceptance.entry} countersigned other receipts", (acceptance.entry,))]
    segment = acceptance.segment
    return [
        Fault(f"{acceptance.entry}'s word on the receipt of {f.receipt.node} for segment {segment} is missing")
        for f in there
        if f.digest not in named
    ]


def _hop_faults(hop: Sequence[Filed]) -> list[Fault]:
    """Of the segments of one hop, which follow each other."""
    faults = []
    node = hop[0].receipt.node
    for before, after in itertools.pairwise(hop):
        a, b = before.receipt, after.receipt
        if any(getattr(a, name) != getattr(b, name) for name in _LASTING):
            faults.append(Fault(f"{node} changes its place between segments {a.segment} and {b.segment}", (node,)))
        if a.segment + 1 == b.segment and (b.previous != before.digest or b.first != a.first + a.positions or a.final):
            faults.append(Fault(f"segment {b.segment} of {node} does not follow segment {a.segment}", (node,)))
    if not hop[-1].receipt.final:
        faults.append(Fault(f"the last receipt of {node} is missing"))
    return faults


_LASTING = (
    "tag", "epoch", "hop", "node", "predecessor", "successor", "holding", "effective", "contract", "recipe",
    "fingerprint",
)  # fmt: skip


def _route_faults(firsts: Sequence[Receipt]) -> list[Fault]:
    """The effective ranges tile the layers once, and neighbours name each other."""
    faults = []
    head, tail = firsts[0], firsts[-1]
    if not is_head(head):
        faults.append(Fault(f"the receipts for the layers before {head.effective.begin} are missing"))
    for a, b in itertools.pairwise(firsts):
        if b.hop > a.hop + 1:
            faults.append(Fault(f"the receipts for the layers {a.effective.end}-{b.effective.begin} are missing"))
            continue
        agree = (
            a.effective.end == b.effective.begin
            and (a.successor, b.predecessor, b.hop) == (b.node, a.node, a.hop + 1)
            and (a.contract, a.tag, a.epoch) == (b.contract, b.tag, b.epoch)
        )
        if not agree:
            faults.append(Fault(f"{a.node} and {b.node} do not name each other", (a.node, b.node)))
    if not is_tail(tail):
        faults.append(Fault(f"the receipts for the layers from {tail.effective.end} on are missing"))
    elif is_head(head) and tail.successor != head.node:
        faults.append(Fault(f"the tail {tail.node} names another head", (tail.node,)))
    return faults


def _link_faults(there: Sequence[Filed], acceptance: Acceptance | None) -> list[Fault]:
    """Of a segment: what one end of a link says it sent is what the other says came. Who is silent is not at odds; nor
    is anybody for what was on its way when a session was broken off."""
    accounts = {filed.receipt.hop: (filed.receipt.node, filed.receipt.links) for filed in there}
    head = next((a for f in there if is_head(f.receipt) for a in [accounts[f.receipt.hop]]), None)
    tail = next((a for f in there if is_tail(f.receipt) for a in [accounts[f.receipt.hop]]), None)
    asker = (acceptance.entry, acceptance.links) if acceptance is not None else None
    links: list[tuple[str, _Said | None, _Said | None]]
    links = [("residual", accounts[hop], accounts.get(hop + 1)) for hop in accounts]
    links += [("ring", tail, head), ("prompt", asker, head), ("answer", tail, asker)]
    faults = []
    broken = acceptance is None or acceptance.broken
    for receipt in () if broken else (filed.receipt for filed in there):
        if (receipt.positions, receipt.steps) != came_in(receipt):
            faults.append(Fault(f"{receipt.node} counts other steps or positions than came in", (receipt.node,)))
    for a, b in itertools.pairwise(filed.receipt for filed in there):
        if a.hop + 1 == b.hop and (a.first != b.first or (a.positions != b.positions and not broken)):
            faults.append(Fault(f"{a.node} and {b.node} account for other positions", (a.node, b.node)))
    for kind, sender, receiver in links:
        if sender is None or receiver is None:
            continue
        sent, came = sides(*sender, "out", kind), sides(*receiver, "in", kind)
        ends = (sender[0], receiver[0])
        if sent == came:
            continue
        if broken and _counts(came) <= _counts(sent) and {side[:2] for side in came} <= {side[:2] for side in sent}:
            faults.append(Fault(f"the end of the {kind} between {ends[0]} and {ends[1]} is missing: it was broken off"))
        else:
            faults.append(Fault(f"{ends[0]} and {ends[1]} do not agree on the {kind} between them", ends))
    return faults


def _counts(found: set[Side]) -> tuple[int, int]:
    """Positions and leaves."""
    return sum(side[4] for side in found), sum(side[5] for side in found)
