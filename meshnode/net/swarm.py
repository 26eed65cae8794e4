"""Connections and what runs on them: a swarm and a host that stay alive whatever a peer does.

Faults of the stock swarm and host (libp2p 0.8.1) that are cured here, each by a test in tests/net/test_swarm.py:
- every inbound connection holds a slot and a task until shutdown: both end with the connection;
- idle sockets pile up before they are authenticated: of more than MAX_STRANGERS the oldest goes, and each has a
  limit of time until its peer is a member;
- an exception that leaves a stream handler ends the process: it resets the stream;
- a failed dial blacklists the peer for 60 s, and of several TCP addresses one is tried: dialling is the owner's;
- connections are dialled uncalled for, and pruned: there is no auto-connector and no pruner;
- a full address book forgets our own key: the host keeps it;
- whoever connects may use every protocol: until a connection's peer is a member, only those of OPEN_PROTOCOLS.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import trio
from libp2p.abc import INetConn, INetStream
from libp2p.crypto.keys import KeyPair, PrivateKey, PublicKey
from libp2p.exceptions import BaseLibp2pError
from libp2p.host.basic_host import BasicHost
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.exceptions import SwarmException
from libp2p.network.stream.net_stream import NetStream
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.protocol_muxer.exceptions import MultiselectError
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable
from libp2p.utils.address_validation import get_available_interfaces
from multiaddr import Multiaddr

from ..errors import MeshError
from .hardening import BufferedTCPStream, Listener, MeshTCP, MeshUpgrader, choose, propose
from .yamux import MeshYamux
from .yamux_stream import MeshYamuxStream

log = logging.getLogger(__name__)

HELLO = "/meshnode/hello/1"
IDENTIFY = "/ipfs/id/1.0.0"
OPEN_PROTOCOLS = frozenset((HELLO, IDENTIFY))  # that a peer may use before it is a member

MAX_CONNECTIONS = 512  # beyond it, inbound connections are closed at once
MAX_PER_PEER = 4  # two peers that dial each other at once have two
MAX_STRANGERS = 64  # inbound connections that are not known to be a member's
HANDSHAKE_LIMIT = 5.0  # s from an accepted or dialled socket to a muxed connection
PENDING_LIMIT = 5.0  # s from there to membership
NEGOTIATION_LIMIT = 5.0  # s to choose the protocol of a stream, apart from waiting for membership
MAX_PEERS_KNOWN = 4096  # in the address book


class MeshConn(SwarmConn):  # type: ignore[misc]
    """A connection, and whether its peer has proved to be a member."""

    muxed_conn: MeshYamux

    def __init__(self, muxed_conn: MeshYamux, swarm: MeshSwarm, direction: str) -> None:
        super().__init__(muxed_conn, swarm, direction=direction)
        self.peer = str(muxed_conn.peer_id)
        self.inbound = direction == "inbound"
        self.since = trio.current_time()
        self.member = False
        self.version = 0  # of the wire, that hello agreed on
        self.capabilities: frozenset[str] = frozenset()  # that both sides have
        self.generations: tuple[bytes, ...] = ()  # of the secret, that the peer has: names
        self.greeted = False  # hello has begun
        self.settled = trio.Event()  # membership is decided, or the connection has ended
        self.set_transport_info(muxed_conn.get_transport_addresses(), muxed_conn.get_connection_type())

    @property
    def address(self) -> str:
        return str(next(iter(self.get_transport_addresses()), ""))

    async def close(self) -> None:
        await self.muxed_conn.close()  # what runs the connection notices and cleans up


class MeshSwarm(Swarm):  # type: ignore[misc]
    """Runs in a nursery of its owner, who sets on_end and dials through dial_addr."""

    def __init__(self, key_pair: KeyPair, nursery: trio.Nursery) -> None:
        own = ID.from_pubkey(key_pair.public_key)
        peerstore = PeerStore(max_peers=MAX_PEERS_KNOWN)
        peerstore.add_key_pair(own, key_pair)
        super().__init__(
            own,
            peerstore,
            MeshUpgrader(key_pair),
            transports=[MeshTCP()],
        )
        self.notifees.clear()  # the stock ones tag connections for the pruner
        self.nursery = nursery
        self.strangers: OrderedDict[trio.CancelScope, None] = OrderedDict()
        self.on_end: Callable[[MeshConn], None] | None = None

    async def listen(self, *multiaddrs: Multiaddr) -> bool:
        """All of them, or OSError."""
        for address in multiaddrs:
            listener = Listener(self.nursery, self._accept)
            self.listeners[str(address)] = listener
            await listener.listen(address)
            await self.notify_listen(address)
        return True

    async def _accept(self, stream: BufferedTCPStream) -> None:
        """Lives as long as the connection does."""
        if sum(map(len, self.connections.values())) >= MAX_CONNECTIONS:
            log.warning("over %d connections: refusing one", MAX_CONNECTIONS)
            return
        while len(self.strangers) >= MAX_STRANGERS:  # a member needs milliseconds: it is hardly ever the oldest
            self.strangers.popitem(last=False)[0].cancel()
        scope = trio.CancelScope(deadline=trio.current_time() + HANDSHAKE_LIMIT)
        self.strangers[scope] = None
        conn = None
        try:
            with scope:
                conn = await self._upgrade(RawConnection(stream, False), None)
                scope.deadline = trio.current_time() + PENDING_LIMIT
                await conn.settled.wait()
        except Exception as error:  # any bytes may come: none of them harm more than their own connection
            log.debug("no connection with %s: %r", stream.get_remote_address(), error)
        finally:
            self.strangers.pop(scope, None)
        if conn is not None:
            if not conn.settled.is_set():
                log.info("closing the connection to %s, which did not say hello", conn.peer)
                conn.settled.set()
                await conn.close()
            await conn.event_closed.wait()

    async def dial_addr(self, addr: Multiaddr, peer_id: ID, source: Any = None) -> MeshConn:
        """A connection to `peer_id`, which has proved its key; SwarmException or OSError when there is none."""
        if len(self.get_connections()) >= MAX_CONNECTIONS:
            raise SwarmException("too many connections")
        raw = None
        try:
            with trio.fail_after(HANDSHAKE_LIMIT):
                transport = self.transport_manager.transport_for_dialing(addr)
                if transport is None:
                    raise SwarmException(f"{addr} is no TCP address")
                raw = await transport.dial(addr)
                return await self._upgrade(raw, peer_id)
        except BaseException as error:
            if raw is not None:
                with trio.CancelScope(shield=True):
                    await raw.close()
            if isinstance(error, Exception):
                raise SwarmException(f"{addr}: {error!r}") from error
            raise

    async def dial_peer(self, peer_id: ID) -> list[INetConn]:
        raise SwarmException("connections are dialled by the network alone")

    async def _upgrade(self, raw: Any, peer_id: ID | None) -> MeshConn:
        secured = await self.upgrader.upgrade_security(raw, peer_id is not None, peer_id)
        muxed = await self.upgrader.upgrade_connection(secured, secured.get_remote_peer())
        return await self.add_conn(muxed, "inbound" if peer_id is None else "outbound")

    async def add_conn(self, muxed_conn: Any, direction: str = "unknown") -> MeshConn:
        if muxed_conn.peer_id == self.self_id or len(self.connections.get(muxed_conn.peer_id, ())) >= MAX_PER_PEER:
            await muxed_conn.close()
            raise SwarmException(f"one connection too many with {muxed_conn.peer_id}")
        conn = MeshConn(muxed_conn, self, direction)
        self.nursery.start_soon(self._run_connection, conn)
        await conn.event_started.wait()
        return conn

    async def _run_connection(self, conn: MeshConn) -> None:
        muxed = conn.muxed_conn
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(muxed.start)
                await muxed.event_started.wait()
                self.connections.setdefault(muxed.peer_id, []).append(conn)
                conn.event_started.set()
                await self.notify_connected(conn)
                try:
                    while True:
                        stream = await muxed.accept_stream()
                        self.nursery.start_soon(self._run_stream, conn, stream)
                except MuxedConnUnavailable:
                    nursery.cancel_scope.cancel()
        except Exception:
            log.exception("the connection to %s failed", conn.peer)
        finally:
            conn.event_started.set()
            conn.event_closed.set()
            conn.settled.set()
            self.remove_conn(conn)
            if self.on_end is not None:
                self.on_end(conn)
            if self.notifees:
                self.nursery.start_soon(self._notify, "disconnected", conn)
            with trio.CancelScope(shield=True):
                await muxed._cleanup_on_error()

    async def _run_stream(self, conn: MeshConn, muxed: MeshYamuxStream) -> None:
        stream = await conn._add_stream(muxed)
        try:
            await self.common_stream_handler(stream)
        finally:
            conn.remove_stream(stream)
            if self.notifees:
                self.nursery.start_soon(self._notify, "closed_stream", stream)

    async def close(self) -> None:
        """Says goodbye on every connection."""
        async with trio.open_nursery() as nursery:
            for listener in self.listeners.values():
                nursery.start_soon(listener.close)
            for conn in self.get_connections():
                nursery.start_soon(conn.close)


class MeshHost(BasicHost):  # type: ignore[misc]
    """Chooses the protocol of each stream, behind the gate, and guards what handles it."""

    def __init__(
        self, key_pair: KeyPair, swarm: MeshSwarm, reach: Callable[[str], Awaitable[MeshConn]], handlers: Any
    ) -> None:
        self._key_pair = key_pair
        self.reach = reach  # gives a connection to a member, dialled when needed, or raises MeshError
        super().__init__(
            swarm,
            default_protocols=OrderedDict(handlers),
            addrs_factory=_without_wildcards,
            disable_identify_address_discovery=True,
        )
        swarm.notifees.clear()  # the stock host identifies everyone, in tasks that nobody owns

    def get_private_key(self) -> PrivateKey:
        return self._key_pair.private_key

    def get_public_key(self) -> PublicKey:
        return self._key_pair.public_key

    def _schedule_identify(self, peer_id: ID, *, reason: str) -> None:
        """Peers are identified once they are members, by the network."""

    async def new_stream(self, peer_id: ID, protocol_ids: Sequence[Any]) -> INetStream:
        """A stream to a member, which is dialled when needed."""
        conn = await self.reach(str(peer_id))
        return await self.open_on(conn, str(protocol_ids[0]))

    async def open_on(self, conn: MeshConn, protocol: str, first: bytes = b"") -> NetStream:
        """A stream of `protocol` on this connection, begun by `first`; libp2p's errors or TooSlowError when there is
        none."""
        with trio.fail_after(NEGOTIATION_LIMIT):
            muxed = await conn.muxed_conn.open_stream()
            try:
                await propose(muxed, protocol, first)
            except BaseException:
                muxed.reset_now()
                raise
            stream = await conn._add_stream(muxed)
        stream.set_protocol(protocol)
        return stream

    async def _swarm_stream_handler(self, net_stream: INetStream) -> None:
        conn: MeshConn = net_stream.swarm_conn
        muxed: MeshYamuxStream = net_stream.muxed_stream
        try:
            with trio.fail_after(NEGOTIATION_LIMIT + PENDING_LIMIT):
                protocol = await choose(
                    muxed, lambda wanted: self._offers(conn, wanted), lambda: self.visible_protocols(conn)
                )
            net_stream.set_protocol(protocol)
            await self.multiselect.handlers[protocol](net_stream)
        except (MeshError, BaseLibp2pError, trio.TooSlowError) as error:
            log.debug("a stream of %s ended: %s", conn.peer, error)
            muxed.reset_now()
        except Exception:
            log.exception("the handler of %s failed", net_stream.get_protocol())
            muxed.reset_now()
        except BaseException:
            muxed.reset_now()
            raise
        else:
            muxed.close_now()

    async def _offers(self, conn: MeshConn, protocol: str) -> bool:
        """The gate: who is no member yet waits for the hello in progress, and learns nothing if it fails."""
        if protocol not in OPEN_PROTOCOLS and not conn.member:
            await conn.settled.wait()
            if not conn.member:
                raise MultiselectError("no member")
        return protocol in self.multiselect.handlers

    def visible_protocols(self, conn: MeshConn) -> list[str]:
        return [p for p in self.multiselect.handlers if p is not None and (conn.member or p in OPEN_PROTOCOLS)]


def _without_wildcards(addresses: list[Multiaddr]) -> list[Multiaddr]:
    """0.0.0.0 and :: as the addresses that others can dial; loopback only where there is nothing else."""
    found: list[Multiaddr] = []
    for address in addresses:
        host, port = address.value_for_protocol(address.protocols()[0].code), address.value_for_protocol("tcp")
        if host not in ("0.0.0.0", "::"):  # noqa: S104
            found.append(address)
            continue
        family = "/ip4/" if host == "0.0.0.0" else "/ip6/"  # noqa: S104
        local = [a for a in get_available_interfaces(int(port)) if str(a).startswith(family)]
        outside = [a for a in local if not str(a).startswith(("/ip4/127.", "/ip6/::1/", "/ip6/fe80"))]
        found += outside or local
    return found
