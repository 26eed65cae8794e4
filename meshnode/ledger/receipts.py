"""The entry node's check of what the hops of its session account for, and its countersignature. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import MeshError
from ..ids import PeerId, SessionId
from ..wire import statements
from ..wire.accounts import Acceptance, LinkSide, Receipt
from ..wire.messages import Contract, Grant, Lease, Signed
from . import merkle
from .account import LinkLog, tag_of
from .rules import Fault, Filed, check_receipt, epoch_faults, is_head


@dataclass
class Seen:
    """What the entry node saw of an epoch, by segment: the prompt that it pushed, the tokens that it took."""

    session: SessionId
    head: PeerId
    tail: PeerId
    base: int = 0  # positions that some hop holds from earlier epochs: what is pushed or said of them is a replay
    head_cached: int = 0  # positions that the head does: they do not go round again
    prompt: dict[tuple[int, bool], LinkLog] = field(default_factory=dict)  # by segment, replays apart
    answer: dict[tuple[int, bool], LinkLog] = field(default_factory=dict)
    cut: bool = False  # the answer ended at its limit, so that its last token never went into the ring
    broken: bool = False  # the answer did not come to its end

    def pushed(self, segment: int, first: int, count: int, digest: bytes) -> None:
        replay = first < self.base
        log = LinkLog(self.head, "out", "prompt", replay)
        self.prompt.setdefault((segment, replay), log).add(first, count, digest)

    def took(self, segment: int, first: int, count: int, digest: bytes) -> None:
        replay = first < self.base
        log = LinkLog(self.tail, "in", "answer", replay)
        self.answer.setdefault((segment, replay), log).add(first, count, digest)

    @property
    def segments(self) -> range:
        return range(max((segment for segment, _ in [*self.prompt, *self.answer]), default=-1) + 1)

    def _of(self, logs: dict[tuple[int, bool], LinkLog], segment: int) -> list[LinkLog]:
        return [log for (at, _), log in logs.items() if at == segment]

    def sides(self, segment: int) -> tuple[LinkSide, ...]:
        logs = [*self._of(self.prompt, segment), *self._of(self.answer, segment)]
        return tuple(log.side(self.session) for log in logs)

    def tokens(self, segment: int) -> int:
        return sum(log.positions for log in self._of(self.answer, segment))

    def ring(self, segment: int) -> tuple[int, int, bytes]:
        """What went round, as a side of a link: the answer's tokens, but for the last one of an answer that was cut."""
        log = LinkLog(self.tail, "in", "ring")
        last = max((leaf[0] for each in self.answer.values() for leaf in each.leaves), default=-1)
        leaves = self.answer[segment, False].leaves if (segment, False) in self.answer else []
        for leaf in leaves:
            if leaf[0] >= self.head_cached and not (self.cut and leaf[0] == last):
                log.add(*leaf)
        side = log.side(self.session)
        return side.positions, side.leaves, side.root


@dataclass(frozen=True)
class Settled:
    """What became of an epoch's receipts. rows: for each segment those that nothing speaks against, the head's first;
    faults: what is wrong or missing, each a bad_receipt or bad_signature."""

    rows: list[list[Filed]]
    faults: list[MeshError]


def settle(signed: Sequence[Signed], leases: Sequence[Lease], grant: Grant, seen: Seen, mesh_id: str) -> Settled:
    """Holds the receipts of an epoch against its leases, each other, and what the entry node saw.

    A hop that is silent or at odds takes only its own receipts with it.
    """
    faults: list[MeshError] = []
    hops: dict[int, list[Filed]] = defaultdict(list)
    for statement in signed:
        try:
            receipt = _checked(statement, leases, grant, seen, mesh_id)
        except MeshError as error:
            faults.append(error)
        else:
            hops[receipt.hop].append(Filed(receipt, statement))
    faults += [MeshError("bad_receipt", f"{lease.node} has sent no receipt") for lease in leases if not hops[lease.hop]]
    there = [sorted(hops[n], key=lambda f: f.receipt.segment) for n in sorted(hops) if hops[n]]
    by_segment = [[f for hop in there for f in hop if f.receipt.segment == segment] for segment in seen.segments]
    at_odds: set[PeerId] = set()
    if there:
        accepted = {n: _acceptance(grant, n, row, seen, 0) for n, row in enumerate(by_segment)}
        found = [*epoch_faults(there, accepted), *_ring_faults(there, leases, seen)]
        at_odds = {peer for fault in found for peer in fault.by}
        faults += [MeshError("bad_receipt", fault.say) for fault in found]
    return Settled([[f for f in row if f.receipt.node not in at_odds] for row in by_segment], faults)


def _checked(statement: Signed, leases: Sequence[Lease], grant: Grant, seen: Seen, mesh_id: str) -> Receipt:
    receipt = statements.check(statement, Receipt, mesh_id, by=statement.signer)
    if receipt.hop >= len(leases):
        raise MeshError("bad_receipt", f"a receipt for hop {receipt.hop} of a route of {len(leases)} hops")
    _check_names(statement, receipt, leases[receipt.hop], grant.contract)
    check_receipt(receipt)
    if receipt.segment not in seen.segments:
        raise MeshError("bad_receipt", f"the receipt of {receipt.node} is of a segment that nobody else knows of")
    return receipt


def acceptances(rows: Sequence[Sequence[Filed]], grant: Grant, seen: Seen, ended: int) -> list[Acceptance]:
    """The countersignatures under receipts that settle found nothing against, one a segment.

    ended: seconds since 1970.
    """
    return [_acceptance(grant, segment, row, seen, ended) for segment, row in enumerate(rows)]


def _acceptance(grant: Grant, segment: int, row: Sequence[Filed], seen: Seen, ended: int) -> Acceptance:
    return Acceptance(
        tag=tag_of(grant.session),
        epoch=grant.epoch,
        segment=segment,
        entry=grant.entry,
        receipts=tuple(filed.digest for filed in row),
        tokens=seen.tokens(segment),
        links=seen.sides(segment),
        ended=ended,
        broken=seen.broken and segment == seen.segments[-1],
    )


_REPEATED = tuple(Lease.__dataclass_fields__.keys() & Receipt.__dataclass_fields__.keys() - {"contract"})


def _check_names(signed: Signed, receipt: Receipt, lease: Lease, contract: Contract) -> None:
    if signed.signer != lease.node:
        raise MeshError("bad_signature", f"a receipt of {lease.node} is signed by {signed.signer}")
    for name in _REPEATED:
        if getattr(receipt, name) != getattr(lease, name):
            raise MeshError("bad_receipt", f"the receipt of {lease.node} names another {name} than its lease")
    if receipt.tag != tag_of(lease.session):
        raise MeshError("bad_receipt", f"the receipt of {lease.node} is of another session")
    if receipt.contract != contract:
        raise MeshError("bad_receipt", f"the receipt of {lease.node} is of another contract")


def _ring_faults(hops: Sequence[Sequence[Filed]], leases: Sequence[Lease], seen: Seen) -> list[Fault]:
    """The tail must have told the head what it told the entry node."""
    tail = leases[-1].node
    if seen.broken:
        return []  # what was on its way cannot be compared
    for filed in hops[0] if is_head(hops[0][0].receipt) else ():
        found = [(k.positions, k.leaves, k.root) for k in filed.receipt.links if k.kind == "ring" and not k.replay]
        if (found[0] if found else (0, 0, merkle.EMPTY)) != seen.ring(filed.receipt.segment):
            by = tuple(dict.fromkeys((tail, filed.receipt.node)))
            return [Fault(f"{tail} gave the head other tokens than the entry node", by)]
    return []
