"""A hop's account of its work, and the entry node's check that the accounts of a route agree."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import MeshError
from ..ids import PeerId, SessionId
from ..wire import statements
from ..wire.messages import Contract, Lease, LinkSide, Receipt, Signed
from . import merkle

SEGMENT_POSITIONS = 4096  # leaves that a receipt can be asked to open


def work_id(session: SessionId, epoch: int, hop: int, segment: int) -> bytes:
    numbers = b"".join(n.to_bytes(4, "big") for n in (epoch, hop, segment))
    return hashlib.sha256(b"meshnode/1/work\0" + session + numbers).digest()


@dataclass
class LinkLog:
    """What went over one side of one link, in order."""

    peer: PeerId
    direction: str  # in | out
    kind: str  # prompt (entry to head) | residual | ring (tail to head) | answer (tail to entry)
    _leaves: list[bytes] = field(default_factory=list)
    positions: int = 0

    def add(self, first: int, count: int, digest: bytes) -> None:
        """count positions from `first` on; digest: SHA-256 of their uncompressed bytes."""
        self._leaves.append(merkle.leaf(first, count, digest))
        self.positions += count

    def side(self) -> LinkSide:
        return LinkSide(
            self.peer, self.direction, self.kind, self.positions, len(self._leaves), merkle.root(self._leaves)
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

    @property
    def full(self) -> bool:
        return self.positions >= SEGMENT_POSITIONS

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


def check_receipts(
    signed: Sequence[Signed],
    leases: Sequence[Lease],
    contract: Contract,
    entry: PeerId,
    own: Sequence[LinkSide],
    mesh_id: str,
) -> list[Receipt]:
    """The receipts of one whole epoch, the head's first, one a hop.

    MeshError bad_receipt (or bad_signature) unless each is signed by its hop, says what its lease says, and both sides
    of every link agree, the entry node's own included.
    """
    if len(signed) != len(leases):
        raise MeshError("bad_receipt", f"{len(signed)} receipts for a route of {len(leases)} hops")
    receipts = []
    for statement, lease in zip(signed, leases, strict=True):
        receipt = statements.check(statement, Receipt, mesh_id, by=lease.node)
        for name in (
            "session",
            "epoch",
            "hop",
            "node",
            "predecessor",
            "successor",
            "holding",
            "effective",
            "recipe",
            "fingerprint",
        ):
            if getattr(receipt, name) != getattr(lease, name):
                raise MeshError("bad_receipt", f"the receipt of {lease.node} names another {name} than its lease")
        if receipt.contract != contract:
            raise MeshError("bad_receipt", f"the receipt of {lease.node} is of another contract")
        if receipt.work != work_id(receipt.session, receipt.epoch, receipt.hop, receipt.segment):
            raise MeshError("bad_receipt", f"the receipt of {lease.node} has a wrong work id")
        receipts.append(receipt)
    _check_links([(entry, own), *((r.node, r.links) for r in receipts)])
    return receipts


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
