"""A node's place in the mesh: connections to members, streams of registered protocols, and the DHT among them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio
from libp2p.abc import INetStream
from libp2p.exceptions import BaseLibp2pError
from multiaddr import Multiaddr

from ..errors import MeshError
from ..keys import NodeKey
from ..mesh import Mesh
from ..wire import schema
from ..wire.framing import MAX_HEADER, MAX_PAYLOAD, encode_frame
from ..wire.messages import Refusal
from . import identify, mdns
from .admission import Admission
from .dht import MeshDht
from .joining import Joining
from .measure import NeighbourMeasure
from .members import CONNECT_LIMIT, Members, parse_address, peer_id
from .membership import VERSIONS, Party
from .rotation import Rotation
from .stream import PeerStream
from .swarm import MeshSwarm

log = logging.getLogger(__name__)

GOODBYE_LIMIT = 1.0  # s to close all connections politely
INLINE_REQUEST = 32 << 10  # bytes of a request that goes along with the choice of its protocol: a round trip less

Handler = Callable[[PeerStream], Awaitable[None]]
Server = Callable[[str, bytes], Awaitable[bytes]]


@dataclass(frozen=True)
class PeerInfo:
    """A member that we are connected to. since: trio's clock; measure: of its link, smoothed."""

    peer: str
    address: str
    inbound: bool
    since: float
    measure: NeighbourMeasure

    @property
    def rtt(self) -> float:
        """Seconds, smoothed; NaN before the first is measured."""
        return self.measure.rtt


class Network:
    """Made by open_network. Only members reach a handler.

    on_joined and on_lost hold callbacks(peer): the first connection to a member is there, the last one is gone. They
    must not wait.
    """

    def __init__(
        self,
        key: NodeKey,
        admission: Admission,
        nursery: trio.Nursery,
        *,
        bootstrap: Sequence[str] = (),
        versions: Sequence[int] = VERSIONS,
    ) -> None:
        self.peer: str = key.peer
        self.admission = admission
        self._nursery = nursery
        self._members = Members(key, Party(admission, key.peer, versions), nursery)
        self._joining = Joining(self._members, key.peer, bootstrap)
        self._rotation = Rotation(self, admission, self._members)
        self._dht = MeshDht(self._members.host, self._members.connections, diverse=admission.mesh.secret is None)
        self._members.locate = self._dht.locate
        self._members.on_known = self._known
        self._members.on_lost.append(self._dht.lost)
        self.on_joined = self._members.on_joined
        self.on_lost = self._members.on_lost

    # -- protocols

    def handle(
        self, protocol: str, handler: Handler, *, max_header: int = MAX_HEADER, max_payload: int = MAX_PAYLOAD
    ) -> None:
        """Calls the handler for each stream that a member opens. The stream is closed when it returns, and reset when
        it raises, which harms nothing else."""

        async def guarded(raw: INetStream) -> None:
            stream = PeerStream(raw, self._nursery.start_soon, max_header=max_header, max_payload=max_payload)
            try:
                await handler(stream)
                await stream.aclose()
            except BaseException:
                stream.reset_now()
                raise

        self._members.host.set_stream_handler(protocol, guarded)

    def serve(self, protocol: str, server: Server, *, max_request: int = MAX_HEADER) -> None:
        """Answers calls: server(peer, request) gives the response, or raises MeshError, which is answered by a Refusal.

        It is cancelled when its caller goes away.
        """

        async def answer(stream: PeerStream) -> None:
            request, _ = await stream.receive()
            response = None
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_at_end, stream, nursery.cancel_scope)
                try:
                    response = await server(stream.peer, request)
                except MeshError as error:
                    response = schema.encode(Refusal(error.code, error.message))
                nursery.cancel_scope.cancel()
            if response is not None:
                await stream.send(response)

        self.handle(protocol, answer, max_header=max_request, max_payload=0)

    async def open(
        self, peer: str, protocol: str, *, max_header: int = MAX_HEADER, max_payload: int = MAX_PAYLOAD
    ) -> PeerStream:
        """A stream to a member, which is dialled when needed. MeshError as of connect(), and unreachable when it does
        not speak the protocol."""
        return await self._open(peer, protocol, b"", max_header, max_payload)

    async def _open(self, peer: str, protocol: str, first: bytes, max_header: int, max_payload: int) -> PeerStream:
        conn = await self._members.reach(peer)
        try:
            raw = await self._members.host.open_on(conn, protocol, first)
        except (BaseLibp2pError, OSError, trio.TooSlowError) as error:
            raise MeshError("unreachable", f"{peer} opens no {protocol}: {error!r}") from error
        return PeerStream(raw, self._nursery.start_soon, max_header=max_header, max_payload=max_payload)

    async def call(
        self, peer: str, protocol: str, request: bytes, *, timeout: float, max_response: int = MAX_HEADER
    ) -> bytes:
        """One request and its response, on a stream of its own; the response may be a Refusal.

        MeshError deadline after `timeout` seconds, else as of open() and receive(). When it is cancelled, so is the
        server.
        """
        with trio.move_on_after(timeout):
            first = b"".join(encode_frame(request)) if len(request) <= INLINE_REQUEST else b""
            stream = await self._open(peer, protocol, first, max_response, 0)
            try:
                if not first:
                    await stream.send(request)
                response, _ = await stream.receive()
            except BaseException:
                stream.reset_now()
                raise
            stream.finish_soon()
            return response
        raise MeshError("deadline", f"{peer} did not answer within {timeout:.1f} s")

    # -- members

    def connected(self) -> list[PeerInfo]:
        return [
            PeerInfo(peer, conn.address, conn.inbound, conn.since, conn.muxed_conn.measure)
            for peer, (conn, *_) in self._members.connections.items()
        ]

    def measures(self, peer: str) -> NeighbourMeasure:
        """What the link to a neighbour is like: `rtt` and `least` in seconds, `bandwidth` in bytes/s, for routing.

        Each is NaN until it is measured; those of a neighbour that has left are its last ones.
        """
        return self._members.measures.get(peer) or NeighbourMeasure()

    @property
    def addresses(self) -> list[str]:
        """Where others can dial this node, with /p2p/."""
        return [str(address) for address in self._members.host.get_addrs()]

    def known_addresses(self, peer: str) -> list[str]:
        return [f"{a}/p2p/{peer}" for a in identify.known_addresses(self._members.book, peer_id(peer))]

    async def connect(self, peer: str, addresses: Sequence[str] = ()) -> None:
        """Makes sure of a connection to a member; nothing happens when there is one.

        addresses: where to look, beside those that are known. MeshError unreachable, not_member or version_mismatch,
        within 5 s. Tasks that call it at once share one dial.
        """
        await self._members.connect(peer, addresses)

    def deny(self, peer: str) -> None:
        """Has nothing to do with a peer any more: its connections are closed, and it is told so when it says hello.

        MeshError usage for what is no other peer's id.
        """
        try:
            peer_id(peer)
        except MeshError as error:
            raise MeshError("usage", error.message, hint="a peer's id is what `meshnode peers` shows") from error
        if peer == self.peer:
            raise MeshError("usage", "a node does not deny itself", hint="name another peer")
        self.admission.denied.add(peer)
        self._members.let_go(peer)

    def allow(self, peer: str) -> None:
        self.admission.denied.discard(peer)

    # -- the DHT

    async def provide(self, key: bytes) -> None:
        """Announces this node under a key, until the network ends; members that join later hear of it too."""
        await self._dht.provide(key)

    def withdraw(self, key: bytes) -> None:
        """Announces it no longer; within 15 minutes nobody finds it."""
        self._dht.withdraw(key)

    async def find(self, key: bytes, *, timeout: float = 5.0) -> list[str]:
        """Peers announced under a key, this node included when it is one. A hint: only a connection proves a peer."""
        found = await self._dht.find(key, timeout)
        return [peer for peer in found if peer not in self.admission.denied]

    # -- joining

    async def wait_joined(self, timeout: float = CONNECT_LIMIT) -> None:
        """Returns once there is a member, or at once without bootstrap addresses.

        MeshError not_member, version_mismatch or unreachable when each address was tried in vain, or none in time.
        Attempts go on in the background.
        """
        await self._joining.wait(timeout)

    async def _known(self, peer: str) -> None:
        self._joining.seen(peer, self.known_addresses(peer))
        await self._dht.joined(peer)

    async def _start(self, addresses: list[Multiaddr], lan: bool) -> None:
        await _listen(self._members.swarm, addresses)
        self._nursery.start_soon(self._dht.run)
        self._nursery.start_soon(self._rotation.run)
        self._nursery.start_soon(self._joining.run)
        hosts = mdns.lan_hosts(self.addresses) if lan else []
        if hosts:
            speaker = mdns.Mdns(self.admission.mesh.mesh_id, hosts, lambda: self.addresses, self._joining.heard)
            self._nursery.start_soon(speaker.run)

    async def _shut(self) -> None:
        self._members.closing = True
        with trio.CancelScope(shield=True, deadline=trio.current_time() + GOODBYE_LIMIT):
            await self._members.swarm.close()


@asynccontextmanager
async def open_network(
    key: NodeKey,
    mesh: Mesh,
    *,
    listen: Sequence[str],
    bootstrap: Sequence[str] = (),
    denied: Collection[str] = (),
    lan: bool = True,
    versions: Sequence[int] = VERSIONS,
) -> AsyncIterator[Network]:
    """A running network: it listens, and joins the mesh through the bootstrap addresses (with /p2p/) in the background.

    lan: look for members on the LANs, by multicast DNS; one that listens on loopback alone has none.

    MeshError port_in_use or bad_config for an address that it cannot listen on, or cannot read.
    """
    failure: Exception | None = None
    addresses = [parse_address(text) for text in listen]
    async with trio.open_nursery() as nursery:
        network = None
        try:
            network = Network(key, Admission(mesh, denied), nursery, bootstrap=bootstrap, versions=versions)
            await network._start(addresses, lan)
            yield network
        except Exception as error:  # handed on below, outside of the nursery that would wrap it in a group
            failure = error
        finally:
            if network is not None:
                await network._shut()
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _listen(swarm: MeshSwarm, addresses: list[Multiaddr]) -> None:
    for address in addresses:
        try:
            await swarm.listen(address)
        except OSError as error:
            raise MeshError("port_in_use", f"cannot listen on {address}: {error.strerror or error}") from error


async def _cancel_at_end(stream: PeerStream, scope: trio.CancelScope) -> None:
    """Cancels once the peer's stream ends. A caller says nothing after its request; if it does, it is cut off."""
    try:
        await stream.receive()
    except MeshError as error:
        log.debug("a call is given up: %s", error)
    stream.reset_now()
    scope.cancel()
