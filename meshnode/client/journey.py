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
    Credit,
    Failure,
    Lease,
    LinkMessage,
    Push,
    Pushes,
    Renew,
    Signed,
    Tensor,
    Tokens,
    code_here,
)
from .ask import Done, Event, Recovered, Routed, Token
from .mending import IN_VAIN, HopFailed, Mender
from .opening import Route, Wanted, abandon, close

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 3.0  # for the receipts to come back
SLOWEST_POSITION_S = 0.25  # prefill slower than this is taken for a hop that hangs
MEASURED_TOKENS = 8  # fewer intervals tell little of what a route takes a token
RENEWALS = 3  # a lease is renewed this many times in its time to live


class Journey:
    """Drives one session, epoch after epoch."""

    def __init__(
        self,
        links: Links,
        key: NodeKey,
        config: NodeConfig,
        mesh_id: str,
        mender: Mender,
        wanted: Wanted,
        route: Route,
        prompt: tuple[int, ...],
        tell: Callable[[Sequence[Signed]], None],
    ) -> None:
        self._links = links
        self._key = key
        self._config = config
        self._mesh_id = mesh_id
        self._mender = mender
        self._tell = tell  # of what was signed at the end
        self._wanted = wanted
        self.answer = Answer(prompt, wanted.max_tokens)
        self.recovered: list[Recovered] = []
        self._granted = 0  # tokens, in all
        self._in_vain = 0
        self.claimed_s = math.nan  # seconds a token, as the head's offer had it
        self._renewing = trio.CancelScope()
        self._follow(route)

    def _follow(self, route: Route) -> None:
        """From here on the session is in the route's epoch."""
        self.route = route
        self.grant, self.leases = route.grant, route.leases
        self._known = len(self.ids)
        self._arrived = len(self.answer.ids)  # tokens, taken or not
        self._over = False
        self._cutter = Cutter(len(route.leases))
        self._seen = Seen(self.grant.session, self.head.node, self.tail.node, route.base, self.head.cached)
        self._inbox, self._arrivals = trio.open_memory_channel[Tokens | MeshError](math.inf)

    @property
    def ids(self) -> tuple[int, ...]:
        """Of the session so far."""
        return (*self.answer.prompt, *self.answer.ids)

    @property
    def head(self) -> Lease:
        return self.leases[0]

    @property
    def tail(self) -> Lease:
        return self.leases[-1]

    @property
    def token_s(self) -> float | None:
        """Seconds a token, as measured; None when too few came to tell, or not all of them over one route."""
        between = len(self.answer.ids) - 1
        told = between >= MEASURED_TOKENS and not self.recovered
        return (self._last - self._first) / between if told else None

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

    def _hop_failed(self, node: PeerId, code: str, say: str) -> HopFailed:
        layers = ", ".join(str(lease.effective) for lease in self.leases if lease.node == node) or "unknown"
        return HopFailed("hop_failed", f"the hop {node} (layers {layers}) failed: {code}, {say}", node, code)

    # the way

    @asynccontextmanager
    async def travel(self) -> AsyncIterator[AsyncIterator[Event]]:
        done = False

        async def events() -> AsyncIterator[Event]:
            nonlocal done
            yield Routed(self.leases, self.answer.prompt)
            while self.answer.finish is None:
                try:
                    async for event in self._tokens_as_they_come():
                        yield event
                except HopFailed as fault:
                    yield await self._recover(fault, nursery)
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

    async def _recover(self, fault: HopFailed, nursery: trio.Nursery) -> Recovered:
        """The session goes on in another epoch; MeshError when it cannot."""
        log.warning("a session in epoch %d: %s", self.grant.epoch, fault)
        began, left, made = trio.current_time(), self.leases, len(self.answer.ids)
        self._over = True
        self._in_vain = self._in_vain + 1 if self.recovered and self.recovered[-1].tokens == made else 0
        if self._in_vain >= IN_VAIN:
            raise fault
        mended = await self._mender.mend(self._wanted, self.route, self.grant.epoch, fault, self.ids, made)
        self._follow(mended.route)
        stayed = {lease.node for lease in self.leases}
        nursery.start_soon(abandon, self._links, [lease for lease in left if lease.node not in stayed])
        invariant = self._wanted.contract.numerics == "invariant"
        said = Recovered(
            epoch=self.grant.epoch,
            why=fault.why,
            tokens=made,
            replayed=len(self.ids) - min(lease.cached for lease in self.leases),
            restarted=mended.restarted,
            may_differ=mended.restarted or not invariant,
            seconds=trio.current_time() - began,
            leases=self.leases,
        )
        self.recovered.append(said)
        return said

    async def _tokens_as_they_come(self) -> AsyncIterator[Token]:
        """Those of this epoch. HopFailed when a hop does."""
        await self._grant_credit(anew=True)
        began = trio.current_time()
        if not self.recovered:
            self._began = self._first = self._last = began
        await self._push_ids()
        todo = len(self.ids) - min(lease.cached for lease in self.leases)
        patience = self._config.hop_timeout_s + SLOWEST_POSITION_S * max(0, todo)
        while self.answer.finish is None:
            with trio.move_on_after(patience) as waiting:
                arrived = await self._arrivals.receive()
            if waiting.cancelled_caught:
                raise HopFailed("deadline", f"the route gave no token for {patience:.0f} s", None, "deadline")
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

    async def _push_ids(self) -> None:
        """All of the session that the head does not hold. What any hop holds already is a replay, in pushes apart."""
        ids, chunk, first, step = self.ids, self._config.chunk, self.head.cached, 0
        while first < len(ids):
            end = min(first + chunk, len(ids))
            if first < self.route.base:
                end = min(end, self.route.base)
            part = ids[first:end]
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
                sample=end == len(ids),
                segment=segment,
            )
            self._seen.pushed(segment, first, len(part), tensor.sha256)
            await self._send(self.head, Pushes((push,), (tensor,)), payload)
            first, step = end, step + 1

    async def _grant_credit(self, *, anew: bool = False) -> None:
        """Renewed when half of it is used, so that it never stops a ring that is being listened to.

        anew: the tail has not heard of it in this epoch.
        """
        taken, credit = len(self.answer.ids), self._config.credit
        if anew or self._granted - taken <= credit // 2:
            self._granted = taken + credit
            tail = self.tail
            await self._send(tail, Credit(tail.lease, self.grant.session, self.grant.epoch, self._granted))

    async def _send(self, to: Lease, message: LinkMessage, payload: bytes = b"") -> None:
        try:
            await self._links.send(to.node, message, payload)
        except MeshError as error:
            raise self._hop_failed(to.node, error.code, error.message) from error

    async def _keep_renewing(self) -> None:
        with self._renewing:
            while True:
                await trio.sleep(min(lease.ttl for lease in self.leases) / 1000 / RENEWALS)
                if self._over:
                    continue
                route = self.route
                try:
                    await self._send(self.head, Renew(self.head.lease, self.grant.session, self.grant.epoch))
                except HopFailed as fault:
                    if self.route is route:
                        self._end(fault)

    # the end

    async def _finish(self) -> Done:
        """Closes every hop; checks that the receipts agree with each other and with what was seen; countersigns.

        The answer stands whatever became of its receipts.
        """
        self._seen.cut = self.answer.finish == "length"
        fault: MeshError | None = None
        try:
            signed = list((await close(self._links, self.head, "done", CLOSE_TIMEOUT_S)).receipts)
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
            recovered=tuple(self.recovered),
        )

    def _settle(self, signed: Sequence[Signed]) -> tuple[tuple[Filed, ...], tuple[Signed, ...], list[MeshError]]:
        """Holds the receipts against what was seen, countersigns those that agree, and hands all of them on."""
        if not self._config.receipts:
            return (), (), []
        settled = settle(signed, self.leases, self.grant, self._seen, self._mesh_id)
        for fault in settled.faults if not self._seen.broken else ():
            log.warning("the receipts of an answer: %s", fault)
        said = acceptances(settled.rows, self.grant, self._seen, int(time.time()))
        accepted = tuple(statements.sign(self._key, self._mesh_id, acceptance) for acceptance in said)
        receipts = tuple(filed for row in settled.rows for filed in row)
        self._tell((*(filed.signed for filed in receipts), *accepted))
        return receipts, accepted, settled.faults
