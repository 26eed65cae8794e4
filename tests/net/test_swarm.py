"""What a peer may do to a node's connections without harm; the stock faults are named in meshnode/net/swarm.py."""

from __future__ import annotations

import pytest
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.peer.peerstore import PeerStoreError
from multiaddr import Multiaddr

from meshnode.errors import MeshError
from meshnode.keys import NodeKey
from meshnode.net import members, open_network, swarm
from meshnode.net.swarm import _without_wildcards

from .helpers import LISTEN, SECRET, mesh, port_of, until

PROTOCOL = "/test/1"


async def echo(stream):
    while True:
        await stream.send(*await stream.receive())


async def idle_tasks() -> int:
    await trio.sleep(0.1)
    return trio.lowlevel.current_statistics().tasks_living


async def test_connections_that_ended_leave_nothing_behind(monkeypatch):
    monkeypatch.setattr(swarm, "MAX_CONNECTIONS", 8)
    async with mesh(1) as (node,), open_network(NodeKey.generate(), SECRET, listen=()) as visitor:
        before = await idle_tasks()
        for _ in range(100):  # far over MAX_CONNECTIONS, were they not let go
            await visitor.connect(node.peer, node.addresses)
            await visitor._members.connections[node.peer][0].close()
            await until(lambda: not node.connected() and not visitor.connected())
        await until(lambda: not node._members.swarm.strangers)
        await trio.sleep(0.2)
        assert await idle_tasks() <= before + 2


async def test_idle_sockets_make_room_for_members(monkeypatch):
    monkeypatch.setattr(swarm, "HANDSHAKE_LIMIT", 1.0)
    async with mesh(1) as (node,):
        idle = [await trio.open_tcp_stream("127.0.0.1", port_of(node)) for _ in range(200)]
        await trio.sleep(0.1)
        assert len(node._members.swarm.strangers) <= swarm.MAX_STRANGERS
        async with open_network(NodeKey.generate(), SECRET, listen=()) as visitor:
            with trio.fail_after(2):
                await visitor.connect(node.peer, node.addresses)
        with trio.fail_after(3):
            for stream in idle:
                while await stream.receive_some(100):
                    pass
        await until(lambda: not node._members.swarm.strangers)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(65536),
        b"\xff" * 64,
        b"\x13/multistream/1.0.0\n\x07/noise\n\xff\xff" + bytes(70000),
        b"\x13/multistream/1.0.0\n\x07/noise\n\x00\x20" + bytes(32),
        b"\x13/multistream/1.0.0\n\x03ls\n",
    ],
)
async def test_bytes_that_are_no_libp2p_are_dropped(garbage, monkeypatch):
    monkeypatch.setattr(swarm, "HANDSHAKE_LIMIT", 0.5)
    async with mesh(2) as (node, member):
        node.handle(PROTOCOL, echo)
        raw = await trio.open_tcp_stream("127.0.0.1", port_of(node))
        with trio.fail_after(3):
            try:
                await raw.send_all(garbage)
                while await raw.receive_some(4096):
                    pass
            except trio.BrokenResourceError:
                pass
        stream = await member.open(node.peer, PROTOCOL)
        await stream.send(b"still here")
        assert (await stream.receive())[0] == b"still here"


async def test_a_handler_that_raises_resets_its_stream_only(caplog):
    async with mesh(2) as (node, member):

        async def broken(stream):
            await stream.receive()
            raise RuntimeError("a fault of ours")

        node.handle("/broken/1", broken)
        node.handle(PROTOCOL, echo)
        good, bad = await member.open(node.peer, PROTOCOL), await member.open(node.peer, "/broken/1")
        await bad.send(b"x")
        with pytest.raises(MeshError) as fault:
            await bad.receive()
        assert fault.value.code == "unreachable"
        await good.send(b"still here")
        assert (await good.receive())[0] == b"still here"
        assert "a fault of ours" in caplog.text


async def test_a_peer_can_be_dialled_again_as_soon_as_it_is_there():
    async with mesh(1) as (node,):
        key = NodeKey.generate()
        async with open_network(key, SECRET, listen=LISTEN) as late:
            address = late.addresses[0]
        with pytest.raises(MeshError) as fault:
            await node.connect(key.peer, [address])
        assert fault.value.code == "unreachable"
        listen = address.split("/p2p/")[0]
        async with open_network(key, SECRET, listen=[listen]):
            await node.connect(key.peer, [address])


async def test_every_address_of_a_peer_is_tried(monkeypatch):
    monkeypatch.setattr(members, "DIAL_STAGGER", 5.0)  # one that fails does not hold up the next
    async with mesh(1) as (node,), open_network(NodeKey.generate(), SECRET, listen=()) as visitor:
        free = await trio.open_tcp_listeners(0, host="127.0.0.1")
        closed = free[0].socket.getsockname()[1]
        await free[0].aclose()
        addresses = [f"/ip4/127.0.0.1/tcp/{closed}", *node.addresses]
        with trio.fail_after(2):
            await visitor.connect(node.peer, addresses)


async def test_stock_forgets_its_key_when_the_address_book_is_full():
    flood = [ID.from_pubkey(create_new_key_pair(i.to_bytes(32, "big")).public_key) for i in range(50)]
    async with mesh(1) as (node,):
        for host, forgets in ((node._members.host, False), (new_host(), True)):
            host.get_peerstore().max_peers = 10
            for peer in flood:
                host.get_peerstore().add_addrs(peer, [Multiaddr("/ip4/127.0.0.1/tcp/1")], 100)
            if forgets:
                with pytest.raises(PeerStoreError):
                    host.get_private_key()
            else:
                host.get_private_key()


async def test_nobody_is_dialled_uncalled_for():
    async with mesh(1) as (node,):
        for i in range(20):
            peer = ID.from_pubkey(create_new_key_pair(bytes([i]) * 32).public_key)
            node._members.book.add_addrs(peer, [Multiaddr("/ip4/127.0.0.1/tcp/1")], 100)
        for call in (node._members.swarm.dial_peer, node._members.swarm.new_stream):
            with pytest.raises(Exception, match="dialled by the network alone"):
                await call(peer)


async def test_a_stock_node_that_offers_plaintext_is_no_member(monkeypatch):
    monkeypatch.setattr(swarm, "PENDING_LIMIT", 0.5)
    stock = new_host()
    async with mesh(1) as (node,), stock.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        await stock.connect(info_from_p2p_addr(Multiaddr(node.addresses[0])))  # by Noise, which both have
        assert not node.connected()
        with pytest.raises(Exception, match="failed to open a stream"):
            await stock.new_stream(ID.from_base58(node.peer), ["/ipfs/kad/1.0.0"])


async def test_a_peer_has_few_connections():
    async with mesh(1) as (node,), open_network(NodeKey.generate(), SECRET, listen=()) as visitor:
        peer = ID.from_base58(node.peer)
        for _ in range(swarm.MAX_PER_PEER):
            conn = await visitor._members.swarm.dial_addr(Multiaddr(node.addresses[0]), peer)
            await visitor._members._introduce(conn)
        with pytest.raises(Exception, match="one connection too many"):
            await visitor._members.swarm.dial_addr(Multiaddr(node.addresses[0]), peer)


def test_wildcards_become_addresses_that_can_be_dialled():
    found = [str(a) for a in _without_wildcards([Multiaddr("/ip4/0.0.0.0/tcp/99"), Multiaddr("/ip4/10.0.0.1/tcp/9")])]
    assert "/ip4/10.0.0.1/tcp/9" in found
    assert len(found) >= 2
    assert not any("0.0.0.0" in a for a in found)


async def test_a_port_in_use_is_said():
    async with mesh(1) as (node,):
        with pytest.raises(MeshError) as fault:
            async with open_network(NodeKey.generate(), SECRET, listen=[f"/ip4/127.0.0.1/tcp/{port_of(node)}"]):
                pass
        assert fault.value.code == "port_in_use"


@pytest.mark.parametrize("listen", ["nonsense", "/ip4/127.0.0.1/udp/1/quic-v1", "/ip4/999.0.0.1/tcp/1", ""])
async def test_an_address_that_cannot_be_read_is_said(listen):
    with pytest.raises(MeshError) as fault:
        async with open_network(NodeKey.generate(), SECRET, listen=[listen]):
            pass
    assert fault.value.code == "bad_config"
