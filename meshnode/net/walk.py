"""One look-up in the DHT: the members closest to a target are asked, and closer ones that they name."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable

import trio
from libp2p.kad_dht.common import ALPHA, BUCKET_SIZE
from libp2p.kad_dht.utils import sort_peer_ids_by_distance
from libp2p.peer.id import ID

from ..errors import MeshError

log = logging.getLogger(__name__)

LATE_S = 0.4  # after which another is asked beside one that does not answer: far above a round trip and a dial
GIVE_UP_S = 1.2  # after which nobody waits for it any longer, once others have answered
LOOK_S = 0.1  # between two looks whether somebody is late

Ask = Callable[[ID], Awaitable[list[ID]]]


class Walk:
    """ask(peer) gives the peers that it names, or raises MeshError when it does not answer."""

    def __init__(self, target: bytes, own: ID, known: Iterable[ID], ask: Ask) -> None:
        self._target = target
        self._own = own
        self._ask = ask
        self._known = set(known)
        self._answered: set[ID] = set()
        self._failed: set[ID] = set()
        self._running: dict[ID, float] = {}  # who was asked, and when
        self._turn = trio.Event()

    async def run(self) -> list[ID]:
        """Who answered, closest first: BUCKET_SIZE at most."""
        async with trio.open_nursery() as nursery:
            while True:
                closest = sort_peer_ids_by_distance(self._target, list(self._known - self._failed - {self._own}))
                closest = closest[:BUCKET_SIZE]
                now = trio.current_time()
                waiting = sum(now - since < LATE_S for since in self._running.values())
                new = [peer for peer in closest if peer not in self._running and peer not in self._answered]
                for peer in new[: max(0, ALPHA - waiting)]:
                    self._running[peer] = now
                    nursery.start_soon(self._one, peer)
                if not self._running or (self._answered and now - max(self._running.values()) >= GIVE_UP_S):
                    break
                with trio.move_on_after(LOOK_S):
                    await self._turn.wait()
                self._turn = trio.Event()
            nursery.cancel_scope.cancel()
        return [peer for peer in closest if peer in self._answered]

    async def _one(self, peer: ID) -> None:
        try:
            self._known.update(await self._ask(peer))
            self._answered.add(peer)
        except MeshError as error:
            log.debug("look-up: %s", error)
            self._failed.add(peer)
        del self._running[peer]
        self._turn.set()
