"""The work of one lease: rows come in, the worker computes them in order, rows or tokens go out."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import trio

from ..errors import MeshError
from ..ids import PeerId
from ..ledger.account import Account, Cutter, Written
from ..net.links import Links
from ..route.lease import Key
from ..session import HopSession, Sampler
from ..wire import activation
from ..wire.messages import Credit, Failure, Lease, Likely, Logprobs, Push, Pushes, Renew, Tokens
from ..worker import Sampled, Worker

log = logging.getLogger(__name__)

Write = Callable[[Sequence[Written]], None]

STOP_S = 10.0  # a worker that does not let go of a session for so long is being killed for it


@dataclass(frozen=True)
class Place:
    """A hop's neighbours. A lease id is the receiver's own name for the session; the entry node needs none."""

    entry: PeerId
    before: bytes | None  # the predecessor's lease; None when that is the entry node
    after: bytes | None  # the successor's lease; None at the tail
    head: tuple[PeerId, bytes]
    tail: PeerId


class Work(NamedTuple):
    """Rows [n, ...] that were accepted and wait for the worker."""

    first: int
    n: int
    rows: memoryview  # ids [count] i32, or residuals [count, n_embd] f32
    sample: bool
    segment: int


class Hop:
    """Runs one lease. accept_* decide at once and queue; run() computes, one step after the other."""

    def __init__(
        self,
        links: Links,
        worker: Worker,
        handle: int,
        lease: Lease,
        place: Place,
        account: Account,
        max_tokens: int,
        write: Write,
    ) -> None:
        self.links = links
        self.worker = worker
        self.handle = handle
        self.lease = lease
        self.place = place
        self.account = account
        self.session = HopSession(lease)
        self.sampler = Sampler(max_tokens)
        self._write = write
        self._cutter = Cutter(lease.hop + 1)  # the tail's
        self.computed = 0  # positions
        self.over = False  # a fault was passed on: nothing more is accepted
        self._renewing = False
        self._held_back: Tokens | None = None
        # bounded by the lease: no more positions are accepted than its context has
        self._todo, self._work = trio.open_memory_channel[Work](math.inf)
        self._scope = trio.CancelScope()
        self._stopped = trio.Event()
        self._started = False

    @property
    def key(self) -> Key:
        return self.place.entry, self.lease.session

    @property
    def is_head(self) -> bool:
        return self.lease.effective.begin == 0

    @property
    def is_tail(self) -> bool:
        return self.place.after is None

    # what comes in

    def accept_push(self, push: Push, rows: memoryview, digest: bytes) -> None:
        """Queues the very next push; a refused one changes nothing."""
        self.session.accept(push)
        kind = "prompt" if self.is_head else "residual"
        self.account.link(push.segment, self.lease.predecessor, "in", kind).add(push.first, push.count, digest)
        self._todo.send_nowait(Work(push.first, push.count, rows, push.sample, push.segment))

    def accept_ring(self, tokens: Tokens) -> None:
        """Queues the tail's tokens at the head."""
        self.session.accept_ring(tokens)
        rows = activation.tokens_payload(tokens.ids)
        digest = hashlib.sha256(rows).digest()
        self.account.link(tokens.segment, self.place.tail, "in", "ring").add(tokens.first, len(tokens.ids), digest)
        self._todo.send_nowait(Work(tokens.first, len(tokens.ids), memoryview(rows), True, tokens.segment))

    def accept_credit(self, credit: Credit) -> Tokens | None:
        """What was held back for want of credit, and may now go into the ring."""
        self.sampler.grant(credit.total)
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
                async for work in self._work:
                    await self._step(work)
        except MeshError as error:
            await self.fail(self.lease.node, error)
        except Exception:
            # whatever it is, it is this session's alone: nothing that a peer can bring about ends the node
            log.exception("an unforeseen fault in a hop")
            await self.fail(self.lease.node, MeshError("internal", "an unforeseen fault in a hop"))
        finally:
            self._stopped.set()

    async def _step(self, work: Work) -> None:
        ids = activation.read_tokens(work.rows) if self.is_head else None
        stepped = await self.worker.step(
            self.handle,
            work.first,
            (self.lease.effective.begin, self.lease.effective.end),
            tokens=ids,
            residual=None if self.is_head else work.rows,
            sample=work.sample and self.is_tail,
        )
        if work.segment != self._cutter.segment:
            self._write(self.account.end_before(work.segment, int(time.time())))
        self.account.step(work.segment, work.first, work.n, stepped.compute_ns // 1000)
        self._cutter.count(work.segment, work.n, trio.current_time())
        self.computed = work.first + work.n
        width = 4 * self.account.contract.n_embd
        if not self.is_tail and len(stepped.residual) != work.n * width:
            raise MeshError("internal", f"the worker gave {len(stepped.residual)} bytes for {work.n} positions")
        if not self.is_tail:
            await self._push(work, stepped.residual)
        elif stepped.sampled is not None:
            await self._sampled(stepped.sampled)

    async def _push(self, work: Work, residual: bytes) -> None:
        lease, after = self.lease, self.place.after
        assert after is not None
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
        self.account.link(work.segment, lease.successor, "out", "residual").add(work.first, work.n, tensor.sha256)
        await self._send(lease.successor, Pushes((push,), (tensor,)), residual)

    async def _sampled(self, sampled: Sampled) -> None:
        lease, position = self.lease, self.computed
        self.sampler.sampled(sampled.is_end)
        ids = () if sampled.is_end else (sampled.token,)
        # a segment begins with what goes round: an answer's last token does not
        going_on = self.sampler.finish is None
        segment = self._cutter.due(1, trio.current_time()) if going_on else self._cutter.segment
        answer = Tokens(
            session=lease.session,
            epoch=lease.epoch,
            first=position,
            ids=ids,
            pieces=(sampled.piece,) if ids else (),
            finish=self.sampler.finish,
            logprobs=_logprobs(sampled) if ids else (),
            segment=segment,
        )
        # the head first: what it does next is on the way of every token, the entry node's copy is not
        if going_on:
            ring = Tokens(
                session=lease.session,
                epoch=lease.epoch,
                first=position,
                ids=ids,
                lease=self.place.head[1],
                segment=segment,
            )
            if self.sampler.may_go_on:
                await self.send_ring(ring)
            else:
                self._held_back = ring
        if ids:
            self._log_tokens(self.place.entry, "answer", answer)
        await self._send(self.place.entry, answer)

    async def send_ring(self, tokens: Tokens) -> None:
        self._log_tokens(self.place.head[0], "ring", tokens)
        await self._send(self.place.head[0], tokens)

    def _log_tokens(self, peer: PeerId, kind: str, tokens: Tokens) -> None:
        digest = hashlib.sha256(activation.tokens_payload(tokens.ids)).digest()
        self.account.link(tokens.segment, peer, "out", kind).add(tokens.first, len(tokens.ids), digest)

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
        log.warning("hop %d of a session failed at %s: %s", lease.hop, node, error)
        failure = Failure(lease.session, lease.epoch, node, error.code, error.message, self.place.before)
        try:
            await self.links.send(lease.predecessor, failure)
        except MeshError as lost:  # the way back is cut as well: the entry node will miss its tokens
            log.info("a failure could not be passed back: %s", lost)

    async def stop(self, *, worker_ends: bool = False) -> None:
        """Returns once nothing of this hop is in the worker; its slot is then freed.

        worker_ends: the worker goes as well, and what it holds with it.
        """
        self._scope.cancel()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + STOP_S):
            if self._started:
                await self._stopped.wait()
            if worker_ends:
                return
            try:
                await self.worker.close(self.handle)
            except MeshError as error:  # a dead worker holds nothing any more
                log.info("closing a session in the worker: %s", error)


def _logprobs(sampled: Sampled) -> tuple[Logprobs, ...]:
    """As the wire has them: millionths, without their sign."""
    if sampled.logprob is None:
        return ()
    top = tuple(Likely(token, round(-logprob * 1e6), piece) for token, logprob, piece in sampled.top)
    return (Logprobs(round(-sampled.logprob * 1e6), top),)
