"""A new generation of the mesh's secret goes from member to member (protocol/02-membership.md).

Whoever has it hands it to each connected member that does not, save those that it is kept from. A connection whose
peer has no generation left that counts is closed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import trio

from ..errors import MeshError
from ..mesh import MAX_GENERATIONS, MAX_NUMBER, MAX_WITHOUT, NAME_BYTES, SECRET_BYTES, Generation
from ..wire import cbor
from ..wire.schema import encode_nested, field, integer, listing, nested, octets, text, uint
from .admission import Admission
from .members import Members
from .membership import MAX_ITEMS, ROTATES

if TYPE_CHECKING:
    from .network import Network

log = logging.getLogger(__name__)

PROTOCOL = "/meshnode/generation/1"
MAX_MESSAGE = 2 << 10  # bytes: a secret and 16 peers that it is kept from
LOOK_S = 10.0  # between two looks for members that were busy, and for generations that have ended
TAKE_S = 5.0  # s for a member to take it
CALM_S = 5.0  # s between two generations taken from members: who sends more is faulty, and heard later
MAX_OVERLAP = 366 * 86400 * 1000  # ms


@dataclass(frozen=True)
class Handed:
    """A generation. overlap: ms for which those before it still count."""

    kind: int = field(0, integer(4, 4))
    number: int = field(2, uint(MAX_NUMBER))
    secret: bytes = field(4, octets(SECRET_BYTES))
    overlap: int = field(6, uint(MAX_OVERLAP))
    without: tuple[str, ...] = field(8, listing(text(64, 1), MAX_WITHOUT), default=())

    def __repr__(self) -> str:  # a secret never reaches a log
        return f"Handed({self.number})"


@dataclass(frozen=True)
class Taken:
    """Which generations the peer has now, newest first."""

    kind: int = field(0, integer(5, 5))
    generations: tuple[bytes, ...] = field(2, listing(octets(NAME_BYTES), MAX_GENERATIONS))


def decode(raw: bytes, expected: type[Any]) -> Any:
    """MeshError bad_frame unless it is the message that is due."""
    try:
        return nested(expected).decode(cbor.loads(raw, max_items=MAX_ITEMS))
    except ValueError as error:
        raise MeshError("bad_frame", f"{expected.__name__}: {error}") from error


class Rotation:
    def __init__(self, network: Network, admission: Admission, members: Members) -> None:
        self._network = network
        self._admission = admission
        self._members = members
        self._news = trio.Event()
        self._calm_until = -1.0
        admission.on_change.append(lambda _: self._news.set())
        members.on_joined.append(lambda _: self._news.set())

    async def run(self) -> None:
        self._network.serve(PROTOCOL, self._take, max_request=MAX_MESSAGE)
        while True:
            with trio.move_on_after(LOOK_S):
                await self._news.wait()
            self._news = trio.Event()
            self._close_ended()
            async with trio.open_nursery() as nursery:
                for peer in tuple(self._members.connections):
                    nursery.start_soon(self._hand, peer)

    async def _take(self, peer: str, raw: bytes) -> bytes:
        handed: Handed = decode(raw, Handed)
        mesh = self._admission.mesh
        known = {generation.name for generation in mesh.generations}
        generation = Generation(handed.number, handed.secret, None, handed.without)
        if mesh.secret is not None and generation.name not in known:
            if trio.current_time() < self._calm_until:
                raise MeshError("busy", "the secret was replaced a moment ago")
            after = self._admission.take(generation, handed.overlap / 1000)
            if after.number != mesh.number or after.secret != mesh.secret:
                self._calm_until = trio.current_time() + CALM_S
            mesh = after
        return encode_nested(Taken(5, tuple(g.name for g in mesh.generations)))

    async def _hand(self, peer: str) -> None:
        """Hands the newest generation to a member that lacks it."""
        mesh = self._admission.mesh
        conns = [conn for conn in self._members.connections.get(peer, ()) if ROTATES in conn.capabilities]
        if not conns or not mesh.number or peer in mesh.without:
            return
        newest, *before = mesh.generations
        if any(newest.name in conn.generations for conn in conns):
            return
        left = max((self._admission.left(generation) for generation in before), default=0.0)
        message = Handed(4, newest.number, newest.secret, min(int(left * 1000), MAX_OVERLAP), newest.without)
        try:
            answer = await self._network.call(
                peer, PROTOCOL, encode_nested(message), timeout=TAKE_S, max_response=MAX_MESSAGE
            )
            taken: Taken = decode(answer, Taken)
        except MeshError as error:
            log.info("%s does not take the new secret: %s", peer, error)
            return
        for conn in self._members.connections.get(peer, ()):
            conn.generations = taken.generations

    def _close_ended(self) -> None:
        names = {generation.name for generation in self._admission.mesh.generations}
        for conns in tuple(self._members.connections.values()):
            for conn in conns:
                if names and not names.intersection(conn.generations):
                    log.info("%s has no secret that counts any more", conn.peer)
                    self._members.nursery.start_soon(conn.close)
