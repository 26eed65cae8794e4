"""Answering route-opens: leasing a range, having the rest leased, and going on with a session in its next epoch."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import trio

from ..config import NodeConfig
from ..errors import MeshError
from ..ids import Layers, PeerId
from ..keys import NodeKey
from ..ledger.account import Account, NoAccount
from ..net.directory import PROBE_S, Directory
from ..net.links import Links, Refused
from ..route import choose, repair
from ..route.lease import Event
from ..session import Sampler
from ..wire import messages, statements
from ..wire.messages import Close, Closed, Failed, Grant, Lease, Refusal, RouteOpen, RouteReady
from ..worker import Sampling, Worker
from .exhibits import ID_BYTES, Exhibit
from .holding import Holding
from .hop import STOP_S, Hop, Place
from .kept import Kept
from .leased import Leased
from .retained import Retained
from .sampling import sampling_of
from .turns import Turns

log = logging.getLogger(__name__)

ONWARD_S = 10.0  # between two looks at who goes on from what is held here: churn of 10 % a minute changes little in it
MARGIN = 0.9  # of the time left goes to the next hop: the rest is for its answer's way back
MIN_HOP_S = 0.05  # less time than this is not worth asking a successor


@dataclass
class _Search:
    """For who goes on from a hop: what is left for it, and what was tried."""

    ask: RouteOpen
    chain: tuple[messages.Hop, ...]
    ends: float
    attempts: int
    tried: list[Failed] = field(default_factory=list)
    over: bool = False


class Opening:
    """The part of a Stage that leases. nursery: for what must not hold up an answer; set before the first question."""

    nursery: trio.Nursery

    def __init__(self, links: Links, directory: Directory, key: NodeKey, config: NodeConfig, leased: Leased) -> None:
        self._links = links
        self._directory = directory
        self._key = key
        self._mesh_id = directory.mesh_id
        self._config = config
        self._leased = leased
        self.addresses: tuple[str, ...] = ()
        self.standing: Callable[[PeerId], int] = lambda _: 0  # the work that a peer did for those whom this node owes
        self._turns: dict[int, Turns] = {}
        self.onward_s = ONWARD_S
        self.held = trio.Event()  # something new is held

    async def open(self, peer: PeerId, ask: RouteOpen) -> RouteReady:
        """Leases the layers from ask.begin on, and has a successor lease the rest."""
        grant = statements.check(ask.grant, Grant, self._mesh_id)
        if ask.grant.signer != grant.entry:
            raise MeshError("bad_signature", "a grant that its entry node did not sign")
        if peer != (ask.chain[-1].node if ask.chain else grant.entry):
            raise MeshError("bad_lease", "a route-open that does not come from the hop before")
        if ask.generated > len(ask.prompt):
            raise MeshError("bad_lease", "more tokens are said to be sampled than there are")
        lost = repair.at(ask.repair, ask.begin)
        key = (grant.entry, grant.session, ask.begin)
        with trio.move_on_after(ask.deadline / 1000):
            before = self._to_go_on_with(grant, lost)
            if before is not None:
                return await self._go_on(before, peer, ask, grant)
            holding = self._holding_for(grant, ask.begin, lost)
            await holding.verify()
            for old in self._leased.of(grant.entry, grant.session):
                here = old.key == key if ask.repair else self._leased.holding_of(old) is holding
                given_up = old.key == key and holding.book.idle(key)
                if here and (given_up or old.lease.epoch < grant.epoch):
                    await self._leased.end(old, Event.CLOSE)
            await self._turns_of(holding).reserve(key, grant.epoch, within=ask.deadline / 1000)
            try:
                return await self._begin(peer, ask, grant, holding)
            except BaseException:
                holding.book.apply(key, grant.epoch, Event.CLOSE, trio.current_time())
                raise
        raise MeshError("deadline", "the time for opening a route is over")

    def _to_go_on_with(self, grant: Grant, lost: messages.Kept | None) -> Hop | None:
        """What this node still holds of the session that is to be repaired."""
        if lost is None or lost.node != self._key.peer:
            return None
        for hop in self._leased.of(grant.entry, grant.session):
            if hop.lease.effective == lost.effective and hop.lease.epoch < grant.epoch and not hop.kept.lost:
                if self._leased.holding_of(hop).contract != grant.contract:
                    raise MeshError("contract_mismatch", "the session was opened under another contract")
                return hop
        return None

    def _holding_for(self, grant: Grant, begin: int, lost: messages.Kept | None) -> Holding:
        holdings = self._leased.holdings
        candidates = [h for h in holdings if h.artifact == grant.contract.artifact and begin in h.layers]
        if not candidates:
            raise MeshError("bad_layers", f"layer {begin} of that artifact is not held here")
        if lost is not None:
            equal = (lost.recipe, lost.fingerprint)
            candidates = [
                h for h in candidates if h.layers.holds(lost.effective) and (h.recipe, h.fingerprint) == equal
            ]
            if not candidates:
                raise MeshError("contract_mismatch", "what is held here is no equal of the hop that is to be replaced")
        best = max(candidates, key=lambda h: (h.book.free > 0, h.layers.end))
        if best.contract != grant.contract:
            names = ", ".join(choose.differences(best.contract, grant.contract))
            raise MeshError("contract_mismatch", f"this holding differs in {names}")
        if grant.context > best.worker.loaded.n_ctx:
            raise MeshError(
                "context_exceeded", f"{grant.context} positions where {best.worker.loaded.n_ctx} are offered"
            )
        return best

    async def _begin(self, peer: PeerId, ask: RouteOpen, grant: Grant, holding: Holding) -> RouteReady:
        """A session that is new here: its place is reserved."""
        lost = repair.at(ask.repair, ask.begin)
        effective = lost.effective if lost else None
        could_end = (effective or holding.layers).end == grant.contract.n_layer
        history = ask.prompt if could_end else ()
        worker, handle = holding.worker, int.from_bytes(secrets.token_bytes(8), "big")
        kept = Kept(worker, handle, Sampler(ask.max_tokens, made=ask.generated))
        if grant.audit and lost is None and self._config.receipts:
            kept.exhibit = self._exhibit(grant, ask.begin)
        try:
            # only the tail samples, and only it has to be able to
            sampling = sampling_of(ask.sampling) if could_end else Sampling()
            await worker.open(handle, sampling, history, start=max(0, len(history) - ask.generated))
            hop, ready = await self._lease(peer, ask, grant, holding, kept, effective)
            self._leased.add(hop, holding)
        except BaseException:
            kept.close()
            with trio.CancelScope(shield=True, deadline=trio.current_time() + STOP_S):
                await _close_quietly(worker, handle)
            raise
        self.nursery.start_soon(hop.run)
        return ready

    async def _go_on(self, before: Hop, peer: PeerId, ask: RouteOpen, grant: Grant) -> RouteReady:
        """A session that is here already, in a later epoch: nothing of it is computed again."""
        holding = self._leased.holding_of(before)
        holding.book.apply(before.key, before.lease.epoch, Event.RENEW, trio.current_time())
        await before.release()
        if before.kept.lost:
            raise MeshError("worker_died", "the worker ended while the session waited to go on")
        hop, ready = await self._lease(peer, ask, grant, holding, before.kept, before.lease.effective)
        self._leased.replace(before, hop)
        self.nursery.start_soon(hop.run)
        return ready

    async def _lease(
        self, peer: PeerId, ask: RouteOpen, grant: Grant, holding: Holding, kept: Kept, effective: Layers | None
    ) -> tuple[Hop, RouteReady]:
        """The hop that is to run, and its lease with those of all that come after. effective None: as is cheapest."""
        me, lease_id = self._key.peer, secrets.token_bytes(8)
        chain = (*ask.chain, messages.Hop(me, lease_id, self.addresses, kept.computed))
        following: list[Lease] = []
        try:
            if effective is None:
                end, after = await self._find_successor(ask, grant, chain, holding)
                effective = Layers(ask.begin, end)
            elif effective.end < grant.contract.n_layer:
                after = await self._find_equal(ask, grant, chain, effective.end, holding)
            else:
                after = RouteReady((), ask.attempts)
            following = [statements.check(s, Lease, self._mesh_id, by=s.signer) for s in after.leases]
            if len(chain) + len(following) > messages.MAX_HOPS:
                raise MeshError("bad_lease", f"a route of more than {messages.MAX_HOPS} hops")
            if holding not in self._leased.holdings:
                raise MeshError("worker_died", "the worker ended while the route was opened")
        except BaseException:
            if not ask.repair:  # what goes on is kept for another try: it ends by itself when none comes
                for further in following[:1]:
                    self.nursery.start_soon(self._give_up, further)
            raise
        head = chain[0]
        place = Place(
            entry=grant.entry,
            before=ask.chain[-1].lease if ask.chain else None,
            after=following[0].lease if following else None,
            head=(head.node, head.lease),
            tail=following[-1].node if following else me,
            known=len(ask.prompt),
            base=repair.base_of([hop.cached for hop in chain] + [further.cached for further in following]),
            head_cached=head.cached,
            after_cached=following[0].cached if following else 0,
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
            context=holding.worker.loaded.n_ctx,
            ttl=int(holding.book.ttl * 1000),
            addresses=self.addresses,
            cached=kept.computed,
        )
        if following and kept.rows is None:
            kept.rows = Retained(4 * grant.contract.n_embd)
        if kept.exhibit is not None and not following:
            kept.exhibit.sampling, kept.exhibit.prompt = ask.sampling, ask.prompt
        account = (Account if self._config.receipts else NoAccount)(lease, grant.contract)
        if kept.exhibit is not None:
            account.is_open = kept.exhibit.shows
        hop = Hop(self._links, kept, lease, place, account, partial(self._leased.write, exhibit=kept.exhibit))
        own = statements.sign(self._key, self._mesh_id, lease)
        return hop, RouteReady((own, *after.leases), after.attempts, after.failed)

    def _turns_of(self, holding: Holding) -> Turns:
        return self._turns.setdefault(id(holding.book), Turns(holding.book, lambda peer: self.standing(peer)))

    def _exhibit(self, grant: Grant, begin: int) -> Exhibit:
        width, fast = 4 * grant.contract.n_embd, grant.contract.numerics == "fast"
        inputs = Retained(ID_BYTES if begin == 0 else width)
        return self._leased.exhibits.keep(Exhibit(width, inputs, Retained(width) if fast else None, begin == 0))

    async def _find_successor(
        self, ask: RouteOpen, grant: Grant, chain: tuple[messages.Hop, ...], holding: Holding
    ) -> tuple[int, RouteReady]:
        """Where this hop ends, and who goes on from there: the first candidate that opens the rest and links to it.

        A hop that reaches the model's end may be the tail itself, with nobody behind it.
        """
        contract, search = grant.contract, self._search(ask, chain)
        stand, before = holding.stand(self._key.peer, ask.begin), choose.failures(ask.failed)
        ways, unfit = choose.ways(holding.onward, stand, contract, grant.context, ask.excluded, before)
        if not ways or ways[0].heard is not None:  # one that goes on has to have said just now that it will
            await self._look_onward(holding)
            ways, unfit = choose.ways(holding.onward, stand, contract, grant.context, ask.excluded, before)
        failed = [Failed(v.heard.offer.node, v.begin, "no_route", v.reason or "") for v in unfit]
        for number, way in enumerate(candidates := choose.shortlist(ways), start=1):
            if way.heard is None:
                return way.cut, RouteReady((), search.attempts, tuple(failed[:64]))
            if (way.heard.offer.node, way.cut) in choose.failures(search.tried):
                continue
            ready = await self._try(search, way.heard.offer.node, way.cut, number == len(candidates))
            if ready is not None:
                told = (*search.tried[:64], *failed[:64], *ready.failed)[:128]
                return way.cut, RouteReady(ready.leases, ready.attempts, told)
            if search.over:
                break
        raise self._nobody(search, holding.layers.end, failed)

    async def _find_equal(
        self, ask: RouteOpen, grant: Grant, chain: tuple[messages.Hop, ...], begin: int, holding: Holding
    ) -> RouteReady:
        """In a repair, the hop of the epoch before if it answers: others would have to compute all again.

        Then those who were lately heard, if they answer; a look-up is for when none of them takes it.
        """
        contract, search, lost = grant.contract, self._search(ask, chain), repair.at(ask.repair, begin)
        assert lost is not None
        if lost.node not in ask.excluded:
            if await self._directory.fresh(lost.node, contract.artifact, timeout=PROBE_S):
                ready = await self._try(search, lost.node, begin, True)
                if ready is not None:
                    return ready
            else:
                search.tried.append(Failed(lost.node, begin, "unreachable", "it does not answer"))
        for known in [h for h in holding.onward if h.offer.node != lost.node and repair.unfit(lost, h.offer) is None]:
            node = known.offer.node
            if node not in ask.excluded and await self._directory.fresh(node, contract.artifact, timeout=PROBE_S):
                ready = await self._try(search, node, begin, False)
                if ready is not None:
                    return ready
        failed, good = list[Failed](), list[choose.Verdict]()
        for h in await self._directory.holders(contract.artifact, begin, contract.n_layer, but=ask.excluded):
            verdict = choose.judge(h, begin, contract, grant.context, ask.excluded)
            reason = repair.unfit(lost, h.offer) or verdict.reason
            if reason:
                failed.append(Failed(h.offer.node, begin, "no_route", reason))
            elif (h.offer.node, begin) not in choose.failures(search.tried):
                good.append(verdict)
        ranked = choose.rank(good)[: choose.ATTEMPTS_A_HOP]
        for number, candidate in enumerate(ranked, start=1):
            ready = await self._try(search, candidate.offer.node, begin, number == len(ranked))
            if ready is not None:
                return ready
            if search.over:
                break
        raise self._nobody(search, begin, failed)

    def _search(self, ask: RouteOpen, chain: tuple[messages.Hop, ...]) -> _Search:
        return _Search(ask, chain, trio.current_time() + ask.deadline / 1000 * MARGIN, ask.attempts)

    async def _try(self, search: _Search, node: PeerId, begin: int, last: bool) -> RouteReady | None:
        """Asks one candidate to go on from `begin`. None: it was in vain, as the search then says."""
        left = search.ends - trio.current_time()
        search.over = search.attempts < 1 or left < MIN_HOP_S
        if search.over:
            return None
        search.attempts -= 1
        patience = choose.patience(left, last)
        ask = search.ask
        further = replace(
            ask,
            begin=begin,
            chain=search.chain,
            deadline=int(patience * 1000),
            attempts=search.attempts,
            failed=choose.passed_on((*search.tried, *ask.failed)) if not ask.repair else (),
        )
        ready: RouteReady | None = None
        try:
            ready = await self._links.request(node, further, RouteReady, timeout=patience)
            await self._links.connect(node)
            return ready
        except Refused as refused:
            if choose.is_of_the_request(refused.code, ask.sampling):
                raise
            search.attempts = min(search.attempts, refused.attempts) if refused.failed else search.attempts
            search.tried += [Failed(node, begin, refused.code, refused.message), *refused.failed]
        except MeshError as error:
            if error.code == "deadline":
                self._directory.blame(node)
            search.tried.append(Failed(node, begin, error.code, error.message))
            if ready is not None and not ask.repair:
                lease = statements.check(ready.leases[0], Lease, self._mesh_id, by=node)
                self.nursery.start_soon(self._give_up, lease)
        return None

    def _nobody(self, search: _Search, layer: int, unfit: list[Failed]) -> Refused:
        failed = [*search.tried, *unfit]
        first = f": {failed[0].code}, {failed[0].say}" if failed else ": nobody offers it"
        say = f"nobody takes the layers from {layer} on{first}"
        return Refused(Refusal("no_route", say, tuple(failed[:128]), search.attempts))

    async def _look_onward(self, holding: Holding) -> None:
        """Hears again who may go on from a holding's layers."""
        contract = holding.contract
        layer = min(holding.layers.end, contract.n_layer - 1)
        holding.onward = await self._directory.holders(contract.artifact, layer, contract.n_layer)

    async def keep_looking(self) -> None:
        """So that what offers say of the way from here to the tail is not much older than ONWARD_S."""
        holdings = self._leased.holdings
        while True:
            for holding in list(holdings):
                await self._look_onward(holding)
            with trio.move_on_after(self.onward_s if holdings else math.inf):
                await self.held.wait()
            self.held = trio.Event()

    async def _give_up(self, lease: Lease) -> None:
        """Closes a lease that was got for nothing, so that it need not run out."""
        try:
            close = Close(lease.lease, lease.session, lease.epoch, "cancelled")
            await self._links.request(lease.node, close, Closed, timeout=self._config.hop_timeout_s)
        except MeshError as error:
            log.info("giving up a lease of %s: %s", lease.node, error)


async def _close_quietly(worker: Worker, handle: int) -> None:
    try:
        await worker.close(handle)
    except MeshError as error:
        log.info("closing a session in the worker: %s", error)
