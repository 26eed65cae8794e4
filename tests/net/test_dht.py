from __future__ import annotations

import time
from contextlib import AsyncExitStack

import pytest
import trio
from libp2p.kad_dht.pb.kademlia_pb2 import Message, Record
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from meshnode.errors import MeshError
from meshnode.keys import NodeKey
from meshnode.net import dht, open_network
from meshnode.net.dht import PROTOCOL_ID, record_key

from .helpers import LISTEN, SECRET, mesh, stranger, until, until_async


async def test_four_nodes_that_start_at_once_find_each_other():
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(open_network(NodeKey.generate(), SECRET, listen=LISTEN))
        others = [
            await stack.enter_async_context(
                open_network(NodeKey.generate(), SECRET, listen=LISTEN, bootstrap=first.addresses)
            )
            for _ in range(3)
        ]
        nodes = [first, *others]
        async with trio.open_nursery() as nursery:
            for i, node in enumerate(nodes):  # before they have joined
                nursery.start_soon(node.provide, b"own %d" % i)
                nursery.start_soon(node.provide, b"shared")

        async def all_found():
            for node in nodes:
                if set(await node.find(b"shared")) != {n.peer for n in nodes}:
                    return False
                for i, owner in enumerate(nodes):
                    if await node.find(b"own %d" % i) != [owner.peer]:
                        return False
            return True

        await until_async(all_found, 3)
        for node in nodes:
            for other in nodes:
                if other is not node:
                    await node.connect(other.peer)


async def test_who_provides_sees_the_others_too():
    async with mesh(3) as nodes:
        for node in nodes:
            await node.provide(b"key")
        for node in nodes:
            assert set(await node.find(b"key")) == {n.peer for n in nodes}


async def test_nothing_is_found_where_nothing_is():
    async with mesh(2) as (a, b):
        await a.provide(b"other")
        assert await b.find(b"key") == []
        assert await b.find(b"other") == [a.peer]


async def test_alone_one_finds_oneself():
    async with mesh(1) as (a,):
        await a.provide(b"key")
        assert await a.find(b"key") == [a.peer]
        assert await a.find(b"other") == []


async def test_who_joins_later_is_given_the_records():
    async with mesh(2) as (a, b):
        await b.provide(b"key")
        async with open_network(NodeKey.generate(), SECRET, listen=LISTEN, bootstrap=a.addresses) as late:
            await late.wait_joined()
            await until(lambda: late._dht.records.get_providers(record_key(b"key")))
            assert await late.find(b"key") == [b.peer]


async def test_what_was_heard_is_not_kept():
    """The stock node answers from what it once heard, for 48 hours."""
    async with mesh(3) as (a, b, c):
        await b.provide(b"key")
        assert await c.find(b"key") == [b.peer]
        await a.provide(b"key")
        assert set(await c.find(b"key")) == {a.peer, b.peer}


async def test_more_than_a_bucket_of_providers_are_found():
    """The stock store keeps the first twenty of a key."""
    async with mesh(2) as (a, b):
        crowd = [ID.from_base58(NodeKey(bytes([n]) * 32).peer) for n in range(35)]
        for peer in crowd:
            a._dht.records.add_provider(record_key(b"key"), PeerInfo(peer, [Multiaddr("/ip4/127.0.0.1/tcp/1")]))
        assert set(await b.find(b"key")) == {str(peer) for peer in crowd}


async def test_a_key_s_providers_are_bounded_and_the_freshest(monkeypatch):
    monkeypatch.setattr(dht, "MAX_PROVIDERS", 3)
    async with mesh(1) as (a,):
        await a.provide(b"key")
        crowd = [ID.from_base58(NodeKey(bytes([n]) * 32).peer) for n in range(6)]
        for peer in crowd:
            a._dht.records.add_provider(record_key(b"key"), PeerInfo(peer, [Multiaddr("/ip4/127.0.0.1/tcp/1")] * 20))
        kept = a._dht.records.providers[record_key(b"key")]
        assert set(kept) == {a.peer, *map(str, crowd[-2:])}
        assert all(len(r.provider_info.addrs) <= 8 for r in kept.values())


async def test_a_provider_that_died_is_forgotten(monkeypatch):
    monkeypatch.setattr(dht, "DOUBT_S", 0.1)
    async with mesh(2) as (a, b):
        async with open_network(NodeKey.generate(), SECRET, listen=LISTEN, bootstrap=a.addresses) as dead:
            await dead.wait_joined()
            await dead.provide(b"key")
            assert await b.find(b"key") == [dead.peer]
        await until(lambda: not a._dht.records.peers() and not b._dht.records.peers(), 3)
        assert await b.find(b"key") == []


async def test_a_provider_whose_connection_alone_broke_is_kept(monkeypatch):
    monkeypatch.setattr(dht, "DOUBT_S", 0.1)
    async with mesh(2) as (a, b):
        await b.provide(b"key")
        a._members.let_go(b.peer)
        await until(lambda: not a.connected())
        await until(lambda: a.connected())
        await trio.sleep(0.2)
        assert a._dht.records.all_of(record_key(b"key")) == [b.peer]


async def test_one_that_does_not_answer_holds_a_look_up_up_only_briefly():
    async with mesh(3) as (a, b, c):
        await b.provide(b"key")
        await until(lambda: len(a.connected()) == 2)
        for node in (a, b):
            await c.connect(node.peer, node.addresses)

        async def silence(_):
            await trio.sleep_forever()

        a._members.host.set_stream_handler(PROTOCOL_ID, silence)
        start = time.monotonic()
        assert await c.find(b"key") == [b.peer]
        assert time.monotonic() - start < 2 < dht.QUERY_LIMIT


async def test_many_keys_reach_others():
    """The stock server drops all but ten in ten seconds, and says nothing."""
    async with mesh(2) as (a, b):
        async with trio.open_nursery() as nursery:
            for i in range(60):
                nursery.start_soon(b.provide, b"%d" % i)
        assert all(a._dht.records.get_providers(record_key(b"%d" % i)) for i in range(60))


async def test_a_withdrawn_key_is_announced_no_more():
    async with mesh(2) as (a, b):
        await b.provide(b"key")
        b.withdraw(b"key")
        assert await b.find(b"other") == []
        async with open_network(NodeKey.generate(), SECRET, listen=LISTEN, bootstrap=a.addresses) as late:
            await late.wait_joined()
            await until(lambda: len(late.connected()) == 2)
            await trio.sleep(0.2)
            assert not late._dht.records.get_providers(record_key(b"key"))


async def test_a_record_ends_by_itself(monkeypatch):
    async with mesh(2) as (a, b):
        await b.provide(b"key")
        await a.provide(b"key")
        record = a._dht.records.providers[record_key(b"key")]
        for kept in record.values():
            kept.timestamp -= dht.RECORD_LIMIT + 1
        assert [str(p.peer_id) for p in a._dht.records.get_providers(record_key(b"key"))] == [a.peer]
        a._dht.records.drop_old()
        assert list(record) == [a.peer]


async def test_records_are_announced_again(monkeypatch):
    monkeypatch.setattr(dht, "ANNOUNCE_INTERVAL", 0.2)
    async with mesh(2) as (a, b):
        await b.provide(b"key")
        a._dht.records.providers.clear()
        await until(lambda: a._dht.records.get_providers(record_key(b"key")))


async def test_a_dead_provider_delays_nobody():
    async with mesh(3) as (a, b, c):
        async with open_network(NodeKey.generate(), SECRET, listen=LISTEN, bootstrap=a.addresses) as dead:
            await dead.wait_joined()
            await dead.provide(b"key")
        await b.provide(b"key")
        start = time.monotonic()
        found = await c.find(b"key")
        assert time.monotonic() - start < 1
        assert b.peer in found  # the dead one may be: a record is a hint
        with trio.fail_after(1), pytest.raises(MeshError):
            await c.connect(dead.peer)


async def test_a_peer_known_by_id_alone_is_located():
    async with mesh(3) as (a, b, c):
        await until(lambda: len(a.connected()) == 2)
        for conns in list(c._members.connections.values()):
            if conns[0].peer == b.peer:
                await conns[0].close()
        await until(lambda: b.peer not in {p.peer for p in c.connected()})
        c._members.book.clear_addrs(ID.from_base58(b.peer))
        await c.connect(b.peer)
        assert c.known_addresses(b.peer)


async def test_only_members_enter_the_table():
    async with mesh(2) as (a, b):
        await until(lambda: a._dht.table.size() == 1)
        stranger_id = ID.from_base58(NodeKey.generate().peer)
        info = PeerInfo(stranger_id, [Multiaddr("/ip4/127.0.0.1/tcp/1")])
        assert not await a._dht.table.add_peer(info)
        assert not await a._dht._kad.add_peer(stranger_id, skip_server_mode_check=True)
        assert a._dht.table.get_peer_ids() == [ID.from_base58(b.peer)]
    assert a._dht.table.size() == 0


async def test_strangers_named_in_answers_are_not_asked():
    async with mesh(2) as (a, b):
        asked = []
        listener = await trio.open_tcp_listeners(0, host="127.0.0.1")

        async def accept(tcp):
            asked.append(await tcp.receive_some(100))
            await tcp.receive_some(1)

        ghost = Message.Peer(id=ID.from_base58(NodeKey.generate().peer).to_bytes())
        ghost.addrs.append(Multiaddr(f"/ip4/127.0.0.1/tcp/{listener[0].socket.getsockname()[1]}").to_bytes())

        async def lie(raw):
            await raw.muxed_stream.read(1000)
            reply = Message(type=Message.GET_PROVIDERS, closerPeers=[ghost]).SerializeToString()
            await raw.muxed_stream.write(bytes([len(reply) % 128 | 128, len(reply) // 128]) + reply)

        a._members.host.set_stream_handler(PROTOCOL_ID, lie)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, accept, listener)
            with trio.fail_after(dht.QUERY_LIMIT + 2):
                assert await b.find(b"key") == []
            nursery.cancel_scope.cancel()
        assert len(asked) == 1  # dialled, to find out whether it is a member; no Noise, no hello: no question
        assert all(b"kad" not in data for data in asked)


async def test_a_peer_without_addresses_is_not_asked_for_its_own():
    """It would wait for the very dial that looks for it."""
    nobody = NodeKey.generate().peer
    async with mesh(2) as (a, b):

        async def name_it(raw):
            await raw.muxed_stream.read(1000)
            named = Message.Peer(id=ID.from_base58(nobody).to_bytes())
            reply = Message(type=Message.FIND_NODE, closerPeers=[named]).SerializeToString()
            await raw.muxed_stream.write(bytes([len(reply)]) + reply)

        a._members.host.set_stream_handler(PROTOCOL_ID, name_it)
        with trio.fail_after(1), pytest.raises(MeshError) as fault:
            await b.connect(nobody)
        assert fault.value.code == "unreachable"


async def test_values_are_not_kept():
    async with mesh(2) as (a, b):
        for key in (b"/mesh/x", b"/pk/x", b"x"):
            message = Message(type=Message.PUT_VALUE, key=key, record=Record(key=key, value=b"value"))
            with pytest.raises(MeshError):
                await b._dht._query(ID.from_base58(a.peer), message)
        assert a._dht._kad.value_store.size() == 0


async def test_streams_that_say_nothing_do_not_block_the_server(monkeypatch):
    monkeypatch.setattr(dht, "SERVE_LIMIT", 0.5)
    async with mesh(2) as (a, b):
        await a.provide(b"key")
        idle = []
        for _ in range(dht.SERVE_STREAMS):
            idle.append(await b._members.host.open_on(b._members.connections[a.peer][0], PROTOCOL_ID))
        await trio.sleep(0.1)
        assert a._dht._kad._inbound_limiter.borrowed_tokens == dht.SERVE_STREAMS
        await until(lambda: a._dht._kad._inbound_limiter.borrowed_tokens == 0, 2)
        assert await b.find(b"key") == [a.peer]


async def test_bytes_that_are_no_question_are_dropped(monkeypatch):
    monkeypatch.setattr(dht, "SERVE_LIMIT", 0.5)
    async with mesh(2) as (a, b):
        await a.provide(b"key")
        for raw in (b"\xff" * 20, b"\x05hello", bytes(70_000), b"GET / HTTP/1.1\r\n\r\n"):
            raw_stream = await b._members.host.open_on(b._members.connections[a.peer][0], PROTOCOL_ID)
            try:
                await raw_stream.muxed_stream.write(raw)
                with trio.fail_after(2):
                    while True:
                        await raw_stream.muxed_stream.read(100)
            except trio.TooSlowError:
                pytest.fail("still waiting for more")
            except Exception:
                assert await b.find(b"key") == [a.peer]


async def test_a_stranger_asks_in_vain(monkeypatch):
    from meshnode.net import swarm

    monkeypatch.setattr(swarm, "PENDING_LIMIT", 0.5)
    async with mesh(1) as (a,), open_network(NodeKey.generate(), SECRET, listen=()) as visitor:
        await a.provide(b"key")
        conn = await stranger(visitor, a)
        with trio.fail_after(3), pytest.raises(Exception, match=r"reset|closed|line"):
            await visitor._members.host.open_on(conn, PROTOCOL_ID)


async def test_keys_are_bounded(monkeypatch):
    monkeypatch.setattr(dht, "MAX_KEYS", 5)
    async with mesh(2) as (a, b):
        for i in range(8):
            await b.provide(b"%d" % i)
        assert len(a._dht.records.providers) == 5
