"""A node's place in the mesh: connections to members, streams of registered protocols, and the DHT among them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio
from libp2p.abc import INetStream
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from multiaddr import Multiaddr
from multiaddr.exceptions import StringParseError

from ..errors import MeshError
from ..ids import PeerId
from ..keys import NodeKey, public_of
from ..wire import schema
from ..wire.framing import MAX_HEADER, MAX_PAYLOAD
from ..wire.messages import Refusal
from . import identify
from .dht import MeshDht
from .membership import MAX_MESSAGE, VERSIONS, Agreement, Membership, Party
from .stream import PeerStream
from .swarm import HELLO, IDENTIFY, MeshConn, MeshHost, MeshSwarm

log = logging.getLogger(__name__)

CONNECT_LIMIT = 5.0  # s for look-up, dial and hello together
HELLO_LIMIT = 3.0  # s
DIAL_STAGGER = 0.25  # s that one address is tried alone before the next one is tried beside it
REFUSAL_GRACE = 0.5  # s that a refused peer has to read why
FIRST_RETRY, LAST_RETRY = 0.25, 30.0  # s between attempts to reach a bootstrap peer; doubles from one to the other
GOODBYE_LIMIT = 1.0  # s to close all connections politely
MAX_RESPONSE = MAX_HEADER

Handler = Callable[[PeerStream], Awaitable[None]]
Server = Callable[[str, bytes], Awaitable[bytes]]


@dataclass(frozen=True)
class PeerInfo:
    """A member that we are connected to. since: trio's clock; rtt: seconds, NaN before the first is measured."""

    peer: str
    address: str
    inbound: bool
    since: float
    rtt: float


class _Dial:
    """One attempt to connect, which any number of tasks wait for."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.error: MeshError | None = None


class Network:
    """Made by open_network. on_lost and on_joined take callbacks(peer): the last connection to a member is gone, the
    first one is there; they must not wait or raise."""

    def __init__(
        self, key: NodeKey, membership: Membership, nursery: trio.Nursery, versions: Sequence[int] = VERSIONS
    ) -> None:
        pair = create_new_key_pair(key.seed)
        self.peer: str = key.peer
        self.on_lost: list[Callable[[str], None]] = []
        self.on_joined: list[Callable[[str], None]] = []
        self._nursery = nursery
        self._party = Party(membership, key.peer, versions)
        self._members: dict[str, list[MeshConn]] = {}
        self._dials: dict[str, _Dial] = {}
        self._swarm = MeshSwarm(pair, nursery)
        self._swarm.on_open = self._opened
        self._swarm.on_end = self._ended
        self._host = MeshHost(pair, self._swarm, self._reach, [(HELLO, self._hello), (IDENTIFY, self._identify)])
        self._dht = MeshDht(self._host, self._members.__contains__, diverse=membership.secret is None)
        self._join_error: MeshError | None = None
        self._closing = False

    # -- protocols

    def handle(
        self, protocol: str, handler: Handler, *, max_header: int = MAX_HEADER, max_payload: int = MAX_PAYLOAD
    ) -> None:
        """Calls the handler for each stream that a member opens; the stream is closed when it returns, and reset when
        it raises."""

        async def guarded(stream: INetStream) -> None:
            frames = PeerStream(stream, self._nursery.start_soon, max_header=max_header, max_payload=max_payload)
            try:
                await handler(frames)
                await frames.aclose()
            except BaseException:
                frames.reset_now()
                raise

        self._host.set_stream_handler(protocol, guarded)

    def serve(self, protocol: str, server: Server, *, max_request: int = MAX_HEADER) -> None:
        """Answers calls: server(peer, request) gives the response, or raises MeshError, which is answered as a Refusal.

        It is cancelled when its caller goes away.
        """

        async def answer(stream: PeerStream) -> None:
            request, _ = await stream.receive()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_at_end, stream, nursery.cancel_scope)
                try:
                    response = await server(stream.peer, request)
                except MeshError as error:
                    response = schema.encode(Refusal(error.code, error.message[:500], (), 0))
                nursery.cancel_scope.cancel()
            await stream.send(response)

        self.handle(protocol, answer, max_header=max_request, max_payload=0)

    async def open(
        self, peer: str, protocol: str, *, max_header: int = MAX_HEADER, max_payload: int = MAX_PAYLOAD
    ) -> PeerStream:
        """A stream to a member, which is dialled when needed. MeshError as connect(), and unreachable when it does not
        speak the protocol."""
        conn = await self._reach(peer)
        try:
            stream = await self._host.open_on(conn, protocol)
        except (BaseLibp2pError, OSError, trio.TooSlowError) as error:
            raise MeshError("unreachable", f"{peer} opens no {protocol}: {error}") from error
        return PeerStream(stream, self._nursery.start_soon, max_header=max_header, max_payload=max_payload)

    async def call(
        self, peer: str, protocol: str, request: bytes, *, timeout: float, max_response: int = MAX_RESPONSE
    ) -> bytes:
        """One request and its response, on a stream of its own; the response may be a Refusal.

        MeshError deadline after `timeout` seconds, else as open() and receive(). When cancelled, the peer notices.
        """
        with trio.move_on_after(timeout):
            stream = await self.open(peer, protocol, max_header=max_response, max_payload=0)
            try:
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
            PeerInfo(peer, conns[0].address, conns[0].inbound, conns[0].since, conns[0].muxed_conn.rtt())
            for peer, conns in self._members.items()
        ]

    @property
    def addresses(self) -> list[str]:
        """Where others can dial this node, with /p2p/."""
        return [str(address) for address in self._host.get_addrs()]

    def known_addresses(self, peer: str) -> list[str]:
        return [f"{a}/p2p/{peer}" for a in identify.known_addresses(self._host.get_peerstore(), _peer_id(peer))]

    async def connect(self, peer: str, addresses: Sequence[str] = ()) -> None:
        """Makes sure of a connection to a member; nothing happens when there is one.

        addresses: where to look first, beside those that are known. MeshError unreachable, not_member or
        version_mismatch, within CONNECT_LIMIT. Tasks that call it at once share one dial.
        """
        if peer == self.peer:
            raise MeshError("unreachable", "a node does not connect to itself")
        wanted = _peer_id(peer)
        if addresses:
            identify.remember(self._host.get_peerstore(), wanted, [_address(a).to_bytes() for a in addresses])
        while peer not in self._members:
            dial = self._dials.get(peer)
            ours = dial is None
            if dial is None:
                dial = self._dials[peer] = _Dial()
                self._nursery.start_soon(self._dial, peer, dial)
            await dial.done.wait()
            if dial.error is None:
                return
            if ours or not addresses:  # another's dial may not have had our addresses
                raise MeshError(dial.error.code, dial.error.message, hint=dial.error.hint)

    async def _reach(self, peer: str) -> MeshConn:
        await self.connect(peer)
        conns = self._members.get(peer)
        if not conns:
            raise MeshError("unreachable", f"{peer} was lost at once")
        return conns[0]

    async def _dial(self, peer: str, dial: _Dial) -> None:
        try:
            with trio.fail_after(CONNECT_LIMIT):
                conn = await self._dial_any(peer)
                await self._introduce(conn)
        except MeshError as error:
            dial.error = error
        except trio.TooSlowError:
            dial.error = MeshError("unreachable", f"{peer} was not reached within {CONNECT_LIMIT:.0f} s")
        except Exception as error:
            log.exception("dialling %s failed", peer)
            dial.error = MeshError("unreachable", f"{peer}: {error!r}")
        finally:
            if peer in self._members:
                dial.error = None
            self._dials.pop(peer, None)
            dial.done.set()

    async def _dial_any(self, peer: str) -> MeshConn:
        """Tries every known address, each a little after the one before it; the first that answers wins."""
        wanted = _peer_id(peer)
        book = self._host.get_peerstore()
        addresses = identify.known_addresses(book, wanted)
        if not addresses:
            await self._dht.locate(peer)
            addresses = identify.known_addresses(book, wanted)
        won: list[MeshConn] = []
        faults: list[str] = []

        async def attempt(address: Multiaddr, failed: trio.Event) -> None:
            try:
                won.append(await self._swarm.dial_addr(address, wanted))
                nursery.cancel_scope.cancel()
            except BaseLibp2pError as error:
                faults.append(str(error))
                failed.set()

        async with trio.open_nursery() as nursery:
            for address in addresses:
                failed = trio.Event()
                nursery.start_soon(attempt, address, failed)
                with trio.move_on_after(DIAL_STAGGER):
                    await failed.wait()
        for spare in won[1:]:
            self._nursery.start_soon(spare.close)
        if not won:
            book.clear_addrs(wanted)  # whoever knows better will tell
            raise MeshError("unreachable", f"{peer}: {'; '.join(faults) or 'no address of it is known'}")
        return won[0]

    async def _introduce(self, conn: MeshConn) -> None:
        try:
            with trio.fail_after(HELLO_LIMIT):
                raw = await self._host.open_on(conn, HELLO)
                stream = PeerStream(raw, self._nursery.start_soon, max_header=MAX_MESSAGE, max_payload=0)
                agreement = await self._party.introduce(stream)
        except BaseException as error:
            self._nursery.start_soon(conn.close)
            if isinstance(error, (BaseLibp2pError, OSError, trio.TooSlowError)):
                raise MeshError("unreachable", f"{conn.peer} does not say hello: {error!r}") from error
            raise
        stream.finish_soon()
        self._admit(conn, agreement)

    async def _hello(self, raw: INetStream) -> None:
        """A dialler says hello."""
        conn: MeshConn = raw.swarm_conn
        if not conn.inbound or conn.settled.is_set():
            raise MeshError("bad_frame", "hello is for whoever dialled, once")
        stream = PeerStream(raw, self._nursery.start_soon, max_header=MAX_MESSAGE, max_payload=0)
        try:
            with trio.move_on_after(HELLO_LIMIT):
                await self._party.welcome(stream, lambda agreement: self._admit(conn, agreement))
                await stream.aclose()
        except MeshError as error:
            log.info("hello of %s: %s", conn.peer, error)
        if not conn.member:
            conn.settled.set()
            self._nursery.start_soon(_close_later, conn)

    def _admit(self, conn: MeshConn, agreement: Agreement) -> None:
        if conn.is_closed or self._closing:
            return
        conn.member = conn.muxed_conn.trusted = True
        conn.settled.set()
        conns = self._members.setdefault(conn.peer, [])
        conns.append(conn)
        if len(conns) == 1:
            log.info("joined by %s at %s, version %d", conn.peer, conn.address, agreement.version)
            self._tell(self.on_joined, conn.peer)
        self._nursery.start_soon(self._get_to_know, conn)

    async def _get_to_know(self, conn: MeshConn) -> None:
        try:
            await identify.ask(self._host, conn)
            await self._dht.joined(conn.peer)
        except MeshError as error:
            log.info("%s", error)
        except Exception:
            log.exception("getting to know %s failed", conn.peer)

    async def _identify(self, stream: INetStream) -> None:
        await identify.answer(self._host, stream)

    async def _opened(self, conn: MeshConn) -> None:
        """What comes next is the dialler's hello, ours or the peer's."""

    def _ended(self, conn: MeshConn) -> None:
        conns = self._members.get(conn.peer, [])
        if conn in conns:
            conns.remove(conn)
            if not conns:
                del self._members[conn.peer]
                self._dht.lost(conn.peer)
                log.info("lost %s", conn.peer)
                if not self._closing:
                    self._tell(self.on_lost, conn.peer)

    def _tell(self, callbacks: list[Callable[[str], None]], peer: str) -> None:
        for callback in callbacks:
            try:
                callback(peer)
            except Exception:
                log.exception("a callback failed")

    # -- the DHT

    async def provide(self, key: bytes) -> None:
        """Announces this node under a key, until the network ends; members that join later hear of it too."""
        await self._dht.provide(key)

    def withdraw(self, key: bytes) -> None:
        """Announces it no longer; within 15 minutes nobody finds it."""
        self._dht.withdraw(key)

    async def find(self, key: bytes, *, timeout: float = 5.0) -> list[str]:
        """Peers announced under a key, this node included when it is one. A hint: only a connection proves a peer."""
        return await self._dht.find(key, timeout)

    # -- joining

    async def _stay_joined(self, address: str, tried: trio.Event) -> None:
        """Keeps a connection to a bootstrap peer, for as long as there is one to be had."""
        peer = peer_of_address(address)
        pause = FIRST_RETRY
        while peer != self.peer:
            try:
                await self.connect(peer, [address])
                self._join_error, pause = None, FIRST_RETRY
            except MeshError as error:
                log.info("joining through %s: %s", address, error)
                self._join_error, pause = error, min(2 * pause, LAST_RETRY)
            tried.set()
            await trio.sleep(pause if peer not in self._members else LAST_RETRY)
        tried.set()

    async def _shut(self) -> None:
        self._closing = True
        with trio.CancelScope(shield=True, deadline=trio.current_time() + GOODBYE_LIMIT):
            await self._swarm.close()


@asynccontextmanager
async def open_network(
    key: NodeKey,
    membership: Membership,
    *,
    listen: Sequence[str],
    bootstrap: Sequence[str] = (),
    versions: Sequence[int] = VERSIONS,
) -> AsyncIterator[Network]:
    """A running network: it listens, and joins the mesh through the bootstrap addresses (with /p2p/) in the background.

    MeshError port_in_use or bad_config for an address that it cannot listen on. Only members reach a handler.
    """
    failure: Exception | None = None
    addresses = [_address(a) for a in listen]
    for a in bootstrap:
        peer_of_address(a)
    async with trio.open_nursery() as nursery:
        network = Network(key, membership, nursery, versions)
        try:
            await _listen(network._swarm, addresses)
            nursery.start_soon(network._dht.run)
            for a in bootstrap:
                nursery.start_soon(network._stay_joined, a, trio.Event())
            yield network
        except Exception as error:  # handed on below, outside of the nursery that would wrap it in a group
            failure = error
        finally:
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


async def _close_later(conn: MeshConn) -> None:
    with trio.move_on_after(REFUSAL_GRACE):
        await conn.event_closed.wait()
    await conn.close()


def _peer_id(peer: str) -> ID:
    public_of(PeerId(peer))  # MeshError bad_frame unless it is one
    return ID.from_base58(peer)


def _address(text: str) -> Multiaddr:
    try:
        address = Multiaddr(text)
        if [p.name for p in address.protocols()][1:2] == ["tcp"]:
            return address
    except (StringParseError, ValueError) as error:
        raise MeshError("bad_config", f"{text!r} is no multiaddress: {error}") from error
    raise MeshError("bad_config", f"{text!r} is no TCP multiaddress", hint="write it like /ip4/127.0.0.1/tcp/4001")


def peer_of_address(text: str) -> str:
    """The peer id at the end of a multiaddress; MeshError bad_config without one."""
    peer = _address(text).get_peer_id()
    if not peer:
        raise MeshError("bad_config", f"{text!r} names no peer", hint="add /p2p/ and the peer's id")
    public_of(PeerId(peer))
    return str(peer)
