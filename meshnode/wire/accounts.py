"""What nodes say of work that was done: receipts, acceptances, findings; and how ledgers tell each other of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ..ids import Layers, PeerId
from .messages import (
    DIGEST,
    EPOCH,
    MAX_HOPS,
    PEER,
    POSITION,
    SEGMENT,
    SIGNED,
    Contract,
    Signed,
)
from .schema import field, flag, layers, listing, message, nested, octets, uint, word

TAG = octets(16)
SECONDS = uint(1 << 40)  # since 1970
BUCKETS = 256  # of a ledger: by the first byte of a statement's digest
MARK_BYTES = 8
MAX_BATCH = 64  # statements in one message
MAX_BUCKET = 24_000  # digests told of one bucket: they leave room in a header


@dataclass(frozen=True)
class LinkSide:
    """One side of one link: what this hop received from a peer, or sent to it, in order."""

    peer: PeerId = field(1, PEER)
    direction: str = field(2, word("in", "out"))
    kind: str = field(3, word("prompt", "residual", "ring", "answer"))
    positions: int = field(4, uint())
    leaves: int = field(5, uint())
    root: bytes = field(6, DIGEST)  # Merkle root over the leaves, which are blinded by the session's id
    replay: bool = field(7, flag, default=False)


@message(18)
class Receipt:
    """A node's signed account of a segment of the steps it did."""

    work: bytes = field(2, DIGEST)  # hash of (tag, epoch, hop, segment)
    tag: bytes = field(4, TAG)  # stands for the session, whose id only its route knows
    epoch: int = field(6, EPOCH)
    hop: int = field(8, uint(MAX_HOPS))
    segment: int = field(10, SEGMENT)
    ended: int = field(12, SECONDS)  # by the node's clock
    node: PeerId = field(14, PEER)
    predecessor: PeerId = field(16, PEER)
    successor: PeerId = field(18, PEER)
    holding: Layers = field(20, layers)
    effective: Layers = field(22, layers)
    contract: Contract = field(24, nested(Contract))
    recipe: bytes = field(26, DIGEST)
    fingerprint: bytes = field(28, DIGEST)
    first: int = field(30, POSITION)
    positions: int = field(32, uint())
    steps: int = field(34, uint())
    compute: int = field(36, uint())  # us, measured in the worker
    links: tuple[LinkSide, ...] = field(38, listing(nested(LinkSide), 8))
    final: bool = field(40, flag)  # the epoch's last segment
    previous: bytes | None = field(42, DIGEST, default=None)  # digest of the receipt of the segment before
    open: bool = field(43, flag, default=False)  # what it takes to do the work again is kept for a while, for auditors


@message(19)
class Acceptance:
    """The entry node's countersignature under the receipts of a segment that it found to agree."""

    tag: bytes = field(2, TAG)
    epoch: int = field(4, EPOCH)
    entry: PeerId = field(6, PEER)
    receipts: tuple[bytes, ...] = field(8, listing(DIGEST, MAX_HOPS))  # digests of their raw bytes, the head's first
    tokens: int = field(10, uint())  # taken in this segment
    links: tuple[LinkSide, ...] = field(12, listing(nested(LinkSide), 4))  # the entry node's own sides
    ended: int = field(14, SECONDS)
    segment: int = field(5, SEGMENT, default=0)
    broken: bool = field(7, flag, default=False)  # the session was broken off in it: what was on its way may be lost


@message(20)
class Finding:
    """What an auditor says of a receipt after it has done the same work again."""

    receipt: bytes = field(2, DIGEST)  # of its raw bytes
    node: PeerId = field(4, PEER)  # whose receipt it is
    auditor: PeerId = field(6, PEER)
    verdict: str = field(8, word("agrees", "differs", "withheld"))
    position: int = field(10, POSITION)  # the first of the first leaf that differs; else the number that were compared
    recipe: bytes = field(12, DIGEST)  # the auditor's
    fingerprint: bytes = field(14, DIGEST)
    ended: int = field(16, SECONDS)


@message(21)
class Batch:
    """Statements on their way: gossiped, or asked for."""

    statements: tuple[Signed, ...] = field(2, listing(SIGNED, MAX_BATCH))


@message(22)
class LedgerQuery:
    """Asks what a ledger holds: all buckets in short, or the digests of one."""

    bucket: int | None = field(2, uint(BUCKETS - 1), default=None)


@message(23)
class LedgerSummary:
    """marks: for each bucket, the sum without carry of the first bytes of its digests."""

    marks: bytes = field(2, octets(BUCKETS * MARK_BYTES))


@message(24)
class LedgerDigests:
    """The digests of a bucket, one behind the other, the newest statements' first."""

    digests: bytes = field(2, octets(0, MAX_BUCKET * 32))


@message(25)
class LedgerFetch:
    """Asks for statements; what is not held is left out of the answer, a Batch."""

    digests: tuple[bytes, ...] = field(2, listing(DIGEST, MAX_BATCH))


@message(26)
class Taken:
    """The answer to a Batch: how many of its statements were new."""

    new: int = field(2, uint(MAX_BATCH))


Account: TypeAlias = Receipt | Acceptance | Finding
ACCOUNTS = (Receipt, Acceptance, Finding)
LEDGER_REQUESTS = (Batch, LedgerQuery, LedgerFetch)
