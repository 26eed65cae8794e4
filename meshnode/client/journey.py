"""One session on its route, seen from the entry node: prompt out, tokens in, credit and renewals, and its end."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import trio

from ..config import NodeConfig
from ..errors import MeshError
from ..ids import PeerId
from ..keys import NodeKey
from ..ledger.account import Cutter
from ..ledger.receipts import Seen, acceptances, settle
from ..ledger.rules import Filed
from ..net.links import Links
from ..session import Answer
from ..wire import activation, statements
from ..wire.messages import (
    Close,
    Closed,
    Credit,
    Failure,
    Grant,
    Lease,
    Push,
    Pushes,
    Renew,
    Signed,
    Tensor,
    Tokens,
    code_here,
)
from .ask import Done, Event, Routed, Token

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 3.0  # for the receipts to come back
ABANDON_TIMEOUT_S = 1.5  # for telling the hops that nobody wants the answer any more
SLOWEST_POSITION_S = 0.25  # prefill slower than this is taken for a hop that hangs
MEASURED_TOKENS = 8  # fewer intervals tell little of what a route takes a token
RENEWALS = 3  # a lease is renewed this many times in its time to live


class Journey:
    """Drives one epoch of one session."""

    def __init__(
        self,
        links: Links,
        key: NodeKey,
        config: NodeConfig,
        mesh_id: str,
        grant: Grant,
        leases: Sequence[Lease],
        prompt: tuple[int, ...],
        max_tokens: int,
        tell: Callable[[Sequence[Signed]], None],
    ) -> None:
        self._links = links
        self._key = key
        self._config = config
        self._mesh_id = mesh_id
        self.grant = grant
        self.leases = tuple(leases)
        self.answer = Answer(prompt, max_tokens)
        self._tell = tell  # of what was signed at the end
        self._granted = 0
        self._arrived = 0  # tokens, taken or not
        self.claimed_s = math.nan  # seconds a token, as the head's offer had it
        self._over = False
        self._renewing = trio.CancelScope()
        self._cutter = Cutter(len(leases))
        self._seen = Seen(grant.session, self.head.node, self.tail.node)
        self._inbox, self._arrivals = trio.open_memory_channel[Tokens | MeshError](math.inf)

    @property
    def head(self) -> Lease:
        return self.leases[0]

    @property
    def tail(self) -> Lease:
        return self.leases[-1]

    @property
    def token_s(self) -> float | None:
        """Seconds a token, as measured; None when too few came to tell."""
        between = len(self.answer.ids) - 1
        return (self._last - self._first) / between if between >= MEASURED_TOKENS else None

    async def link(self) -> None:
        """The route is ready once its links are up: the entry node, often behind a NAT, dials both of its own."""
        await self._links.connect(self.tail.node, self.tail.addresses)
        await self._links.connect(self.head.node, self.head.addresses)

    # what arrives; called by the node's one dispatcher

    def tokens(self, peer: PeerId, message: Tokens) -> None:
        if peer != self.tail.node or message.epoch != self.grant.epoch or self._over:
            return
        self._arrived += len(message.ids)
        if self._arrived > self._granted or not (message.ids or message.finish):
            self._end(self._hop_failed(peer, "bad_step", "it sent tokens that it had no credit for"))
            return
        self._inbox.send_nowait(message)

    def failure(self, peer: PeerId, message: Failure) -> None:
        if peer == self.head.node and message.epoch == self.grant.epoch:
            code, say = code_here(message.code), message.say
            self._end(self._hop_failed(message.node, code, say))

    def lost(self, peer: PeerId) -> None:
        if peer in (self.head.node, self.tail.node):
            self._end(self._hop_failed(peer, "unreachable", "its connection broke"))

    def _end(self, fault: MeshError) -> None:
        """What has arrived is still taken; after it comes the fault, once."""
        if not self._over:
            self._over = True
            self._inbox.send_nowait(fault)

    def _hop_failed(self, node: PeerId, code: str, say: str) -> MeshError:
        layers = ", ".join(str(lease.effective) for lease in self.leases if lease.node == node) or "unknown"
        return MeshError("hop_failed", f"the hop {node} (layers {layers}) failed: {code}, {say}")

    # the way

    @asynccontextmanager
    async def travel(self) -> AsyncIterator[AsyncIterator[Event]]:
        done = False

        async def events() -> AsyncIterator[Event]:
            nonlocal done
            yield Routed(self.leases, self.answer.prompt)
            async for event in self._tokens_as_they_come():
                yield event
            finished = await self._finish()
            done = True
            yield finished

        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_renewing)
            try:
                yield events()
            except Exception as error:  # handed on below, outside of the nursery that would wrap it in a group
                failure = error
            finally:
                nursery.cancel_scope.cancel()
                if not done:
                    self._seen.broken = True
                    with trio.CancelScope(shield=True):
                        self._settle(await abandon(self._links, self.leases))
        if failure is not None:
            raise failure

    def stop_renewing(self) -> None:
        """From here on every hop ends the session by itself, within its time to live."""
        self._renewing.cancel()

    async def _tokens_as_they_come(self) -> AsyncIterator[Token]:
        await self._grant_credit()
        self._began = self._first = self._last = trio.current_time()
        await self._push_prompt()
        patience = self._config.hop_timeout_s + SLOWEST_POSITION_S * len(self.answer.prompt)
        while self.answer.finish is None:
            with trio.move_on_after(patience) as waiting:
                arrived = await self._arrivals.receive()
            if waiting.cancelled_caught:
                raise MeshError("deadline", f"the route gave no token for {patience:.0f} s")
            if isinstance(arrived, MeshError):
                raise arrived
            self._last = trio.current_time()
            if not self.answer.ids:
                self._first = self._last
                patience = self._config.hop_timeout_s
            digest = hashlib.sha256(activation.tokens_payload(arrived.ids)).digest()
            taken = self.answer.take(arrived)
            if arrived.ids:
                self._seen.took(arrived.segment, arrived.first, len(arrived.ids), digest)
            told = arrived.logprobs or (None,) * len(taken)
            for (token, text), logprobs in zip(taken, told, strict=True):
                yield Token(token, text, logprobs)
            if self.answer.finish is None:
                await self._grant_credit()

    async def _push_prompt(self) -> None:
        prompt, chunk = self.answer.prompt, self._config.chunk
        for step, first in enumerate(range(0, len(prompt), chunk)):
            part = prompt[first : first + chunk]
            payload = activation.tokens_payload(part)
            tensor: Tensor = activation.describe(payload, n_embd=None)
            now = trio.current_time()
            segment = self._cutter.due(len(part), now)
            self._cutter.count(segment, len(part), now)
            push = Push(
                lease=self.head.lease,
                session=self.grant.session,
                epoch=self.grant.epoch,
                step=step,
                first=first,
                count=len(part),
                begin=0,
                cached=first,
                sample=first + chunk >= len(prompt),
                segment=segment,
            )
            self._seen.pushed(segment, first, len(part), tensor.sha256)
            await self._links.send(self.head.node, Pushes((push,), (tensor,)), payload)

    async def _grant_credit(self) -> None:
        """Renewed when half of it is used, so that it never stops a ring that is being listened to."""
        taken, credit = len(self.answer.ids), self._config.credit
        if self._granted - taken <= credit // 2:
            self._granted = taken + credit
            tail = self.tail
            await self._links.send(tail.node, Credit(tail.lease, self.grant.session, self.grant.epoch, self._granted))

    async def _keep_renewing(self) -> None:
        head, pause = self.head, min(lease.ttl for lease in self.leases) / 1000 / RENEWALS
        try:
            with self._renewing:
                while True:
                    await trio.sleep(pause)
                    await self._links.send(head.node, Renew(head.lease, self.grant.session, self.grant.epoch))
        except MeshError as error:
            self._end(self._hop_failed(head.node, error.code, error.message))

    # the end

    async def _finish(self) -> Done:
        """Closes every hop; checks that the receipts agree with each other and with what was seen; countersigns.

        The answer stands whatever became of its receipts.
        """
        self._seen.cut = self.answer.finish == "length"
        fault: MeshError | None = None
        try:
            signed = list((await _close(self._links, self.head, "done", CLOSE_TIMEOUT_S)).receipts)
        except MeshError as error:
            log.warning("the end of an answer: %s", error)
            fault = error
            signed = await abandon(self._links, self.leases)
        receipts, accepted, faults = self._settle(signed)
        assert self.answer.finish is not None
        return Done(
            text=self.answer.text,
            ids=tuple(self.answer.ids),
            prompt=self.answer.prompt,
            finish=self.answer.finish,
            leases=self.leases,
            ttft_s=self._first - self._began,
            decode_s=self._last - self._first,
            receipts=receipts,
            accepted=accepted,
            fault=fault or next(iter(faults), None),
        )

    def _settle(self, signed: Sequence[Signed]) -> tuple[tuple[Filed, ...], tuple[Signed, ...], list[MeshError]]:
        """Holds the receipts against what was seen, countersigns those that agree, and hands all of them on."""
        settled = settle(signed, self.leases, self.grant, self._seen, self._mesh_id)
        for fault in settled.faults if not self._seen.broken else ():
            log.warning("the receipts of an answer: %s", fault)
        said = acceptances(settled.rows, self.grant, self._seen, int(time.time()))
        accepted = tuple(statements.sign(self._key, self._mesh_id, acceptance) for acceptance in said)
        receipts = tuple(filed for row in settled.rows for filed in row)
        self._tell((*(filed.signed for filed in receipts), *accepted))
        return receipts, accepted, settled.faults


async def abandon(links: Links, leases: Sequence[Lease]) -> list[Signed]:
    """Tells every hop by itself: those behind a broken one would not hear it from their predecessor. Their receipts."""
    receipts: dict[bytes, Signed] = {}

    async def close(lease: Lease) -> None:
        try:
            closed = await _close(links, lease, "cancelled", ABANDON_TIMEOUT_S)
            receipts.update((statements.digest(signed), signed) for signed in closed.receipts)
        except MeshError as error:  # it has lapsed, was closed by the hop before, or is gone with its node
            log.info("closing the lease of %s: %s", lease.node, error)

    with trio.CancelScope(shield=True):
        async with trio.open_nursery() as nursery:
            for lease in leases:
                nursery.start_soon(close, lease)
    return list(receipts.values())


async def _close(links: Links, lease: Lease, reason: str, timeout: float) -> Closed:
    message = Close(lease.lease, lease.session, lease.epoch, reason)
    return await links.request(lease.node, message, Closed, timeout=timeout)
