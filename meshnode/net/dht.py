"""Kademlia among members: libp2p's server and records, with look-ups of our own.

Faults of stock libp2p 0.8.1 that are cured here, each by a test in tests/net/test_dht.py:
- find_providers answers from the local store alone, and keeps what it once heard for 48 h: here the network is always
  asked, nothing that is heard is kept, and records end after RECORD_LIMIT;
- strangers are asked and enter the routing table: here only members do;
- ADD_PROVIDER is cut off silently after 10 in 10 s, and never answered for: here the echo is awaited, and the limit
  fits what a node of several artifacts announces;
- records do not reach peers that join later: here they are given to each member that joins, and again regularly;
- a key has 20 providers, and whoever comes later is turned away: here it has MAX_PROVIDERS, the freshest;
- dead providers are named for 48 h: here whoever is lost is dialled, and forgotten when it is gone;
- 12 streams that say nothing block the server: they have a limit of time;
- anyone may store values of any name: here there are none.
"""

from __future__ import annotations

import hashlib
import logging
import random
import time
from collections.abc import Collection, Iterable

import trio
from google.protobuf.message import DecodeError
from libp2p.abc import INetStream
from libp2p.exceptions import BaseLibp2pError
from libp2p.kad_dht.common import BUCKET_SIZE, PROTOCOL_ID
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.kad_dht.provider_store import ProviderRecord, ProviderStore
from libp2p.kad_dht.routing_table import RoutingTable
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.records.validator import NamespacedValidator
from libp2p.utils.varint import encode_varint_prefixed, read_varint_prefixed_bytes_limited
from multiaddr import Multiaddr

from ..errors import MeshError
from .identify import remember
from .swarm import MeshHost
from .walk import Ask, Walk

log = logging.getLogger(__name__)

MAX_REPLY = 64 << 10  # bytes: 20 providers and 20 closer peers with 8 addresses each
QUERY_LIMIT = 3.0  # s for one peer's answer, dialling included
SERVE_LIMIT = 30.0  # s that a peer may hold one of our server's streams
SERVE_STREAMS = 64  # at once
ANNOUNCE_LIMIT = 256  # ADD_PROVIDERs of one peer in 10 s: 17 keys an artifact, on joining and on serving
RECORD_LIMIT = 900.0  # s a provider record counts; a record is a hint, its provider has to confirm it
ANNOUNCE_INTERVAL = 300.0  # s between announcements: two may be lost
ANNOUNCE_AT_ONCE = 64  # ADD_PROVIDERs on one stream: a quarter of what a peer may send in 10 s
MAX_KEYS = 8192  # that we keep records of
MAX_PROVIDERS = 512  # of a key; then the oldest gives way
MAX_TOLD = 2 * BUCKET_SIZE  # providers in one answer, drawn anew for each: who asks hears of more from others
MAX_PROVIDER_ADDRESSES = 8
DOUBT_S = 2.0  # from when a provider is lost until it is dialled: it may be coming back by itself
MAX_DOUBTED = 64  # providers that are dialled in one go
FIRST_REFRESH, LAST_REFRESH = 0.5, 60.0  # s between looking for members around us; doubles from one to the other


class MeshDht:
    def __init__(self, host: MeshHost, members: Collection[str], *, diverse: bool) -> None:
        """members: those that are connected, as they come and go. diverse: they may be strangers to each other, so that
        few of one network enter a bucket."""
        self._host = host
        self._members = members
        self._own = host.get_id()
        validator = NamespacedValidator({}, strict_validation=True)  # no name is valid: the mesh keeps no values
        self._kad = KadDHT(host, DHTMode.SERVER, validator=validator, validator_changed=True, strict_validation=True)
        subnet_limit = None if diverse else 0
        self.table = self._kad.routing_table = MemberTable(self._own, host, members, max_peers_per_subnet=subnet_limit)
        self.records = self._kad.provider_store = Records(host)
        self._kad._provider_rate_max = ANNOUNCE_LIMIT
        self._kad._inbound_limiter = trio.CapacityLimiter(SERVE_STREAMS)
        host.set_stream_handler(PROTOCOL_ID, self._serve)
        self._keys: set[bytes] = set()
        self._unpublished: set[bytes] = set()
        self._publishing = trio.Lock()
        self._hurry = trio.Event()
        self._doubted: set[str] = set()
        self._doubt = trio.Event()

    async def _serve(self, stream: INetStream) -> None:
        with trio.move_on_after(SERVE_LIMIT):
            await self._kad.handle_stream(stream)

    async def run(self) -> None:
        """Keeps the table and the records fresh."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._refresh)
            nursery.start_soon(self._announce)
            nursery.start_soon(self._weed)

    async def _refresh(self) -> None:
        pause = LAST_REFRESH
        while True:
            with trio.move_on_after(pause) as waiting:
                await self._hurry.wait()
                self._hurry = trio.Event()
                await trio.sleep(FIRST_REFRESH)
            pause = min(2 * pause, LAST_REFRESH) if waiting.cancelled_caught else FIRST_REFRESH
            await self._walk(self._own.to_bytes(), self._find_node(self._own.to_bytes()))

    async def _announce(self) -> None:
        while True:
            await trio.sleep(ANNOUNCE_INTERVAL)
            self.records.drop_old()
            self._suspect(self.records.peers())
            await self._publish(tuple(self._keys))

    async def _weed(self) -> None:
        """Dials providers that are in doubt; those that are not there are forgotten."""

        async def check(peer: str) -> None:
            addresses = [address.to_bytes() for address in self.records.addresses(peer)]
            remember(self._host.get_peerstore(), ID.from_base58(peer), addresses)  # else it is looked for far and wide
            try:
                await self._host.reach(peer)
            except MeshError as error:
                log.info("a provider is gone: %s", error)
                self.records.forget_peer(peer)

        while True:
            await self._doubt.wait()
            await trio.sleep(DOUBT_S * random.uniform(0.5, 1.5))
            doubted, self._doubted, self._doubt = self._doubted, set(), trio.Event()
            async with trio.open_nursery() as nursery:
                for peer in random.sample(sorted(doubted), min(len(doubted), MAX_DOUBTED)):
                    nursery.start_soon(check, peer)

    def _suspect(self, peers: Iterable[str]) -> None:
        self._doubted.update(peer for peer in peers if peer not in self._members)
        if self._doubted:
            self._doubt.set()

    async def joined(self, peer: str) -> None:
        """A member whose addresses are known: it enters the table, and is given what it should keep of ours."""
        member = ID.from_base58(peer)
        if self.table.size() == 0:
            self._hurry.set()
        await self.table.add_peer(member)
        near = [key for key in self._keys if member in self.table.find_local_closest_peers(key, BUCKET_SIZE)]
        if near:
            await self._give(member, near)

    def lost(self, peer: str) -> None:
        self.table.remove_peer(ID.from_base58(peer))
        if peer in self.records.peers():
            self._suspect([peer])

    # -- what the network offers

    async def provide(self, key: bytes) -> None:
        """Announces this node under a key, now and until the node ends."""
        record = record_key(key)
        self._keys.add(record)
        self.records.add_provider(record, PeerInfo(self._own, self._host.get_addrs()))
        self._unpublished.add(record)
        await trio.lowlevel.checkpoint()
        async with self._publishing:  # what is asked for at once goes out together, and is out when this returns
            records, self._unpublished = self._unpublished, set()
            await self._publish(records)

    def withdraw(self, key: bytes) -> None:
        """Announces it no longer; what others keep of it ends by itself."""
        self._keys.discard(record_key(key))
        self.records.forget(record_key(key), str(self._own))

    async def find(self, key: bytes, timeout: float) -> list[str]:
        """Ids of peers announced under a key, this node included; those found when the time is over."""
        record = record_key(key)
        found = self.records.all_of(record)
        with trio.move_on_after(timeout):
            await self._walk(record, self._ask_providers(record, found))
        return list(dict.fromkeys(found))

    async def locate(self, peer: str) -> None:
        """Looks for the addresses of a peer, which go to the address book. Does not ask the peer itself."""
        wanted = ID.from_base58(peer)
        find = self._find_node(wanted.to_bytes())

        async def ask(asked: ID) -> list[ID]:
            return [named for named in await find(asked) if named != wanted]

        await self._walk(wanted.to_bytes(), ask)

    # -- look-ups

    async def _walk(self, target: bytes, ask: Ask) -> list[ID]:
        """Who answered of the members closest to a target, closest first."""
        return await Walk(target, self._own, self._known(), ask).run()

    def _known(self) -> set[ID]:
        return {*self.table.get_peer_ids(), *map(ID.from_base58, self._members)}

    def _ask_providers(self, record: bytes, found: list[str]) -> Ask:
        async def ask(peer: ID) -> list[ID]:
            (answer,) = await self._query(peer, Message(type=Message.GET_PROVIDERS, key=record))
            found.extend(map(str, self._learn(answer.providerPeers)))
            return self._learn(answer.closerPeers)

        return ask

    def _find_node(self, target: bytes) -> Ask:
        async def ask(peer: ID) -> list[ID]:
            (answer,) = await self._query(peer, Message(type=Message.FIND_NODE, key=target))
            return self._learn(answer.closerPeers)

        return ask

    def _learn(self, peers: Iterable[Message.Peer]) -> list[ID]:
        """The ids in an answer; addresses of those that we have no connection to are kept."""
        found = []
        for peer in list(peers)[:MAX_TOLD]:
            peer_id = ID(peer.id)
            if peer_id != self._own and len(peer.id) <= 64:
                if not self._host.get_network().get_connections(peer_id):
                    remember(self._host.get_peerstore(), peer_id, list(peer.addrs))
                found.append(peer_id)
        return found

    async def _publish(self, records: Iterable[bytes]) -> None:
        """Gives records to the members closest to each: while there are few members, to all of them."""
        given: dict[ID, list[bytes]] = {}
        for record in records:
            members = self._known()
            if len(members) > BUCKET_SIZE:
                members = set(await self._walk(record, self._ask_providers(record, [])))
            for peer in members:
                given.setdefault(peer, []).append(record)
        async with trio.open_nursery() as nursery:
            for peer, theirs in given.items():
                nursery.start_soon(self._give, peer, theirs)

    async def _give(self, peer: ID, records: list[bytes]) -> None:
        own = Message.Peer(id=self._own.to_bytes(), addrs=[a.to_bytes() for a in self._host.get_addrs()])
        questions = [Message(type=Message.ADD_PROVIDER, key=record, providerPeers=[own]) for record in records]
        try:
            for at in range(0, len(questions), ANNOUNCE_AT_ONCE):
                await self._query(peer, *questions[at : at + ANNOUNCE_AT_ONCE])
        except MeshError as error:
            log.info("%s does not keep a record: %s", peer, error)

    async def _query(self, peer: ID, *questions: Message) -> list[Message]:
        """The answers to questions that go out at once, on a stream of their own. MeshError unreachable for whatever
        goes wrong."""
        raw = b"".join(encode_varint_prefixed(question.SerializeToString()) for question in questions)
        answers = []
        try:
            with trio.fail_after(QUERY_LIMIT):
                stream = await self._host.new_stream(peer, [PROTOCOL_ID])
                try:
                    await stream.muxed_stream.write(raw)
                    for question in questions:
                        answer = Message()
                        answer.ParseFromString(await read_varint_prefixed_bytes_limited(stream.muxed_stream, MAX_REPLY))
                        if answer.type != question.type:
                            raise ValueError("an answer to something else")
                        answers.append(answer)
                finally:
                    stream.muxed_stream.close_now()
                    stream.swarm_conn.remove_stream(stream)
        except (BaseLibp2pError, OSError, trio.TooSlowError, ValueError, DecodeError) as error:
            raise MeshError("unreachable", f"{peer} does not answer: {error!r}") from error
        return answers


class MemberTable(RoutingTable):  # type: ignore[misc]
    """A routing table that only members enter."""

    def __init__(self, own: ID, host: MeshHost, members: Collection[str], **limits: int | None) -> None:
        super().__init__(own, host, **limits)
        self._members = members

    async def add_peer(self, peer_obj: PeerInfo | ID, *, skip_server_mode_check: bool = False) -> bool:
        peer = peer_obj.peer_id if isinstance(peer_obj, PeerInfo) else peer_obj
        if str(peer) not in self._members:
            return False
        return bool(await super().add_peer(peer_obj, skip_server_mode_check=True))


class Records(ProviderStore):  # type: ignore[misc]
    """Provider records that end after RECORD_LIMIT, of at most MAX_KEYS keys with MAX_PROVIDERS each."""

    def __init__(self, host: MeshHost) -> None:
        super().__init__(host)

    def add_provider(self, key: bytes, provider: PeerInfo) -> None:
        if key not in self.providers and len(self.providers) >= MAX_KEYS:
            return
        records = self.providers.setdefault(key, {})
        records.pop(str(provider.peer_id), None)
        info = PeerInfo(provider.peer_id, provider.addrs[:MAX_PROVIDER_ADDRESSES])
        records[str(provider.peer_id)] = ProviderRecord(info)
        if len(records) > MAX_PROVIDERS:
            own = str(self.local_peer_id)
            records.pop(next(peer for peer in records if peer != own))

    def get_providers(self, key: bytes) -> list[PeerInfo]:
        """What is told to who asks: MAX_TOLD of them."""
        counting = [record.provider_info for record in self.providers.get(key, {}).values() if self._counts(record)]
        return random.sample(counting, min(len(counting), MAX_TOLD))

    def all_of(self, key: bytes) -> list[str]:
        return [peer for peer, record in self.providers.get(key, {}).items() if self._counts(record)]

    def peers(self) -> set[str]:
        """Every provider of anything, but this node."""
        return {peer for records in self.providers.values() for peer in records} - {str(self.local_peer_id)}

    def _counts(self, record: ProviderRecord) -> bool:
        return bool(record.peer_id == self.local_peer_id or time.time() - record.timestamp < RECORD_LIMIT)

    def addresses(self, peer: str) -> list[Multiaddr]:
        """As its records have them."""
        found = (records[peer].provider_info.addrs for records in self.providers.values() if peer in records)
        return next(found, [])

    def drop_old(self) -> None:
        for key, records in list(self.providers.items()):
            for peer, record in list(records.items()):
                if not self._counts(record):
                    self.forget(key, peer)

    def forget_peer(self, peer: str) -> None:
        for key in list(self.providers):
            self.forget(key, peer)

    def forget(self, key: bytes, peer: str) -> None:
        records = self.providers.get(key, {})
        records.pop(peer, None)
        if not records:
            self.providers.pop(key, None)


def record_key(key: bytes) -> bytes:
    """The multihash under which Kademlia keeps records of a key."""
    return b"\x12\x20" + hashlib.sha256(key).digest()
