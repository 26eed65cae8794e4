"""How nodes get into a mesh, and back into it."""

from __future__ import annotations

import socket
import time
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio

from meshnode.errors import MeshError
from meshnode.keys import NodeKey
from meshnode.net import joining, open_network

from .helpers import LISTEN, SECRET, mesh, until, until_async

NOBODY = NodeKey(bytes([9]) * 32).peer


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def opened(bootstrap=(), **more):
    return open_network(more.pop("key", None) or NodeKey.generate(), SECRET, listen=LISTEN, bootstrap=bootstrap, **more)


@asynccontextmanager
async def started_at_once(size: int):
    """Nodes whose invite names all of them, before any of them is there."""
    keys = [NodeKey.generate() for _ in range(size)]
    listen = [f"/ip4/127.0.0.1/tcp/{port}" for port in free_ports(size)]
    invite = [f"{address}/p2p/{key.peer}" for address, key in zip(listen, keys, strict=True)]
    nodes: dict[int, object] = {}
    async with trio.open_nursery() as nursery:

        async def start(number: int) -> None:
            network = open_network(keys[number], SECRET, listen=[listen[number]], bootstrap=invite)
            async with network as nodes[number]:
                await trio.sleep_forever()

        for number in range(size):
            nursery.start_soon(start, number)
        await until(lambda: len(nodes) == size)
        yield list(nodes.values())
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("_", range(5))
async def test_four_that_start_at_once_are_one_mesh(_):
    async with started_at_once(4) as nodes:
        await until(lambda: all(len(node.connected()) == 3 for node in nodes), 10)


async def test_one_address_that_answers_is_enough_and_dead_ones_cost_no_time():
    async with mesh(1) as (node,):
        silent = socket.socket()
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)  # accepts, and never says a word
        port = silent.getsockname()[1]
        dead = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{NodeKey(bytes([n]) * 32).peer}" for n in range(7)]
        with silent:
            start = time.monotonic()
            async with opened((*dead, *node.addresses)) as newcomer:
                await newcomer.wait_joined()
                assert time.monotonic() - start < 1


async def test_two_halves_that_meet_by_one_link_are_one_mesh():
    async with mesh(3) as left, mesh(3) as right:
        for half in (left, right):
            await half[2].provide(b"key")
        assert await left[1].find(b"key") == [left[2].peer]
        await left[0].connect(right[0].peer, right[0].addresses)
        both = {left[2].peer, right[2].peer}

        async def one() -> bool:
            return all([set(await node.find(b"key")) == both for node in (*left, *right)])

        await until_async(one, 5)
        await until(lambda: all(len(node.connected()) == 5 for node in (*left, *right)), 5)


async def test_when_all_bootstrap_nodes_are_gone_any_other_member_lets_in():
    async def start(bootstrap, task_status=trio.TASK_STATUS_IGNORED):
        with trio.CancelScope() as scope:
            async with opened(bootstrap) as node:
                task_status.started((node, scope))
                await trio.sleep_forever()

    async with trio.open_nursery() as nursery, AsyncExitStack() as others:
        first, ends_first = await nursery.start(start, ())
        second, ends_second = await nursery.start(start, first.addresses)
        both = (*first.addresses, *second.addresses)
        members = [await others.enter_async_context(opened(both)) for _ in range(3)]
        await until(lambda: all(len(node.connected()) == 4 for node in members))
        await members[0].provide(b"key")
        ends_first.cancel()
        ends_second.cancel()
        await until(lambda: all(len(node.connected()) == 2 for node in members))
        async with opened(members[2].addresses) as newcomer:
            await newcomer.wait_joined()
            assert await newcomer.find(b"key") == [members[0].peer]
            await until(lambda: len(newcomer.connected()) == 3)


async def test_who_lost_everybody_comes_back_without_having_dialled_them(monkeypatch):
    monkeypatch.setattr(joining, "LOOK_S", 0.05)
    async with opened() as first, opened(first.addresses) as second:
        await until(lambda: first._joining._seen and second._joining._seen)
        second._joining._seen.clear()  # the one that dialled does not come by itself
        first._members.let_go(second.peer)
        await until(lambda: not first.connected())
        await until(lambda: first.connected(), 3)
        assert not first.connected()[0].inbound


async def test_a_node_alone_is_whole():
    async with opened((f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}",)) as node:
        await node.provide(b"key")
        assert await node.find(b"key") == [node.peer]
        with pytest.raises(MeshError) as fault:
            await node.wait_joined()
        assert fault.value.code == "unreachable"
