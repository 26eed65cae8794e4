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
from .rules import Filed, check_receipt, epoch_faults


@dataclass
class Seen:
    """What the entry node saw of an epoch, by segment: the prompt that it pushed, the tokens that it took."""

    session: SessionId
    head: PeerId
    tail: PeerId
    prompt: dict[int, LinkLog] = field(default_factory=dict)
    answer: dict[int, LinkLog] = field(default_factory=dict)
    cut: bool = False  # the answer ended at its limit, so that its last token never went into the ring

    def pushed(self, segment: int, first: int, count: int, digest: bytes) -> None:
        self.prompt.setdefault(segment, LinkLog(self.head, "out", "prompt")).add(first, count, digest)

    def took(self, segment: int, first: int, count: int, digest: bytes) -> None:
        self.answer.setdefault(segment, LinkLog(self.tail, "in", "answer")).add(first, count, digest)

    @property
    def segments(self) -> range:
        return range(max([*self.prompt, *self.answer], default=-1) + 1)

    def sides(self, segment: int) -> tuple[LinkSide, ...]:
        logs = [log for logs in (self.prompt, self.answer) if (log := logs.get(segment)) is not None]
        return tuple(log.side(self.session) for log in logs)

    def tokens(self, segment: int) -> int:
        return self.answer[segment].positions if segment in self.answer else 0

    def ring(self, segment: int) -> tuple[int, int, bytes]:
        """What went round, as a side of a link: the answer's tokens, but for the last one of an answer that was cut."""
        log = LinkLog(self.tail, "in", "ring")
        leaves = self.answer[segment].leaves if segment in self.answer else []
        is_last = segment == max(self.answer, default=-1)
        for leaf in leaves[: len(leaves) - (self.cut and is_last)]:
            log.add(*leaf)
        side = log.side(self.session)
        return side.positions, side.leaves, side.root


def check_receipts(
    signed: Sequence[Signed], leases: Sequence[Lease], grant: Grant, seen: Seen, mesh_id: str
) -> list[list[Filed]]:
    """The receipts of one whole epoch: of each segment, one a hop, the head's first.

    MeshError bad_receipt (or bad_signature) unless each is signed by its hop, says what its lease says, is sound by
    itself, and both sides of every link agree, with what the entry node saw included.
    """
    hops: dict[int, list[Filed]] = defaultdict(list)
    for statement in signed:
        receipt = statements.check(statement, Receipt, mesh_id, by=statement.signer)
        if receipt.hop >= len(leases):
            raise MeshError("bad_receipt", f"a receipt for hop {receipt.hop} of a route of {len(leases)} hops")
        lease = leases[receipt.hop]
        _check_names(statement, receipt, lease, grant.contract)
        check_receipt(receipt)
        hops[receipt.hop].append(Filed(receipt, statement))
    for lease in leases:
        numbers = [filed.receipt.segment for filed in hops[lease.hop]]
        if numbers != list(seen.segments):
            raise MeshError("bad_receipt", f"{lease.node} accounts for segments {numbers} of {len(seen.segments)}")
    in_order = [hops[hop] for hop in range(len(leases))]
    accepted = {
        segment: _acceptance(grant, segment, [hop[segment] for hop in in_order], seen, 0) for segment in seen.segments
    }
    for fault in epoch_faults(in_order, accepted):
        raise MeshError("bad_receipt", fault.say)
    for segment in seen.segments:
        _check_ring(in_order[0][segment].receipt, seen.ring(segment), leases[-1].node)
    return [[hop[segment] for hop in in_order] for segment in seen.segments]


def acceptances(rows: Sequence[Sequence[Filed]], grant: Grant, seen: Seen, ended: int) -> list[Acceptance]:
    """The countersignatures under receipts that check_receipts has found to agree, one a segment.

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


def _check_ring(head: Receipt, expected: tuple[int, int, bytes], tail: PeerId) -> None:
    """The tail must have told the head what it told the entry node."""
    found = [(link.positions, link.leaves, link.root) for link in head.links if link.kind == "ring"]
    if (found[0] if found else (0, 0, merkle.EMPTY)) != expected:
        raise MeshError("bad_receipt", f"{tail} gave the head other tokens than the entry node")
