"""Spreading signed statements: pushed on as they come, and pulled from one member after the other where some lack.

Pushing is quick and may lose; pulling loses nothing: a member that was away, or has just come, asks for what differs.
Whatever comes is checked before it is kept, and kept before it is passed on.
"""

from __future__ import annotations

import logging
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import trio

from ..errors import MeshError
from ..ids import PeerId
from ..ledger import chain
from ..ledger.account import Written
from ..ledger.store import Entry, Ledger
from ..wire.accounts import (
    MAX_BATCH,
    Batch,
    LedgerDigests,
    LedgerFetch,
    LedgerQuery,
    LedgerSummary,
    Taken,
)
from ..wire.messages import Signed
from .links import Links

log = logging.getLogger(__name__)

FANOUT = 4  # members that a new statement is passed on to: 50 nodes hear of it in about four steps
GATHER_S = 0.25  # how long what is new waits for more of it
PULL_S = 10.0  # between two pulls: the gossip period
ASK_S = 5.0  # for a member to answer
EXPIRE_S = 3600.0
RETRY_S = 10.0  # after the ledger could not be written
MAX_WAITING = 8192  # statements that wait to be written, and to be passed on
MAX_PULLED = 20_000  # statements in one pull; the rest comes with the next one
MAX_UNWANTED = 50_000  # digests remembered that the ledger did not keep, so that they are not fetched again
BURST, RATE = 2048.0, 64.0  # statements a member may push at once, and a second

R = TypeVar("R")


@dataclass
class _Allowance:
    left: float
    at: float


class Gossip:
    """Keeps one node's ledger, and tells others of it. Every use of the ledger is a turn of one thread."""

    def __init__(self, links: Links, members: Callable[[], Sequence[PeerId]], ledger: Ledger, mesh_id: str) -> None:
        self._links = links
        self._members = members
        self._ledger = ledger
        self._mesh_id = mesh_id
        self._turn = trio.CapacityLimiter(1)
        self._waiting: list[Signed] = []
        self._opened: list[tuple[Signed, Written]] = []
        self._fresh: list[Signed] = []
        self._something = trio.Event()
        self._pull_now = trio.Event()
        self._unwanted: OrderedDict[bytes, None] = OrderedDict()
        self._allowed: dict[PeerId, _Allowance] = {}
        self._random = random.Random()
        self.on_new: list[Callable[[Sequence[Entry]], None]] = []
        self.fault: MeshError | None = None  # why the ledger cannot be written

    async def use(self, function: Callable[[Ledger], R]) -> R:
        """function(ledger), in its thread. It must not take long."""
        return await trio.to_thread.run_sync(function, self._ledger, limiter=self._turn)

    def tell(self, signed: Sequence[Signed]) -> None:
        """Own statements, or such as came by another way: they are checked, kept and passed on."""
        room = MAX_WAITING - len(self._waiting)
        if room < len(signed):
            log.warning("%d statements are lost: the ledger does not take them", len(signed) - room)
        self._waiting += signed[: max(0, room)]
        self._something.set()

    def tell_own(self, signed: Signed, written: Written) -> None:
        """An own receipt, with what opens its leaves."""
        if len(self._opened) < MAX_WAITING:
            self._opened.append((signed, written))
        self.tell([signed])

    def joined(self, peer: str) -> None:
        """A member is there: it may know what we do not."""
        self._pull_now.set()

    async def run(self) -> None:
        self._links.answer(Batch, self._take)
        self._links.answer(LedgerQuery, self._query)
        self._links.answer(LedgerFetch, self._fetch)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_spreading)
            nursery.start_soon(self._keep_pulling)
            nursery.start_soon(self._keep_expiring)

    async def flush(self) -> None:
        """Writes what waits, and tells it, before the node ends."""
        await self._keep_own()
        await self._spread()

    # -- what comes

    async def _take(self, peer: PeerId, batch: Batch) -> Taken:
        self._spend(peer, len(batch.statements))
        return Taken(len(await self._keep(batch.statements)))

    async def _query(self, peer: PeerId, ask: LedgerQuery) -> LedgerSummary | LedgerDigests:
        if ask.bucket is None:
            return LedgerSummary(await self.use(lambda ledger: ledger.index.marks()))
        number = ask.bucket
        return LedgerDigests(b"".join(await self.use(lambda ledger: ledger.index.bucket(number))))

    async def _fetch(self, peer: PeerId, ask: LedgerFetch) -> Batch:
        return Batch(tuple(await self.use(lambda ledger: ledger.get(ask.digests))))

    def _spend(self, peer: PeerId, count: int) -> None:
        """MeshError busy when a member pushes more than it may."""
        now = trio.current_time()
        allowed = self._allowed.setdefault(peer, _Allowance(BURST, now))
        allowed.left = min(BURST, allowed.left + (now - allowed.at) * RATE) - count
        allowed.at = now
        if allowed.left < 0:
            allowed.left = 0
            raise MeshError("busy", "more statements than a member may push", hint="they can be pulled")
        if len(self._allowed) > 1024:
            full = [p for p, a in self._allowed.items() if a.left + (now - a.at) * RATE >= BURST]
            for other in full:
                del self._allowed[other]

    async def _keep(self, signed: Sequence[Signed]) -> list[Entry]:
        """Checks and appends; what is new goes on. MeshError of the first statement that is not sound: none is kept."""
        now, mesh_id = int(time.time()), self._mesh_id

        def keep(ledger: Ledger) -> list[Entry]:
            new = [s for s in signed if chain.digest(s) not in ledger.index]
            return ledger.append([Entry(chain.read(s, mesh_id), s) for s in new], now)

        try:
            kept = await self.use(keep)
        except MeshError as error:
            self.fault = error if error.code == "bad_ledger" else self.fault
            raise
        self.fault = None
        if kept:
            self._fresh += [entry.signed for entry in kept][: MAX_WAITING - len(self._fresh)]
            self._something.set()
            for take in self.on_new:
                take(kept)
        return kept

    # -- what goes

    async def _keep_spreading(self) -> None:
        while True:
            await self._something.wait()
            await trio.sleep(GATHER_S)
            self._something = trio.Event()
            if not await self._keep_own():
                await trio.sleep(RETRY_S)
                self._something.set()
            await self._spread()

    async def _spread(self) -> None:
        fresh, self._fresh = self._fresh, []
        members = list(self._members())
        chosen = self._random.sample(members, min(FANOUT, len(members)))
        async with trio.open_nursery() as nursery:
            for peer in chosen:
                nursery.start_soon(self._push, peer, fresh)

    async def _keep_own(self) -> bool:
        """Whether the ledger took it; else it waits."""
        waiting, self._waiting = self._waiting, []
        sound = [signed for signed in waiting if self._is_sound(signed)]
        try:
            await self._keep(sound)
        except MeshError as error:
            log.error("%s", error)
            self._waiting = sound + self._waiting
            return False
        opened, self._opened = self._opened, []
        try:
            await self.use(lambda ledger: ledger.keep_leaves(opened))
        except MeshError as error:
            log.error("%s", error)
        return True

    def _is_sound(self, signed: Signed) -> bool:
        try:
            chain.read(signed, self._mesh_id)
        except MeshError as error:  # of another, who gave it to us
            log.warning("a statement is not kept: %s", error)
            return False
        return True

    async def _push(self, peer: PeerId, fresh: Sequence[Signed]) -> None:
        try:
            for start in range(0, len(fresh), MAX_BATCH):
                batch = Batch(tuple(fresh[start : start + MAX_BATCH]))
                await self._links.request(peer, batch, Taken, timeout=ASK_S)
        except MeshError as error:  # it will pull
            log.info("telling %s of receipts: %s", peer, error)

    async def _keep_pulling(self) -> None:
        while True:
            with trio.move_on_after(PULL_S * self._random.uniform(0.8, 1.2)):
                await self._pull_now.wait()
                await trio.sleep(GATHER_S)
            self._pull_now = trio.Event()
            members = list(self._members())
            if members:
                peer = self._random.choice(members)
                try:
                    await self.pull(peer)
                except MeshError as error:
                    log.info("asking %s for receipts: %s", peer, error)

    async def pull(self, peer: PeerId) -> int:
        """Fetches from a member what it has and this ledger lacks; how many there were."""
        summary = await self._links.request(peer, LedgerQuery(), LedgerSummary, timeout=ASK_S)
        differing = await self.use(lambda ledger: ledger.index.differing(summary.marks))
        self._random.shuffle(differing)
        got = 0
        for bucket in differing:
            told = await self._links.request(peer, LedgerQuery(bucket), LedgerDigests, timeout=ASK_S)
            got += await self._fetch_from(peer, [told.digests[i : i + 32] for i in range(0, len(told.digests), 32)])
            if got >= MAX_PULLED:
                self._pull_now.set()
                break
        return got

    async def _fetch_from(self, peer: PeerId, digests: Sequence[bytes]) -> int:
        wanted = [d for d in digests if len(d) == 32 and d not in self._unwanted]
        missing = await self.use(lambda ledger: ledger.index.missing(wanted))
        got = 0
        for start in range(0, len(missing), MAX_BATCH):
            asked = missing[start : start + MAX_BATCH]
            batch = await self._links.request(peer, LedgerFetch(tuple(asked)), Batch, timeout=ASK_S)
            if not {chain.digest(signed) for signed in batch.statements} <= set(asked):
                raise MeshError("bad_frame", f"{peer} sent statements that it was not asked for")
            kept = await self._keep(batch.statements)
            got += len(kept)
            for digest in set(asked) - {entry.digest for entry in kept}:
                self._unwanted[digest] = None
            while len(self._unwanted) > MAX_UNWANTED:
                self._unwanted.popitem(last=False)
        return got

    async def _keep_expiring(self) -> None:
        while True:
            try:
                await self.use(lambda ledger: ledger.expire(int(time.time())))
            except MeshError as error:
                log.error("%s", error)
            await trio.sleep(EXPIRE_S)
