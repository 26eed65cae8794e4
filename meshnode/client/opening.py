"""Opening a route from the entry node: the first one of a session, and the next when a hop was lost."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import trio

from ..config import NodeConfig
from ..errors import MeshError
from ..ids import PeerId, SessionId
from ..keys import NodeKey
from ..net.directory import PROBE_S, Directory
from ..net.links import Links, Refused
from ..route import choose, repair
from ..route.choose import Heard
from ..route.verify import check_route
from ..wire import statements
from ..wire.messages import (
    MAX_EXCLUDED,
    Close,
    Closed,
    Contract,
    Failed,
    Grant,
    Kept,
    Lease,
    RouteOpen,
    RouteReady,
    Sampling,
    Signed,
)

log = logging.getLogger(__name__)

ABANDON_TIMEOUT_S = 1.5  # for telling the hops that nobody wants the answer any more


@dataclass(frozen=True)
class Wanted:
    """What every epoch of a session has in common."""

    session: SessionId
    contract: Contract
    sampling: Sampling
    context: int  # positions
    max_tokens: int
    heads: tuple[Heard, ...]  # as they were heard when it began


@dataclass(frozen=True)
class Route:
    """One epoch, with the leases of all its hops, the head's first; both of the entry node's links are up."""

    grant: Grant
    leases: tuple[Lease, ...]

    @property
    def base(self) -> int:
        """Positions that some hop holds from earlier epochs."""
        return repair.base_of(lease.cached for lease in self.leases)


class NoRoute(MeshError):
    """Nobody could be found, or all refused. epoch: the last that was granted."""

    def __init__(self, fault: MeshError, epoch: int) -> None:
        super().__init__(fault.code, fault.message, hint=fault.hint)
        self.epoch = epoch


class Opener:
    """addresses: of this node, for the hops."""

    def __init__(self, links: Links, directory: Directory, key: NodeKey, config: NodeConfig) -> None:
        self._links = links
        self._directory = directory
        self._key = key
        self._config = config
        self.audit = bool(config.audits)  # consent, for what is opened from here
        self.addresses: tuple[str, ...] = ()

    async def open(
        self,
        wanted: Wanted,
        heads: AsyncIterator[tuple[PeerId, bool]],
        epoch: int,
        ids: tuple[int, ...],
        generated: int,
        timeout: float,
        *,
        kept: tuple[Kept, ...] = (),
        excluded: Sequence[PeerId] = (),
    ) -> Route:
        """Tries one head after the other, each with an epoch of its own, from `epoch` on.

        heads: who to ask, and whether it is the last; ids: of the session so far, of which the last `generated` were
        sampled; kept: the route that is repaired. MeshError of the request, or NoRoute.
        """
        attempts, failed = choose.ATTEMPTS_A_REQUEST, list[Failed]()
        excluded = tuple(dict.fromkeys((*excluded, *self._directory.denied)))[:MAX_EXCLUDED]
        ends = trio.current_time() + timeout
        async for node, last in heads:
            left = ends - trio.current_time()
            if attempts < 1 or left <= 0:
                break
            attempts -= 1
            patience = choose.patience(left, last)
            grant = Grant(wanted.session, epoch, self._key.peer, wanted.contract, wanted.context, self.audit)
            epoch += 1
            route_open = RouteOpen(
                grant=statements.sign(self._key, self._directory.mesh_id, grant),
                begin=0,
                chain=(),
                deadline=int(patience * 1000),
                attempts=attempts,
                sampling=wanted.sampling,
                prompt=ids,
                max_tokens=wanted.max_tokens,
                excluded=excluded,
                entry_addresses=self.addresses,
                generated=generated,
                repair=kept,
                failed=() if kept else choose.passed_on(failed),
            )
            leases: list[Lease] = []
            try:
                ready = await self._links.request(node, route_open, RouteReady, timeout=patience)
                leases = check_route(ready.leases, grant, self._directory.mesh_id, node, excluded)
                repair.check_repaired(leases, kept)
                await self._link(leases)
            except Refused as refused:
                if choose.is_of_the_request(refused.code, wanted.sampling):
                    raise MeshError(refused.code, refused.message) from refused
                attempts = min(attempts, refused.attempts) if refused.failed else attempts
                failed += [Failed(node, 0, refused.code, refused.message), *refused.failed]
            except MeshError as error:
                if error.code == "deadline":
                    self._directory.blame(node)
                failed.append(Failed(node, 0, error.code, error.message))
                if leases and not kept:
                    await abandon(self._links, leases)
            else:
                return Route(grant, tuple(leases))
        raise NoRoute(no_route(failed), epoch - 1)

    async def _link(self, leases: Sequence[Lease]) -> None:
        """The route is ready once its links are up: the entry node, often behind a NAT, dials both of its own."""
        await self._links.connect(leases[-1].node, leases[-1].addresses)
        await self._links.connect(leases[0].node, leases[0].addresses)

    async def heads(
        self, wanted: Wanted, kept: Sequence[Kept], excluded: Sequence[PeerId]
    ) -> AsyncIterator[tuple[PeerId, bool]]:
        """Who may be the head of the next epoch, best first: in a repair the old one, if it answers."""
        artifact, n_layer = wanted.contract.artifact, wanted.contract.n_layer
        lost = repair.at(kept, 0)
        asked = lost.node if lost is not None else None
        is_there = asked is not None and asked not in excluded
        if asked is not None and is_there and await self._directory.fresh(asked, artifact, timeout=PROBE_S):
            yield asked, True
        known = [h for h in wanted.heads if h.offer.node not in (asked, *excluded)] if lost is not None else []
        for head in known:
            node, fits = head.offer.node, repair.unfit(lost, head.offer) is None
            if fits and await self._directory.fresh(node, artifact, timeout=PROBE_S):
                yield node, False
        heard = await self._directory.holders(artifact, 0, n_layer, but=excluded)
        verdicts = [
            choose.judge(h, 0, wanted.contract, wanted.context, excluded)
            for h in heard
            if repair.unfit(lost, h.offer) is None and h.offer.node != asked
        ]
        ranked = choose.rank(verdicts)[: choose.ATTEMPTS_A_HOP]
        for number, head in enumerate(ranked, start=1):
            yield head.offer.node, number == len(ranked)


async def abandon(links: Links, leases: Sequence[Lease]) -> list[Signed]:
    """Tells every hop by itself: those behind a broken one would not hear it from their predecessor. Their receipts."""
    receipts: dict[bytes, Signed] = {}

    async def end(lease: Lease) -> None:
        try:
            closed = await close(links, lease, "cancelled", ABANDON_TIMEOUT_S)
            receipts.update((statements.digest(signed), signed) for signed in closed.receipts)
        except MeshError as error:  # it has lapsed, was closed by the hop before, or is gone with its node
            log.info("closing the lease of %s: %s", lease.node, error)

    with trio.CancelScope(shield=True):
        async with trio.open_nursery() as nursery:
            for lease in leases:
                nursery.start_soon(end, lease)
    return list(receipts.values())


async def close(links: Links, lease: Lease, reason: str, timeout: float) -> Closed:
    message = Close(lease.lease, lease.session, lease.epoch, reason)
    return await links.request(lease.node, message, Closed, timeout=timeout)


def no_route(failed: Sequence[Failed]) -> MeshError:
    """One error for all that was tried; what the only candidate said of itself is the error."""
    if not failed:
        return MeshError("no_route", "no route could be opened in time")
    tried = "; ".join(f"{f.node[-8:]} at layer {f.layer}: {f.code}, {f.say}" for f in failed[:6])
    own = len(failed) == 1 and failed[0].code in ("busy", "context_exceeded", "identity_changed")
    return MeshError(failed[0].code if own else "no_route", f"no route could be opened: {tried}")
