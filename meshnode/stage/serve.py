"""What a serving node answers: offers, tokens of a text, leases; and what it does with what comes over links."""

from __future__ import annotations

import hashlib
import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import trio

from ..config import NodeConfig
from ..errors import MeshError
from ..ids import Layers, PeerId
from ..keys import NodeKey
from ..ledger.account import Account, Written
from ..net.directory import Directory
from ..net.links import Links, Refused
from ..route import choose
from ..route.lease import Event
from ..wire import activation, messages, statements
from ..wire.messages import (
    Close,
    Closed,
    Credit,
    Failed,
    Failure,
    Grant,
    Lease,
    Offers,
    Pushes,
    Refusal,
    Renew,
    RouteOpen,
    RouteReady,
    Signed,
    Tokenize,
    Tokenized,
    Tokens,
    code_here,
)
from ..worker import Sampling, Worker
from .holding import Holding
from .hop import STOP_S, Hop, Place

log = logging.getLogger(__name__)

ONWARD_S = 10.0  # between two looks at who goes on from what is held here: churn of 10 % a minute changes little in it
SWEEP_S = 0.25  # how late a lease's end may be noticed
LET_GO_S = 1.0  # for telling an entry node that its session ends here
TOKEN_BYTES = 32  # a text with more bytes a token than this is not worth the time that it takes to tokenize
MARGIN = 0.9  # of the time left goes to the next hop: the rest is for its answer's way back
MIN_HOP_S = 0.05  # less time than this is not worth asking a successor


class Stage:
    """Serves the holdings of one node."""

    def __init__(self, links: Links, directory: Directory, key: NodeKey, config: NodeConfig) -> None:
        self._links = links
        self._directory = directory
        self._key = key
        self._mesh_id = directory.mesh_id
        self._config = config
        self.holdings: list[Holding] = []
        self.hops: dict[bytes, Hop] = {}  # by lease id
        self._by_lease: dict[bytes, Holding] = {}
        self._held = trio.Event()
        self.addresses: tuple[str, ...] = ()
        self.on_receipt: list[Callable[[Signed, Written], None]] = []

    async def run(self, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        links = self._links
        links.answer(messages.OfferQuery, self._offers)
        links.answer(Tokenize, self._tokenize)
        links.answer(RouteOpen, self._open)
        links.answer(Close, self._close)
        links.take(Pushes, self._pushes)
        links.take(Tokens, self._ring)
        links.take(Credit, self._credit)
        links.take(Renew, self._renew)
        links.take(Failure, self._failure)
        links.on_lost.append(self._lost)
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._keep_looking)
            task_status.started()
            while True:
                await trio.sleep(SWEEP_S)
                await self._sweep()

    def _write(self, written: Sequence[Written]) -> None:
        """Signs receipts, and hands them on with what opens their leaves."""
        for one in written:
            signed = statements.sign(self._key, self._mesh_id, one.receipt)
            for take in self.on_receipt:
                take(signed, one)

    def hold(self, holding: Holding) -> None:
        self.holdings.append(holding)
        self._held.set()

    async def let_go(self, holding: Holding, why: MeshError | None = None) -> None:
        """No new leases; the sessions that are on it are told why, and ended."""
        self.holdings.remove(holding)
        fault = holding.worker.fault or why or MeshError("hop_failed", "the node stops serving these layers")
        for hop in [h for h in self.hops.values() if self._by_lease[h.lease.lease] is holding]:
            with trio.move_on_after(LET_GO_S):
                await hop.fail(self._key.peer, fault)
            await self._end(hop, Event.CLOSE, worker_ends=True)

    async def shut(self) -> None:
        """Ends every session that runs here, so that what was done is accounted for."""
        for hop in list(self.hops.values()):
            await self._end(hop, Event.CLOSE)

    # requests

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

    async def _open(self, peer: PeerId, ask: RouteOpen) -> RouteReady:
        """Leases the layers from ask.begin on, and has a successor lease the rest."""
        grant = statements.check(ask.grant, Grant, self._mesh_id)
        if ask.grant.signer != grant.entry:
            raise MeshError("bad_signature", "a grant that its entry node did not sign")
        if peer != (ask.chain[-1].node if ask.chain else grant.entry):
            raise MeshError("bad_lease", "a route-open that does not come from the hop before")
        holding = self._holding_for(grant, ask.begin)
        await holding.verify()
        key = (grant.entry, grant.session)
        for given_up in [h for h in self.hops.values() if h.key == key]:
            if self._by_lease.get(given_up.lease.lease) is holding and holding.book.idle(key):
                await self._end(given_up, Event.LAPSE)
        now, seconds = trio.current_time(), ask.deadline / 1000
        holding.book.reserve(key, grant.epoch, now, within=seconds)
        try:
            with trio.move_on_after(seconds):
                return await self._lease(peer, ask, grant, holding)
            raise MeshError("deadline", "the time for opening a route is over")
        except BaseException:
            holding.book.apply(key, grant.epoch, Event.CLOSE, trio.current_time())
            raise

    def _holding_for(self, grant: Grant, begin: int) -> Holding:
        candidates = [h for h in self.holdings if h.artifact == grant.contract.artifact and begin in h.layers]
        if not candidates:
            raise MeshError("bad_layers", f"layer {begin} of that artifact is not held here")
        best = max(candidates, key=lambda h: (h.book.free > 0, h.layers.end))
        if best.contract != grant.contract:
            names = ", ".join(choose.differences(best.contract, grant.contract))
            raise MeshError("contract_mismatch", f"this holding differs in {names}")
        if grant.context > best.worker.loaded.n_ctx:
            raise MeshError(
                "context_exceeded", f"{grant.context} positions where {best.worker.loaded.n_ctx} are offered"
            )
        return best

    async def _lease(self, peer: PeerId, ask: RouteOpen, grant: Grant, holding: Holding) -> RouteReady:
        me, lease_id = self._key.peer, secrets.token_bytes(8)
        handle = int.from_bytes(secrets.token_bytes(8), "big")
        could_end = holding.layers.end == grant.contract.n_layer
        history = ask.prompt if could_end else ()
        worker = holding.worker
        following: list[Lease] = []
        try:
            # only the tail samples, and only it has to be able to
            sampling = _sampling(ask.sampling) if could_end else Sampling()
            await worker.open(handle, sampling, history, start=max(0, len(history) - ask.generated))
            chain = (*ask.chain, messages.Hop(me, lease_id, self.addresses))
            end, after = await self._find_successor(ask, grant, chain, holding)
            effective = Layers(ask.begin, end)
            following = [statements.check(s, Lease, self._mesh_id, by=s.signer) for s in after.leases]
            if len(chain) + len(following) > messages.MAX_HOPS:
                raise MeshError("bad_lease", f"a route of more than {messages.MAX_HOPS} hops")
            if holding not in self.holdings:
                raise MeshError("worker_died", "the worker ended while the route was opened")
            head = chain[0]
            place = Place(
                entry=grant.entry,
                before=ask.chain[-1].lease if ask.chain else None,
                after=following[0].lease if following else None,
                head=(head.node, head.lease),
                tail=following[-1].node if following else me,
            )
            lease = Lease(
                lease=lease_id,
                session=grant.session,
                epoch=grant.epoch,
                hop=len(ask.chain),
                node=me,
                predecessor=peer,
                successor=following[0].node if following else head.node,
                holding=holding.layers,
                effective=effective,
                contract=statements.contract_digest(grant.contract),
                recipe=holding.recipe,
                fingerprint=holding.fingerprint,
                context=worker.loaded.n_ctx,
                ttl=int(holding.book.ttl * 1000),
                addresses=self.addresses,
            )
            account = Account(lease, grant.contract)
            hop = Hop(self._links, worker, handle, lease, place, account, ask.max_tokens, self._write)
            holding.book.apply(hop.key, grant.epoch, Event.SIGN, trio.current_time())
        except BaseException:
            for lease in following[:1]:
                self._nursery.start_soon(self._give_up, lease)
            with trio.CancelScope(shield=True, deadline=trio.current_time() + STOP_S):
                await _close_quietly(worker, handle)
            raise
        self.hops[lease_id] = hop
        self._by_lease[lease_id] = holding
        self._nursery.start_soon(hop.run)
        own = statements.sign(self._key, self._mesh_id, lease)
        return RouteReady((own, *after.leases), after.attempts, after.failed)

    async def _find_successor(
        self, ask: RouteOpen, grant: Grant, chain: tuple[messages.Hop, ...], holding: Holding
    ) -> tuple[int, RouteReady]:
        """Where this hop ends, and who goes on from there: the first candidate that opens the rest and links to it.

        A hop that reaches the model's end may be the tail itself, with nobody behind it.
        """
        contract = grant.contract
        ends = trio.current_time() + ask.deadline / 1000 * MARGIN
        attempts, begin = ask.attempts, holding.layers.end
        stand, before = holding.stand(self._key.peer, ask.begin), choose.failures(ask.failed)
        ways, unfit = choose.ways(holding.onward, stand, contract, grant.context, ask.excluded, before)
        if not ways or ways[0].heard is not None:  # one that goes on has to have said just now that it will
            await self._look_onward(holding)
            ways, unfit = choose.ways(holding.onward, stand, contract, grant.context, ask.excluded, before)
        failed = [Failed(v.heard.offer.node, v.begin, "no_route", v.reason or "") for v in unfit]
        tried: list[Failed] = []
        for number, way in enumerate(candidates := choose.shortlist(ways), start=1):
            if way.heard is None:
                return way.cut, RouteReady((), attempts, tuple(failed[:64]))
            if (way.heard.offer.node, way.cut) in choose.failures(tried):
                continue
            node, begin, left = way.heard.offer.node, way.cut, ends - trio.current_time()
            if attempts < 1 or left < MIN_HOP_S:
                break
            attempts -= 1
            patience = choose.patience(left, number == len(candidates))
            further = RouteOpen(
                grant=ask.grant,
                begin=begin,
                chain=chain,
                deadline=int(patience * 1000),
                attempts=attempts,
                sampling=ask.sampling,
                prompt=ask.prompt,
                max_tokens=ask.max_tokens,
                excluded=ask.excluded,
                entry_addresses=ask.entry_addresses,
                generated=ask.generated,
                failed=choose.passed_on((*tried, *ask.failed)),
            )
            ready: RouteReady | None = None
            try:
                ready = await self._links.request(node, further, RouteReady, timeout=patience)
                await self._links.connect(node)
            except Refused as refused:
                if choose.is_of_the_request(refused.code, ask.sampling):
                    raise
                attempts = min(attempts, refused.attempts) if refused.failed else attempts
                tried += [Failed(node, begin, refused.code, refused.message), *refused.failed]
            except MeshError as error:
                if error.code == "deadline":
                    self._directory.blame(node)
                tried.append(Failed(node, begin, error.code, error.message))
                if ready is not None:
                    lease = statements.check(ready.leases[0], Lease, self._mesh_id, by=node)
                    self._nursery.start_soon(self._give_up, lease)
            else:
                return begin, RouteReady(ready.leases, ready.attempts, (*tried[:64], *failed[:64], *ready.failed)[:128])
        failed = [*tried, *failed]
        first = f": {failed[0].code}, {failed[0].say}" if failed else ": nobody offers it"
        say = f"nobody takes the layers from {holding.layers.end} on{first}"
        raise Refused(Refusal("no_route", say, tuple(failed[:128]), attempts))

    async def _look_onward(self, holding: Holding) -> None:
        """Hears again who may go on from a holding's layers."""
        contract = holding.contract
        layer = min(holding.layers.end, contract.n_layer - 1)
        holding.onward = await self._directory.holders(contract.artifact, layer, contract.n_layer)

    async def _keep_looking(self) -> None:
        """So that what offers say of the way from here to the tail is not much older than ONWARD_S."""
        while True:
            for holding in list(self.holdings):
                await self._look_onward(holding)
            with trio.move_on_after(ONWARD_S if self.holdings else math.inf):
                await self._held.wait()
            self._held = trio.Event()

    async def _give_up(self, lease: Lease) -> None:
        """Closes a lease that was got for nothing, so that it need not run out."""
        try:
            close = Close(lease.lease, lease.session, lease.epoch, "cancelled")
            await self._links.request(lease.node, close, Closed, timeout=self._config.hop_timeout_s)
        except MeshError as error:
            log.info("giving up a lease of %s: %s", lease.node, error)

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
            await self._end(hop, Event.CLOSE)
        own = [statements.sign(self._key, self._mesh_id, written.receipt) for written in hop.account.written]
        return Closed((*own, *following)[: messages.MAX_RECEIPTS])

    async def _end(self, hop: Hop, event: Event, *, worker_ends: bool = False) -> None:
        """Stops a hop; its place is free only once the worker has let go of the session."""
        if self.hops.pop(hop.lease.lease, None) is None:
            return
        holding = self._by_lease.pop(hop.lease.lease)
        try:
            await hop.stop(worker_ends=worker_ends)
        finally:
            self._write(hop.account.end(int(time.time())))
            holding.book.apply(hop.key, hop.lease.epoch, event, trio.current_time())

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
                self._by_lease[push.lease].book.apply(hop.key, push.epoch, Event.PUSH, trio.current_time())
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
        book = self._by_lease[message.lease].book
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
        now = trio.current_time()
        over = {id(h): {(r.key, r.epoch) for r in h.book.lapsed(now)} for h in self._by_lease.values()}
        for lease, hop in list(self.hops.items()):
            holding = self._by_lease.get(lease)
            if holding is not None and (hop.key, hop.lease.epoch) in over.get(id(holding), ()):
                log.info("a lease has ended without being closed")
                await self._end(hop, Event.LAPSE)


def _one_width(hops: Sequence[Hop]) -> int:
    """n_embd, when it is that of all; MeshError bad_frame for a frame that mixes models."""
    widths = {hop.account.contract.n_embd for hop in hops}
    if len(widths) > 1:
        raise MeshError("bad_frame", "a frame that mixes models")
    return widths.pop()


def _sampling(asked: messages.Sampling) -> Sampling:
    """Millionths on the wire, plain numbers in the worker."""
    return Sampling(
        temperature=asked.temperature / 1e6,
        top_k=asked.top_k,
        top_p=asked.top_p / 1e6,
        min_p=asked.min_p / 1e6,
        repeat_penalty=asked.repeat_penalty / 1e6,
        repeat_last_n=asked.repeat_last_n,
        presence_penalty=asked.presence_penalty / 1e6,
        frequency_penalty=asked.frequency_penalty / 1e6,
        seed=asked.seed,
        typical_p=asked.typical_p / 1e6,
        logprobs=asked.logprobs,
        logit_bias=tuple((token, bias / 1e6) for token, bias in asked.biases),
        grammar=asked.grammar,
    )


async def _close_quietly(worker: Worker, handle: int) -> None:
    try:
        await worker.close(handle)
    except MeshError as error:
        log.info("closing a session in the worker: %s", error)
