"""Who is connected and has proved to be a member: dialling, hello at both ends, and the end of a connection."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

import trio
from libp2p.abc import INetStream
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from ..errors import MeshError
from ..ids import PeerId
from ..keys import NodeKey, public_of
from . import identify
from .measure import NeighbourMeasure
from .membership import MAX_MESSAGE, Agreement, Party
from .stream import PeerStream
from .swarm import HELLO, IDENTIFY, MeshConn, MeshHost, MeshSwarm

log = logging.getLogger(__name__)

CONNECT_LIMIT = 5.0  # s for look-up, dial and hello together
HELLO_LIMIT = 3.0  # s
GONE_S = 3.0  # others name a dead peer until they notice: each look-up would dial it, and look for it far and wide
MAX_GONE = 1024
DIAL_STAGGER = 0.25  # s that one address is tried alone before the next one is tried beside it
MAX_MEASURES = 1024  # neighbours, of which it is remembered what their links are like
REFUSAL_GRACE = 0.5  # s that a refused peer has to read why

Callback = Callable[[str], None]


class _Dial:
    """One attempt to connect, which any number of tasks wait for."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.error: MeshError | None = None


class Members:
    """Holds the connections of members; `locate` looks for addresses of a peer elsewhere when none are known."""

    def __init__(self, key: NodeKey, party: Party, nursery: trio.Nursery) -> None:
        pair = create_new_key_pair(key.seed)
        self.nursery = nursery
        self.swarm = MeshSwarm(pair, nursery)
        self.swarm.on_end = self._ended
        self.host = MeshHost(pair, self.swarm, self.reach, [(HELLO, self._hello), (IDENTIFY, self._identify)])
        self.book = self.host.get_peerstore()
        self.connections: dict[str, list[MeshConn]] = {}
        self.measures: OrderedDict[str, NeighbourMeasure] = OrderedDict()  # also of those that left: they may be back
        self.on_joined: list[Callback] = []
        self.on_lost: list[Callback] = []
        self.on_known: Callable[[str], Awaitable[None]] | None = None  # a member's addresses have become known
        self.locate: Callable[[str], Awaitable[None]] | None = None
        self.closing = False
        self._party = party
        self._dials: dict[str, _Dial] = {}
        self._gone: dict[str, float] = {}  # who could not be reached, until when that is taken for granted

    def __contains__(self, peer: str) -> bool:
        return peer in self.connections

    # -- as the dialler

    async def connect(self, peer: str, addresses: Sequence[str] = ()) -> None:
        """Makes sure of a connection to a member; nothing happens when there is one.

        addresses: where to look, beside those that are known. MeshError unreachable, not_member or version_mismatch,
        within CONNECT_LIMIT. Tasks that call it at once share one dial.
        """
        if peer == self._party.peer:
            raise MeshError("unreachable", "a node does not connect to itself")
        self._party.admission.check(peer)
        wanted = peer_id(peer)
        while peer not in self.connections:
            if addresses:
                identify.remember(self.book, wanted, [parse_address(a).to_bytes() for a in addresses])
            dial = self._dials.get(peer)
            ours = dial is None
            if dial is None:
                dial = self._dials[peer] = _Dial()
                self.nursery.start_soon(self._dial, peer, dial)
            await dial.done.wait()
            if dial.error is None:
                return
            if ours or not addresses:  # another's dial may not have had our addresses
                raise MeshError(dial.error.code, dial.error.message, hint=dial.error.hint)

    async def reach(self, peer: str) -> MeshConn:
        """A connection to a member, as connect(); who could not be reached within GONE_S is not tried again here."""
        if peer not in self.connections and trio.current_time() < self._gone.get(peer, -1.0):
            raise MeshError("unreachable", f"{peer} could not be reached a moment ago")
        await self.connect(peer)
        conns = self.connections.get(peer)
        if not conns:
            raise MeshError("unreachable", f"{peer} was lost at once")
        return conns[0]

    async def _dial(self, peer: str, dial: _Dial) -> None:
        """Belongs to nobody who waits for it, so that none of them takes it along when it is cancelled."""
        try:
            with trio.fail_after(CONNECT_LIMIT):
                await self._introduce(await self._dial_any(peer))
        except MeshError as error:
            dial.error = error
        except trio.TooSlowError:
            dial.error = MeshError("unreachable", f"{peer} was not reached within {CONNECT_LIMIT:.0f} s")
        except Exception as error:
            log.exception("dialling %s failed", peer)
            dial.error = MeshError("unreachable", f"{peer}: {error!r}")
        finally:
            if peer in self.connections:  # it dialled us meanwhile
                dial.error = None
            del self._dials[peer]
            self._gone.pop(peer, None)
            if dial.error is not None and dial.error.code == "unreachable":
                self._gone[peer] = trio.current_time() + GONE_S
                while len(self._gone) > MAX_GONE:
                    del self._gone[next(iter(self._gone))]
            dial.done.set()

    async def _dial_any(self, peer: str) -> MeshConn:
        """Tries every known address, each a little after the one before it; the first that answers wins."""
        wanted = peer_id(peer)
        addresses = identify.known_addresses(self.book, wanted)
        if not addresses and self.locate is not None:
            await self.locate(peer)
            addresses = identify.known_addresses(self.book, wanted)
        won: list[MeshConn] = []
        faults: list[str] = []

        async def attempt(address: Multiaddr, failed: trio.Event) -> None:
            try:
                won.append(await self.swarm.dial_addr(address, wanted))
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
            self.nursery.start_soon(spare.close)
        if not won:
            self.book.clear_addrs(wanted)  # whoever knows better will tell
            raise MeshError("unreachable", f"{peer}: {'; '.join(faults) or 'no address of it is known'}")
        return won[0]

    async def _introduce(self, conn: MeshConn) -> None:
        try:
            with trio.fail_after(HELLO_LIMIT):
                raw = await self.host.open_on(conn, HELLO)
                stream = PeerStream(raw, self.nursery.start_soon, max_header=MAX_MESSAGE, max_payload=0)
                agreement = await self._party.introduce(stream)
        except BaseException as error:
            conn.settled.set()
            self.nursery.start_soon(conn.close)
            if isinstance(error, (BaseLibp2pError, OSError, trio.TooSlowError)):
                raise MeshError("unreachable", f"{conn.peer} does not say hello: {error!r}") from error
            raise
        stream.finish_soon()
        self._admit(conn, agreement)

    # -- as the listener

    async def _hello(self, raw: INetStream) -> None:
        conn: MeshConn = raw.swarm_conn
        if not conn.inbound or conn.greeted:
            raise MeshError("bad_frame", "hello is for whoever dialled, once")
        conn.greeted = True
        stream = PeerStream(raw, self.nursery.start_soon, max_header=MAX_MESSAGE, max_payload=0)
        try:
            with trio.move_on_after(HELLO_LIMIT):
                await self._party.welcome(stream, lambda agreement: self._admit(conn, agreement))
                await stream.aclose()
        except MeshError as error:
            log.info("hello of %s: %s", conn.peer, error)
        if not conn.member:
            conn.settled.set()
            with trio.move_on_after(REFUSAL_GRACE):
                await conn.event_closed.wait()
            await conn.close()

    async def _identify(self, stream: INetStream) -> None:
        await identify.answer(self.host, stream)

    # -- at both ends

    def _admit(self, conn: MeshConn, agreement: Agreement) -> None:
        if conn.is_closed or self.closing:
            return
        if conn.peer in self._party.admission.denied:  # since hello began
            self.nursery.start_soon(conn.close)
            return
        conn.member = conn.muxed_conn.trusted = True
        conn.version, conn.capabilities = agreement.version, agreement.capabilities
        conn.generations = agreement.generations
        conn.muxed_conn.measure = self._measure(conn.peer)
        conn.settled.set()
        conns = self.connections.setdefault(conn.peer, [])
        conns.append(conn)
        if len(conns) == 1:
            log.info("joined by %s at %s, version %d", conn.peer, conn.address, agreement.version)
            _tell(self.on_joined, conn.peer)
        self.nursery.start_soon(self._get_to_know, conn)

    async def _get_to_know(self, conn: MeshConn) -> None:
        try:
            await identify.ask(self.host, conn)
            if self.on_known is not None and conn.peer in self.connections:
                await self.on_known(conn.peer)
        except MeshError as error:
            log.info("%s", error)
        except Exception:
            log.exception("getting to know %s failed", conn.peer)

    def _measure(self, peer: str) -> NeighbourMeasure:
        measure = self.measures.setdefault(peer, NeighbourMeasure())
        self.measures.move_to_end(peer)
        while len(self.measures) > MAX_MEASURES:
            self.measures.popitem(last=False)
        return measure

    def let_go(self, peer: str) -> None:
        """Closes every connection to a peer."""
        for conn in self.connections.get(peer, ()):
            self.nursery.start_soon(conn.close)

    def _ended(self, conn: MeshConn) -> None:
        conns = self.connections.get(conn.peer, [])
        if conn not in conns:
            return
        conns.remove(conn)
        if not conns:
            del self.connections[conn.peer]
            log.info("lost %s", conn.peer)
            if not self.closing:
                _tell(self.on_lost, conn.peer)


def _tell(callbacks: list[Callback], peer: str) -> None:
    for callback in tuple(callbacks):
        try:
            callback(peer)
        except Exception:
            log.exception("a callback failed")


def peer_id(peer: str) -> ID:
    public_of(PeerId(peer))  # MeshError bad_frame unless it is the id of an Ed25519 key
    return ID.from_base58(peer)


def parse_address(text: str) -> Multiaddr:
    """MeshError bad_config unless it is a TCP multiaddress."""
    try:
        address = Multiaddr(text)
    except Exception as error:  # the library raises many kinds for what is no multiaddress
        raise MeshError("bad_config", f"{text!r} is no multiaddress: {error}") from error
    if [p.name for p in address.protocols()][1:2] == ["tcp"]:
        return address
    raise MeshError("bad_config", f"{text!r} is no TCP multiaddress", hint="write it like /ip4/127.0.0.1/tcp/4001")


def peer_of_address(text: str) -> str:
    """The peer id at the end of a multiaddress; MeshError bad_config without one."""
    peer = parse_address(text).get_peer_id()
    if not peer:
        raise MeshError("bad_config", f"{text!r} names no peer", hint="add /p2p/ and the peer's id")
    public_of(PeerId(peer))
    return str(peer)
