"""What a hop, and the entry node, write down while a session runs; and the receipts that come of it. Pure."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..ids import PeerId, SessionId
from ..wire import schema
from ..wire.accounts import LinkSide, Receipt
from ..wire.messages import MAX_RECEIPTS, Contract, Lease
from . import merkle

SEGMENT_POSITIONS = 4096  # of one segment at most, but for an epoch's last: see Cutter
SEGMENT_S = 60.0  # so that a hop that dies has receipts of all but its last minute


def tag_of(session: SessionId) -> bytes:
    """What stands for a session in statements that strangers read: its id would blind nothing any more."""
    return hashlib.sha256(b"meshnode/1/session\0" + session).digest()[:16]


def work_id(tag: bytes, epoch: int, hop: int, segment: int) -> bytes:
    numbers = b"".join(n.to_bytes(4, "big") for n in (epoch, hop, segment))
    return hashlib.sha256(b"meshnode/1/work\0" + tag + numbers).digest()


def blind(session: SessionId, kind: str, first: int) -> bytes:
    """What hides a leaf from those who do not know the session. Shown for one leaf it opens no other."""
    return hmac.digest(session, f"meshnode/1/leaf/{kind}/{first}".encode(), "sha256")[:16]


@dataclass
class LinkLog:
    """What went over one side of one link in one segment, in order."""

    peer: PeerId
    direction: str  # in | out
    kind: str  # prompt (entry to head) | residual | ring (tail to head) | answer (tail to entry)
    replay: bool = False
    leaves: list[tuple[int, int, bytes]] = field(default_factory=list)  # first, count, digest
    positions: int = 0

    def add(self, first: int, count: int, digest: bytes) -> None:
        """count positions from `first` on; digest: SHA-256 of their uncompressed bytes."""
        self.leaves.append((first, count, digest))
        self.positions += count

    def drop_from(self, first: int) -> None:
        """What did not arrive is nobody's."""
        self.leaves = [leaf for leaf in self.leaves if leaf[0] < first]
        self.positions = sum(leaf[1] for leaf in self.leaves)

    def hashes(self, session: SessionId) -> list[bytes]:
        return [merkle.leaf(blind(session, self.kind, leaf[0]), *leaf) for leaf in self.leaves]

    def side(self, session: SessionId) -> LinkSide:
        root = merkle.root(self.hashes(session))
        return LinkSide(self.peer, self.direction, self.kind, self.positions, len(self.leaves), root, self.replay)


LinkKey = tuple[PeerId, str, str, bool]


@dataclass
class Segment:
    number: int
    first: int | None = None
    positions: int = 0
    steps: int = 0
    compute_us: int = 0
    links: dict[LinkKey, LinkLog] = field(default_factory=dict)


@dataclass(frozen=True)
class Written:
    """A receipt, and what opens its leaves."""

    receipt: Receipt
    session: SessionId
    links: tuple[LinkLog, ...]


@dataclass
class Account:
    """The running segments of one lease: what comes in for the next may be there while one is still computed."""

    lease: Lease
    contract: Contract
    is_open: Callable[[Sequence[LinkLog]], bool] = lambda _: False  # to audits, when it has these links
    written: list[Written] = field(default_factory=list)
    _open: dict[int, Segment] = field(default_factory=dict)
    _previous: bytes | None = None

    def link(self, segment: int, peer: PeerId, direction: str, kind: str, *, replay: bool = False) -> LinkLog:
        key = (peer, direction, kind, replay)
        return self._segment(segment).links.setdefault(key, LinkLog(peer, direction, kind, replay))

    def step(self, segment: int, first: int, count: int, compute_us: int) -> None:
        at = self._segment(segment)
        if at.first is None:
            at.first = first
        at.positions += count
        at.steps += 1
        at.compute_us += compute_us

    def replayed(self, segment: int, compute_us: int) -> None:
        """Compute of positions that were counted in an earlier epoch."""
        self._segment(segment).compute_us += compute_us

    def unsaid(self, kind: str, first: int) -> None:
        """Takes back what was sent from position `first` on, for it never arrived: the epoch ended before."""
        for at in self._open.values():
            for key, log in list(at.links.items()):
                if log.direction == "out" and log.kind == kind:
                    log.drop_from(first)
                    if not log.leaves:
                        del at.links[key]

    def end_before(self, segment: int, ended: int) -> list[Written]:
        """The receipts of segments that nothing is added to any more. ended: seconds since 1970."""
        return [self._write(number, ended, final=False) for number in sorted(self._open) if number < segment]

    def end(self, ended: int) -> list[Written]:
        """The receipts of all that is left, the last of the epoch among them; none if nothing was done."""
        left = sorted(self._open)
        return [self._write(number, ended, final=number == left[-1]) for number in left]

    def _segment(self, number: int) -> Segment:
        return self._open.setdefault(number, Segment(number))

    def _write(self, number: int, ended: int, *, final: bool) -> Written:
        lease, at = self.lease, self._open.pop(number)
        tag = tag_of(lease.session)
        logs = tuple(at.links[key] for key in sorted(at.links))
        receipt = Receipt(
            work=work_id(tag, lease.epoch, lease.hop, number),
            tag=tag,
            epoch=lease.epoch,
            hop=lease.hop,
            segment=number,
            ended=ended,
            node=lease.node,
            predecessor=lease.predecessor,
            successor=lease.successor,
            holding=lease.holding,
            effective=lease.effective,
            contract=self.contract,
            recipe=lease.recipe,
            fingerprint=lease.fingerprint,
            first=at.first or 0,
            positions=at.positions,
            steps=at.steps,
            compute=at.compute_us,
            links=tuple(log.side(lease.session) for log in logs),
            final=final,
            previous=self._previous,
            open=self.is_open(logs),
        )
        self._previous = hashlib.sha256(schema.encode(receipt)).digest()
        written = Written(receipt, lease.session, logs)
        self.written.append(written)
        return written


class NoAccount(Account):
    """Of a node that writes no receipts."""

    def link(self, segment: int, peer: PeerId, direction: str, kind: str, *, replay: bool = False) -> LinkLog:
        return LinkLog(peer, direction, kind, replay)

    def step(self, segment: int, first: int, count: int, compute_us: int) -> None: ...

    def replayed(self, segment: int, compute_us: int) -> None: ...


@dataclass
class Cutter:
    """Numbers the segments of an epoch, for whoever begins a step: the entry node for a prompt, then the tail.

    A route of `hops` hops has as many segments as one message of receipts has room for; the last takes all the rest.
    """

    hops: int
    segment: int = 0
    _positions: int = 0
    _since: float | None = None

    def due(self, count: int, now: float) -> int:
        """The segment of the next `count` positions. now: seconds of a monotonic clock."""
        begun = self._since is not None and self._positions > 0
        full = begun and (self._positions + count > SEGMENT_POSITIONS or now - (self._since or 0) >= SEGMENT_S)
        return self.segment + (full and (self.segment + 2) * self.hops <= MAX_RECEIPTS)

    def count(self, segment: int, count: int, now: float) -> None:
        """Takes positions into account, whoever numbered them."""
        if segment != self.segment or self._since is None:
            self.segment, self._positions, self._since = segment, 0, now
        self._positions += count
