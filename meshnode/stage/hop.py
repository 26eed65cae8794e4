"""The work of one lease: rows come in, the worker computes them in order, rows or tokens go out."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import trio

from .. import logs
from ..errors import MeshError
from ..ids import PeerId
from ..ledger.account import Account, Cutter, Written
from ..net.links import Links
from ..route.lease import Key
from ..session import HopSession
from ..wire import activation
from ..wire.messages import Credit, Failure, Lease, Likely, Logprobs, Push, Pushes, Renew, Tokens
from ..worker import Sampled
from .kept import Kept, replays

log = logging.getLogger(__name__)

Write = Callable[[Sequence[Written]], None]

EARLY = 64  # messages of a tail that goes on before the entry node's ids have reached the head
STOP_S = 10.0  # a worker that does not let go of a session for so long is being killed for it


@dataclass(frozen=True)
class Place:
    """A hop's neighbours. A lease id is the receiver's own name for the session; the entry node needs none."""

    entry: PeerId
    before: bytes | None  # the predecessor's lease; None when that is the entry node
    after: bytes | None  # the successor's lease; None at the tail
    head: tuple[PeerId, bytes]
    tail: PeerId
    known: int  # positions whose ids the entry node has
    base: int = 0  # positions that some hop holds from earlier epochs: pushed again, they are replays
    head_cached: int = 0  # positions that the head holds from earlier epochs
    after_cached: int = 0  # and that the successor does


class Work(NamedTuple):
    """Rows [n, ...] that were accepted and wait for the worker."""

    first: int
    n: int
    rows: memoryview  # ids [count] i32, or residuals [count, n_embd] f32
    sample: bool
    segment: int
    digest: bytes


class Ring(Work):
    """The tail's tokens, at the head."""


class Hop:
    """Runs one lease. accept_* decide at once and queue; run() computes, one step after the other.

    kept: what the session has here from earlier epochs, as many positions as the lease says.
    """

    def __init__(self, links: Links, kept: Kept, lease: Lease, place: Place, account: Account, write: Write) -> None:
        self.links = links
        self.kept = kept
        self.lease = lease
        self.place = place
        self.account = account
        self.session = HopSession(lease, positions=lease.cached)
        self.sampler = kept.sampler
        self.sampler.credit = 0
        kept.said = [replace(t, epoch=lease.epoch, segment=0) for t in kept.said if t.first >= place.known]
        self._write = write
        self._cutter = Cutter(lease.hop + 1)  # the tail's
        self.over = False  # a fault was passed on: nothing more is accepted
        self._speaks = False  # the entry node has this epoch's route, and hears what is said
        self._leaving = False
        self._busy = False  # the worker computes
        self._left = trio.Event()
        self._renewing = False
        self._held_back: Tokens | None = None
        self._early: list[Tokens] = []
        # bounded by the lease: no more positions are accepted than its context has
        self._todo, self._work = trio.open_memory_channel[Work | None](math.inf)
        self._scope = trio.CancelScope()
        self._stopped = trio.Event()
        self._started = False

    @property
    def key(self) -> Key:
        return self.place.entry, self.lease.session, self.lease.effective.begin

    @property
    def is_head(self) -> bool:
        return self.lease.effective.begin == 0

    @property
    def is_tail(self) -> bool:
        return self.place.after is None

    @property
    def computed(self) -> int:
        return self.kept.computed

    # what comes in

    def accept_push(self, push: Push, rows: memoryview, digest: bytes) -> None:
        """Queues the very next push; a refused one changes nothing."""
        self.session.accept(push)
        self._todo.send_nowait(Work(push.first, push.count, rows, push.sample, push.segment, digest))
        while self._early and self.session.positions >= self.place.known:
            self.accept_ring(self._early.pop(0))

    def accept_ring(self, tokens: Tokens) -> None:
        """Queues the tail's tokens at the head: those that overtake the entry node's ids after these."""
        if self.session.positions < self.place.known and len(self._early) < EARLY:
            self.session.check_ring(tokens)
            self._early.append(tokens)
            return
        self.session.accept_ring(tokens)
        rows = activation.tokens_payload(tokens.ids)
        digest = hashlib.sha256(rows).digest()
        self._todo.send_nowait(Ring(tokens.first, len(tokens.ids), memoryview(rows), True, tokens.segment, digest))

    def accept_credit(self, credit: Credit) -> Tokens | None:
        """What was held back for want of credit, and may now go into the ring.

        The first credit of an epoch also says that the entry node has its route: until then nothing is said.
        """
        first = not self.sampler.credit
        self.sampler.grant(credit.total)
        if first:
            self._todo.send_nowait(None)
            return None
        if self._held_back is None or not self.sampler.may_go_on:
            return None
        tokens, self._held_back = self._held_back, None
        return tokens

    # the work

    async def run(self) -> None:
        """Computes until stopped. A fault goes to the entry node; the lease stays until it is closed or lapses."""
        self._started = True
        try:
            with self._scope:
                await self._push_again()
                async for work in self._work:
                    if self._leaving:
                        break
                    await (self._step(work) if work is not None else self._speak())
        except MeshError as error:
            self.kept.lost = True
            await self.fail(self.lease.node, error)
        except Exception:
            self.kept.lost = True
            # whatever it is, it is this session's alone: nothing that a peer can bring about ends the node
            log.exception("an unforeseen fault in a hop", extra=logs.of(self.lease.session))
            await self.fail(self.lease.node, MeshError("internal", "an unforeseen fault in a hop"))
        finally:
            self._stopped.set()

    async def _push_again(self) -> None:
        """Brings a successor that holds less of the session than this hop does to where this one is."""
        if self.kept.rows is None:
            return
        first, end, borders = self.place.after_cached, self.lease.cached, (self.place.base,)
        for at, n, sample in replays(first, end, borders, self.place.known, self.kept.worker.loaded.max_step):
            await self._push(Work(at, n, memoryview(b""), sample, 0, b""), self.kept.rows.read(at, n))
            await trio.lowlevel.checkpoint()

    async def _step(self, work: Work) -> None:
        ids = activation.read_tokens(work.rows) if self.is_head else None
        kept, self._busy = self.kept, True
        try:
            stepped = await kept.worker.step(
                kept.handle,
                work.first,
                (self.lease.effective.begin, self.lease.effective.end),
                tokens=ids,
                residual=None if self.is_head else work.rows,
                sample=work.sample and self.is_tail,
            )
            width = 4 * self.account.contract.n_embd
            if not self.is_tail and len(stepped.residual) != work.n * width:
                raise MeshError("internal", f"the worker gave {len(stepped.residual)} bytes for {work.n} positions")
            if kept.rows is not None:
                kept.rows.add(work.first, stepped.residual)
            if kept.exhibit is not None:
                kept.exhibit.came(work.first, work.n, bytes(work.rows))
                kept.exhibit.went(work.first, stepped.residual)
            kept.computed = work.first + work.n
            said = self._sampled(stepped.sampled) if stepped.sampled is not None else None
        finally:
            self._busy = False
            self._left.set()
        self._account(work, stepped.compute_ns // 1000)
        if not self.is_tail:
            await self._push(work, stepped.residual)
        elif said is not None and self._speaks:
            await self._say(said)

    def _account(self, work: Work, compute_us: int) -> None:
        if work.segment != self._cutter.segment:
            self._write(self.account.end_before(work.segment, int(time.time())))
        replay = work.first < self.place.base
        ring = isinstance(work, Ring)
        peer = self.place.tail if ring else self.lease.predecessor
        kind = "ring" if ring else "prompt" if self.is_head else "residual"
        log = self.account.link(work.segment, peer, "in", kind, replay=replay)
        log.add(work.first, work.n, work.digest)
        if replay:
            self.account.replayed(work.segment, compute_us)
        else:
            self.account.step(work.segment, work.first, work.n, compute_us)
        self._cutter.count(work.segment, work.n, trio.current_time())

    async def _push(self, work: Work, residual: bytes) -> None:
        lease, after = self.lease, self.place.after
        has = min(work.n, max(0, self.place.after_cached - work.first))  # from an earlier epoch
        if self.over or has == work.n:
            return
        assert after is not None
        residual = residual[has * 4 * self.account.contract.n_embd :]
        work = work._replace(first=work.first + has, n=work.n - has)
        tensor = activation.describe(residual, n_embd=self.account.contract.n_embd)
        push = Push(
            lease=after,
            session=lease.session,
            epoch=lease.epoch,
            step=self.session.sent,
            first=work.first,
            count=work.n,
            begin=lease.effective.end,
            cached=work.first,
            sample=work.sample,
            segment=work.segment,
        )
        self.session.sent += 1
        replay = work.first < self.place.base
        log = self.account.link(work.segment, lease.successor, "out", "residual", replay=replay)
        log.add(work.first, work.n, tensor.sha256)
        await self._send(lease.successor, Pushes((push,), (tensor,)), residual)

    # what the tail says

    def _sampled(self, sampled: Sampled) -> Tokens:
        """What is to be said of it: kept, until the entry node has it for sure."""
        self.sampler.sampled(sampled.is_end)
        ids = () if sampled.is_end else (sampled.token,)
        # a segment begins with what goes round: an answer's last token does not
        going_on = self.sampler.finish is None
        said = Tokens(
            session=self.lease.session,
            epoch=self.lease.epoch,
            first=self.kept.computed,
            ids=ids,
            pieces=(sampled.piece,) if ids else (),
            finish=self.sampler.finish,
            logprobs=_logprobs(sampled) if ids else (),
            segment=self._cutter.due(1, trio.current_time()) if going_on else self._cutter.segment,
        )
        self.kept.said.append(said)
        return said

    async def _speak(self) -> None:
        self._speaks = True
        for said in list(self.kept.said):
            await self._say(said)

    async def _say(self, said: Tokens) -> None:
        # the head first: what it does next is on the way of every token, the entry node's copy is not
        if said.finish is None and said.first >= self.place.head_cached:
            ring = replace(said, lease=self.place.head[1], pieces=(), logprobs=())
            if said is not self.kept.said[-1] or self.sampler.may_go_on:
                await self.send_ring(ring)
            else:
                self._held_back = ring
        if said.first < self.place.known:
            return
        if said.ids:
            self._log_tokens(self.place.entry, "answer", said)
        await self._send(self.place.entry, said)

    async def send_ring(self, tokens: Tokens) -> None:
        if self.over:
            return
        self._log_tokens(self.place.head[0], "ring", tokens)
        await self._send(self.place.head[0], tokens)

    def _log_tokens(self, peer: PeerId, kind: str, tokens: Tokens) -> None:
        digest = hashlib.sha256(activation.tokens_payload(tokens.ids)).digest()
        replay = tokens.first < self.place.base
        log = self.account.link(tokens.segment, peer, "out", kind, replay=replay)
        log.add(tokens.first, len(tokens.ids), digest)

    async def _send(self, peer: PeerId, message: Pushes | Tokens | Renew, payload: bytes = b"") -> None:
        try:
            await self.links.send(peer, message, payload)
        except MeshError as error:
            await self.fail(peer, error)

    # what goes along or back

    async def renew(self) -> None:
        if self.place.after is not None and not self._renewing:
            self._renewing, lease = True, self.lease
            await self._send(lease.successor, Renew(self.place.after, lease.session, lease.epoch))
            self._renewing = False

    async def fail(self, node: PeerId, error: MeshError) -> None:
        """Tells the entry node, along the route's links, that `node` cannot go on. Once: then the hop is over."""
        if self.over:
            return
        self.over = True
        lease = self.lease
        log.warning("hop %d failed at %s: %s", lease.hop, node, error, extra=logs.of(lease.session))
        failure = Failure(lease.session, lease.epoch, node, error.code, error.message, self.place.before)
        try:
            await self.links.send(lease.predecessor, failure)
        except MeshError as lost:  # the way back is cut as well: the entry node will miss its tokens
            log.info("a failure could not be passed back: %s", lost)

    async def release(self) -> None:
        """Ends this epoch here, and leaves what the session has: nothing is computed or said any more. Repeatable."""
        self.over = self._leaving = True
        if self._busy:
            if self._left.is_set():
                self._left = trio.Event()
            await self._left.wait()
        self._scope.cancel()

    def confirmed(self, place: Place) -> None:
        """Takes out of the account what the next epoch's neighbours do not have from this one."""
        self.account.unsaid("residual", place.after_cached)
        self.account.unsaid("ring", place.head_cached)
        self.account.unsaid("answer", place.known)

    async def stop(self, *, worker_ends: bool = False) -> None:
        """Returns once nothing of this hop is in the worker; its slot is then freed.

        worker_ends: the worker goes as well, and what it holds with it.
        """
        self._scope.cancel()
        self.kept.close()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + STOP_S):
            if self._started:
                await self._stopped.wait()
            if worker_ends:
                return
            try:
                await self.kept.worker.close(self.kept.handle)
            except MeshError as error:  # a dead worker holds nothing any more
                log.info("closing a session in the worker: %s", error)


def _logprobs(sampled: Sampled) -> tuple[Logprobs, ...]:
    """As the wire has them: millionths, without their sign."""
    if sampled.logprob is None:
        return ()
    top = tuple(Likely(token, round(-logprob * 1e6), piece) for token, logprob, piece in sampled.top)
    return (Logprobs(round(-sampled.logprob * 1e6), top),)
