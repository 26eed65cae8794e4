"""Getting into the mesh, and back: by addresses that were given, by members seen before, by what the LAN says.

All are tried side by side, and one member that can be reached is enough. Addresses that were given are tried for as
long as the node runs, so that two halves of a mesh that were started apart become one. Those of members that were seen
are tried when nobody else is left.
"""

from __future__ import annotations

import logging
import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import trio

from ..errors import MeshError
from .members import Members, peer_of_address

log = logging.getLogger(__name__)

FIRST_RETRY, LAST_RETRY = 0.25, 30.0  # s between attempts to reach a peer; doubles from one to the other
ALONE_RETRY = 5.0  # s, while nobody is connected: the mesh may be back any moment
LOOK_S = 1.0  # between two looks whether the node is alone
MAX_DIALS = 16  # at once
MAX_SEEN = 64  # members, the freshest
MAX_HEARD = 32  # peers that others on the LAN speak of, dialled in HEARD_S: anybody there may say anything
HEARD_S = 60.0


class _Join:
    """A peer to join through, its addresses, and how the last attempt to do so ended."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.addresses: list[str] = []
        self.tried = trio.Event()
        self.error: MeshError | None = None


class Joining:
    def __init__(self, members: Members, own: str, bootstrap: Sequence[str]) -> None:
        self._members = members
        self._own = own
        self._joins: dict[str, _Join] = {}
        for address in bootstrap:
            if (peer := peer_of_address(address)) != own:
                self._joins.setdefault(peer, _Join(peer)).addresses.append(address)
        self._seen: OrderedDict[str, list[str]] = OrderedDict()
        self._heard: OrderedDict[str, float] = OrderedDict()
        self._dialling = trio.CapacityLimiter(MAX_DIALS)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for join in self._joins.values():
                nursery.start_soon(self._stay, join)
            nursery.start_soon(self._return)

    async def wait(self, timeout: float) -> None:
        """Returns once there is a member, or at once when there is nobody to join through.

        MeshError not_member, version_mismatch or unreachable when each was tried in vain, or none in time.
        """
        with trio.move_on_after(timeout):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._until_in, nursery.cancel_scope)
                for join in self._joins.values():
                    await join.tried.wait()
                nursery.cancel_scope.cancel()
        if not self._joins or self._members.connections:
            return
        errors = [join.error for join in self._joins.values() if join.error is not None]
        errors.sort(key=lambda error: error.code == "unreachable")  # a refusal says more
        raise errors[0] if errors else MeshError("unreachable", f"nobody answered within {timeout:.0f} s")

    async def _until_in(self, scope: trio.CancelScope) -> None:
        if not self._members.connections:
            joined = trio.Event()

            def heard(_: str) -> None:
                joined.set()

            self._members.on_joined.append(heard)
            try:
                await joined.wait()
            finally:
                self._members.on_joined.remove(heard)
        scope.cancel()

    def seen(self, peer: str, addresses: Sequence[str]) -> None:
        """A member is connected, and says that it listens there."""
        if addresses:
            self._seen[peer] = list(addresses)
            self._seen.move_to_end(peer)
        while len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)

    async def heard(self, peer: str, addresses: Sequence[str]) -> None:
        """Somebody on the LAN says that a member listens there. Only hello tells whether it is one."""
        now = trio.current_time()
        while self._heard and next(iter(self._heard.values())) < now - HEARD_S:
            self._heard.popitem(last=False)
        if peer == self._own or peer in self._members or peer in self._heard or len(self._heard) >= MAX_HEARD:
            return
        self._heard[peer] = now
        await self._try([(peer, addresses)])

    async def _stay(self, join: _Join) -> None:
        """Keeps a connection to a peer, for as long as there is one to be had."""
        pause = FIRST_RETRY
        while True:
            try:
                async with self._dialling:
                    await self._members.connect(join.peer, join.addresses)
                join.error, pause = None, FIRST_RETRY
            except MeshError as error:
                news = join.error is None or join.error.code != error.code  # else the log would hold nothing else
                log.log(logging.INFO if news else logging.DEBUG, "joining by %s: %s", ", ".join(join.addresses), error)
                join.error, pause = error, min(2 * pause, LAST_RETRY if self._members.connections else ALONE_RETRY)
            join.tried.set()
            await trio.sleep(_jittered(LAST_RETRY if join.peer in self._members else pause))

    async def _return(self) -> None:
        """When all members are lost, tries those that were seen."""
        pause = FIRST_RETRY
        while True:
            await trio.sleep(LOOK_S)
            if self._members.connections or not self._seen:
                pause = FIRST_RETRY
                continue
            await self._try(reversed(self._seen.items()))
            if not self._members.connections:
                pause = min(2 * pause, ALONE_RETRY)
                await trio.sleep(_jittered(pause))

    async def _try(self, peers: Iterable[tuple[str, Sequence[str]]]) -> None:
        async def one(peer: str, addresses: Sequence[str]) -> None:
            try:
                async with self._dialling:
                    await self._members.connect(peer, addresses)
            except MeshError as error:
                log.info("%s", error)

        async with trio.open_nursery() as nursery:
            for peer, addresses in tuple(peers):
                nursery.start_soon(one, peer, addresses)


def _jittered(pause: float) -> float:
    """Nodes that were parted at once should not all come back at once."""
    return pause * random.uniform(0.5, 1.0)
