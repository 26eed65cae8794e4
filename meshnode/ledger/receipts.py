"""A hop's account of its work, and the entry node's check that the accounts of a route agree."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import MeshError
from ..ids import PeerId, SessionId
from ..wire import statements
from ..wire.messages import Contract, Grant, Lease, LinkSide, Receipt, Signed
from . import merkle


def work_id(session: SessionId, epoch: int, hop: int, segment: int) -> bytes:
    numbers = b"".join(n.to_bytes(4, "big") for n in (epoch, hop, segment))
    return hashlib.sha256(b"meshnode/1/work\0" + session + numbers).digest()


@dataclass
class LinkLog:
    """What went over one side of one link, in order."""

    peer: PeerId
    direction: str  # in | out
    kind: str  # prompt (entry to head) | residual | ring (tail to head) | answer (tail to entry)
    leaves: list[bytes] = field(default_factory=list)
    positions: int = 0

    def add(self, first: int, count: int, digest: bytes) -> None:
        """count positions from `first` on; digest: SHA-256 of their uncompressed bytes."""
        self.leaves.append(merkle.leaf(first, count, digest))
        self.positions += count

    def side(self) -> LinkSide:
        return LinkSide(
            self.peer, self.direction, self.kind, self.positions, len(self.leaves), merkle.root(self.leaves)
        )


@dataclass
class Account:
    """The running segment of one lease."""

    lease: Lease
    contract: Contract
    segment: int = 0
    previous: bytes | None = None
    first: int | None = None
    positions: int = 0
    steps: int = 0
    compute_us: int = 0
    links: dict[tuple[PeerId, str, str], LinkLog] = field(default_factory=dict)

    def link(self, peer: PeerId, direction: str, kind: str) -> LinkLog:
        return self.links.setdefault((peer, direction, kind), LinkLog(peer, direction, kind))

    def step(self, first: int, count: int, compute_us: int) -> None:
        if self.first is None:
            self.first = first
        self.positions += count
        self.steps += 1
        self.compute_us += compute_us

    def receipt(self, *, final: bool) -> Receipt:
        lease = self.lease
        return Receipt(
            work=work_id(lease.session, lease.epoch, lease.hop, self.segment),
            session=lease.session,
            epoch=lease.epoch,
            hop=lease.hop,
            segment=self.segment,
            node=lease.node,
            predecessor=lease.predecessor,
            successor=lease.successor,
            holding=lease.holding,
            effective=lease.effective,
            contract=self.contract,
            recipe=lease.recipe,
            fingerprint=lease.fingerprint,
            first=self.first or 0,
            positions=self.positions,
            steps=self.steps,
            compute=self.compute_us,
            links=tuple(self.links[key].side() for key in sorted(self.links)),
            final=final,
            previous=self.previous,
        )


@dataclass(frozen=True)
class Seen:
    """What the entry node saw of an epoch: the prompt that it pushed, the tokens that it took.

    cut: the answer ended at its limit, so that its last token never went into the ring.
    """

    prompt: LinkLog
    answer: LinkLog
    cut: bool

    def sides(self) -> tuple[LinkSide, ...]:
        return tuple(log.side() for log in (self.prompt, self.answer) if log.positions)  # an answer may be empty

    def ring(self, tail: PeerId, head: PeerId) -> tuple[PeerId, PeerId, str, int, int, bytes]:
        """What went round: the answer's tokens, but for the last one of an answer that was cut."""
        leaves = self.answer.leaves[: len(self.answer.leaves) - self.cut]
        return tail, head, "ring", len(leaves), len(leaves), merkle.root(leaves)


def check_receipts(
    signed: Sequence[Signed], leases: Sequence[Lease], grant: Grant, seen: Seen, mesh_id: str
) -> list[Receipt]:
    """The receipts of one whole epoch, the head's first, one a hop.

    MeshError bad_receipt (or bad_signature) unless each is signed by its hop, says what its lease says, accounts for
    the links of its place and no others, and both sides of every link agree, with what the entry node saw included.
    """
    if len(signed) != len(leases):
        raise MeshError("bad_receipt", f"{len(signed)} receipts for a route of {len(leases)} hops")
    receipts = []
    for statement, lease in zip(signed, leases, strict=True):
        receipt = statements.check(statement, Receipt, mesh_id, by=lease.node)
        _check_names(receipt, lease, grant.contract)
        _check_counts(receipt, lease, leases, grant.entry)
        receipts.append(receipt)
    _check_links([(grant.entry, seen.sides()), *((r.node, r.links) for r in receipts)])
    _check_ring(receipts[0], seen.ring(leases[-1].node, leases[0].node))
    return receipts


_REPEATED = tuple(Lease.__dataclass_fields__.keys() & Receipt.__dataclass_fields__.keys() - {"contract"})


def _check_names(receipt: Receipt, lease: Lease, contract: Contract) -> None:
    for name in _REPEATED:
        if getattr(receipt, name) != getattr(lease, name):
            raise MeshError("bad_receipt", f"the receipt of {lease.node} names another {name} than its lease")
    if receipt.contract != contract:
        raise MeshError("bad_receipt", f"the receipt of {lease.node} is of another contract")
    if receipt.work != work_id(receipt.session, receipt.epoch, receipt.hop, receipt.segment):
        raise MeshError("bad_receipt", f"the receipt of {lease.node} has a wrong work id")


def _check_counts(receipt: Receipt, lease: Lease, leases: Sequence[Lease], entry: PeerId) -> None:
    """An epoch has one segment today; what was computed is what came in, over the links of this place alone."""
    head, tail = lease.hop == 0, lease.hop == len(leases) - 1
    due = {(lease.predecessor, "in", "prompt" if head else "residual")}
    due |= {(leases[-1].node, "in", "ring")} if head else set()
    due |= (
        {(leases[0].node, "out", "ring"), (entry, "out", "answer")} if tail else {(lease.successor, "out", "residual")}
    )
    named = [(link.peer, link.direction, link.kind) for link in receipt.links]
    came_in = [link for link in receipt.links if link.direction == "in"]
    faults = {
        "it is not the whole epoch": receipt.segment != 0 or not receipt.final or receipt.previous is not None,
        "it accounts for links that its place does not have": len(set(named)) != len(named) or not set(named) <= due,
        "it names a replay": any(link.replay for link in receipt.links),
        "it begins elsewhere": receipt.first != 0,
        "it counts other positions than came in": receipt.positions != sum(link.positions for link in came_in),
        "it counts other steps than came in": receipt.steps != sum(link.leaves for link in came_in),
    }
    for fault, found in faults.items():
        if found:
            raise MeshError("bad_receipt", f"the receipt of {lease.node}: {fault}")


def _check_ring(head: Receipt, expected: tuple[PeerId, PeerId, str, int, int, bytes]) -> None:
    """The tail must have told the head what it told the entry node."""
    found = [link for link in head.links if link.kind == "ring" and link.direction == "in"]
    account = (found[0].positions, found[0].leaves, found[0].root) if found else (0, 0, merkle.EMPTY)
    if account != expected[3:]:
        raise MeshError("bad_receipt", f"{expected[0]} gave the head other tokens than the entry node")


def _check_links(accounts: Sequence[tuple[PeerId, Sequence[LinkSide]]]) -> None:
    """Every `out` side has its `in` side at the other end, with the same root, and the other way round.

    A node may have several roles in a route, and so several sides of one name: they are compared as multisets.
    """

    def sides(direction: str) -> list[tuple[PeerId, PeerId, str, int, int, bytes]]:
        found = []
        for node, links in accounts:
            for link in links:
                if link.direction == direction:
                    ends = (node, link.peer) if direction == "out" else (link.peer, node)
                    found.append((*ends, link.kind, link.positions, link.leaves, link.root))
        return sorted(found)

    sent, received = sides("out"), sides("in")
    if sent != received:
        odd = sorted(set(sent) ^ set(received))
        sender, receiver, kind = odd[0][:3] if odd else sent[0][:3]
        raise MeshError("bad_receipt", f"{sender} and {receiver} do not agree on the {kind} that went between them")
