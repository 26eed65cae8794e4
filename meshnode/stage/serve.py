"""What a serving node answers: offers, tokens of a text, leases; and what it does with what comes over links."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import trio

from ..config import NodeConfig
from ..errors import MeshError
from ..ids import PeerId
from ..keys import NodeKey
from ..net.directory import Directory
from ..net.links import Links
from ..route.lease import Event
from ..wire import activation, messages, statements
from ..wire.audits import AuditCase, AuditPart, AuditQuery, AuditRows
from ..wire.messages import (
    Close,
    Closed,
    Credit,
    Failure,
    Offers,
    Pushes,
    Renew,
    RouteOpen,
    Tokenize,
    Tokenized,
    Tokens,
    code_here,
)
from .holding import Holding
from .hop import Hop
from .leased import Leased
from .opening import ONWARD_S, Opening

log = logging.getLogger(__name__)

SWEEP_S = 0.25  # how late a lease's end may be noticed
LET_GO_S = 1.0  # for telling an entry node that its session ends here
TOKEN_BYTES = 32  # a text with more bytes a token than this is not worth the time that it takes to tokenize


class Stage:
    """Serves the holdings of one node."""

    def __init__(
        self,
        links: Links,
        directory: Directory,
        key: NodeKey,
        config: NodeConfig,
        *,
        sweep_s: float = SWEEP_S,
        onward_s: float = ONWARD_S,
    ) -> None:
        self._links = links
        self._directory = directory
        self._key = key
        self._mesh_id = directory.mesh_id
        self._config = config
        self._leased = leased = Leased(key, directory.mesh_id)
        self.holdings, self.hops, self.on_receipt = leased.holdings, leased.hops, leased.on_receipt
        self.exhibits = leased.exhibits
        self._opening = Opening(links, directory, key, config, leased)
        self._opening.onward_s = onward_s
        self._sweep_s = sweep_s

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._opening.addresses

    @addresses.setter
    def addresses(self, addresses: tuple[str, ...]) -> None:
        self._opening.addresses = addresses

    async def run(self, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        links = self._links
        links.answer(messages.OfferQuery, self._offers)
        links.answer(Tokenize, self._tokenize)
        links.answer(RouteOpen, self._opening.open)
        links.answer(Close, self._close)
        links.answer(AuditQuery, self._case)
        links.answer(AuditRows, self._rows)
        links.take(Pushes, self._pushes)
        links.take(Tokens, self._ring)
        links.take(Credit, self._credit)
        links.take(Renew, self._renew)
        links.take(Failure, self._failure)
        links.on_lost.append(self._lost)
        async with trio.open_nursery() as self._nursery:
            self._opening.nursery = self._nursery
            self._nursery.start_soon(self._opening.keep_looking)
            task_status.started()
            while True:
                await trio.sleep(self._sweep_s)
                await self._sweep()

    def hold(self, holding: Holding) -> None:
        self.holdings.append(holding)
        self._opening.held.set()

    async def let_go(self, holding: Holding, why: MeshError | None = None) -> None:
        """No new leases; the sessions that are on it are told why, and ended."""
        self.holdings.remove(holding)
        fault = holding.worker.fault or why or MeshError("hop_failed", "the node stops serving these layers")
        for hop in self._leased.on(holding):
            with trio.move_on_after(LET_GO_S):
                await hop.fail(self._key.peer, fault)
            await self._leased.end(hop, Event.CLOSE, worker_ends=True)

    async def shut(self) -> None:
        """Ends every session that runs here, so that what was done is accounted for."""
        for hop in list(self.hops.values()):
            await self._leased.end(hop, Event.CLOSE)
        self.exhibits.close()

    @property
    def standing(self) -> Callable[[PeerId], int]:
        """The work that a peer did for those whom this node owes: it ranks requests that wait for a place."""
        return self._opening.standing

    @standing.setter
    def standing(self, standing: Callable[[PeerId], int]) -> None:
        self._opening.standing = standing

    # requests

    async def _case(self, peer: PeerId, ask: AuditQuery) -> AuditCase:
        return self.exhibits.find(ask.receipt).case(ask.receipt)

    async def _rows(self, peer: PeerId, ask: AuditRows) -> AuditPart:
        return self.exhibits.find(ask.receipt).part(ask)

    async def _offers(self, peer: PeerId, ask: messages.OfferQuery) -> Offers:
        offers = [
            statements.sign(self._key, self._mesh_id, holding.offer(ask.nonce, self._key.peer, self.addresses))
            for holding in self.holdings
            if ask.artifact in (None, holding.artifact)
        ]
        return Offers(tuple(offers))

    async def _tokenize(self, peer: PeerId, ask: Tokenize) -> Tokenized:
        heads = [h for h in self.holdings if h.artifact == ask.artifact and h.is_head]
        if not heads:
            raise MeshError("unknown_model", "this node is no head of that artifact")
        worker, limit = heads[0].worker, heads[0].worker.loaded.n_ctx
        size = len((ask.text or "").encode()) + sum(len(turn.content.encode()) for turn in ask.chat)
        if size > limit * TOKEN_BYTES:
            raise MeshError("context_exceeded", f"a prompt of {size} bytes cannot fit the context of {limit} tokens")
        if ask.text is not None and not ask.chat:
            ids = await worker.tokenize(ask.text, add_special=True, parse_special=True)
        elif ask.chat and ask.text is None:
            ids = await heads[0].tokenize_chat([(turn.role, turn.content) for turn in ask.chat])
        else:
            raise MeshError("bad_frame", "either a text or a chat is to be tokenized")
        if len(ids) > limit:
            raise MeshError("context_exceeded", f"the prompt has {len(ids)} tokens, the context {limit}")
        return Tokenized(tuple(ids))

    async def _close(self, peer: PeerId, ask: Close) -> Closed:
        hop = self.hops.get(ask.lease)
        if hop is None or (ask.session, ask.epoch) != (hop.lease.session, hop.lease.epoch):
            raise MeshError("unknown_session", "no lease of that name is held here")
        if peer not in (hop.lease.predecessor, hop.place.entry):
            raise MeshError("bad_lease", "only the hop before, or the entry node, may close a lease")
        following: list[messages.Signed] = []

        async def pass_on() -> None:
            if hop.place.after is None:
                return
            further = Close(hop.place.after, ask.session, ask.epoch, ask.reason)
            try:
                answer = await self._links.request(
                    hop.lease.successor, further, Closed, timeout=self._config.hop_timeout_s
                )
                following.extend(answer.receipts)
            except MeshError as error:
                log.info("closing onward: %s", error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(pass_on)
            await self._leased.end(hop, Event.CLOSE)
        own = [statements.sign(self._key, self._mesh_id, written.receipt) for written in hop.account.written]
        return Closed((*own, *following)[: messages.MAX_RECEIPTS])

    # links: what has to be sent on is sent by tasks of their own, for a peer that has to be dialled first would hold up
    # all that comes after on the link

    def _hop_of(self, lease: bytes, sender: PeerId, leased: str) -> Hop | None:
        hop = self.hops.get(lease)
        if hop is None:
            log.info("a message for a lease that is not held here, from %s", sender)
        elif sender != getattr(hop.lease, leased, None) and sender != getattr(hop.place, leased, None):
            log.warning("a message for a lease from %s, which is not its %s", sender, leased)
            return None
        return hop

    async def _pushes(self, peer: PeerId, message: Pushes, payload: memoryview) -> None:
        hops = [self._hop_of(push.lease, peer, "predecessor") for push in message.pushes]
        known = [hop for hop in hops if hop is not None]
        if not known:
            return
        try:
            parts = activation.split(message, payload, n_embd=_one_width(known))
        except MeshError as error:  # the frame was whole: its sessions are at fault, not the link
            for hop in known:
                self._fail_soon(hop, peer, error)
            return
        for addressed, (push, rows) in zip(hops, parts, strict=True):
            if addressed is None or addressed.over:
                continue
            hop = addressed
            alone = len(parts) == 1
            digest = message.bundle[0].sha256 if alone else hashlib.sha256(rows).digest()
            try:
                if not hop.is_head:
                    activation.check_rows(rows)
                # rows of a shared frame are copied, or a small push would keep all of it
                hop.accept_push(push, rows if alone else memoryview(bytes(rows)), digest)
                self._leased.holding_of(hop).book.apply(hop.key, push.epoch, Event.PUSH, trio.current_time())
            except MeshError as error:
                self._fail_soon(hop, peer, error)

    def _fail_soon(self, hop: Hop, node: PeerId, error: MeshError) -> None:
        if not hop.over:  # one task a hop, however many bad messages come
            self._nursery.start_soon(hop.fail, node, error)

    async def _ring(self, peer: PeerId, message: Tokens, _: memoryview) -> None:
        if message.lease is None:
            return
        hop = self._hop_of(message.lease, peer, "tail")
        if hop is not None and hop.is_head and not hop.over:
            try:
                hop.accept_ring(message)
            except MeshError as error:
                self._fail_soon(hop, peer, error)

    async def _credit(self, peer: PeerId, message: Credit, _: memoryview) -> None:
        hop = self._hop_of(message.lease, peer, "entry")
        if hop is not None and message.epoch == hop.lease.epoch:
            tokens = hop.accept_credit(message)
            if tokens is not None:
                self._nursery.start_soon(hop.send_ring, tokens)

    async def _renew(self, peer: PeerId, message: Renew, _: memoryview) -> None:
        hop = self._hop_of(message.lease, peer, "predecessor")
        if hop is None or message.epoch != hop.lease.epoch:
            return
        book = self._leased.holding_of(hop).book
        book.apply(hop.key, message.epoch, Event.RENEW, trio.current_time())
        self._nursery.start_soon(hop.renew)

    async def _failure(self, peer: PeerId, message: Failure, _: memoryview) -> None:
        if message.lease is not None:
            hop = self._hop_of(message.lease, peer, "successor")
            if hop is not None:
                self._fail_soon(hop, message.node, MeshError(code_here(message.code), message.say))

    def _lost(self, peer: PeerId) -> None:
        gone = MeshError("unreachable", "the connection to the next hop broke")
        for hop in list(self.hops.values()):
            if hop.lease.successor == peer and not hop.is_tail:
                self._nursery.start_soon(hop.fail, peer, gone)

    async def _sweep(self) -> None:
        self.exhibits.expire()
        now = trio.current_time()
        over = {id(h): {(r.key, r.epoch) for r in h.book.lapsed(now)} for h in self.holdings}
        for hop in list(self.hops.values()):
            if (hop.key, hop.lease.epoch) in over.get(id(self._leased.holding_of(hop)), ()):
                log.info("a lease has ended without being closed")
                await self._leased.end(hop, Event.LAPSE)


def _one_width(hops: Sequence[Hop]) -> int:
    """n_embd, when it is that of all; MeshError bad_frame for a frame that mixes models."""
    widths = {hop.account.contract.n_embd for hop in hops}
    if len(widths) > 1:
        raise MeshError("bad_frame", "a frame that mixes models")
    return widths.pop()
