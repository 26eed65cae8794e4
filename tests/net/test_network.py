from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
import trio
import trio.lowlevel
from libp2p.stream_muxer.exceptions import MuxedStreamReset

from meshnode.errors import MeshError
from meshnode.keys import NodeKey
from meshnode.net import PeerStream, joining, members, open_network, stream, swarm
from meshnode.wire.messages import Refusal
from meshnode.wire.schema import decode

from .helpers import LISTEN, SECRET, mesh, until

PROTOCOL = "/test/1"
NOBODY = NodeKey(bytes(32)).peer
NOWHERE = "/ip4/127.0.0.1/tcp/1"


async def echo(peer_stream: PeerStream) -> None:
    while True:
        await peer_stream.send(*await peer_stream.receive())


async def answer(peer: str, request: bytes) -> bytes:
    return peer[-4:].encode() + request


# -- streams


@pytest.mark.parametrize("size", [0, 1, 8192, 65_507, 65_508, 1 << 20, 16 << 20])
async def test_frames_of_every_size_arrive(size):
    payload = os.urandom(size)
    async with mesh(2) as (a, b):
        a.handle(PROTOCOL, echo)
        peer_stream = await b.open(a.peer, PROTOCOL)
        await peer_stream.send(b"header", payload)
        header, back = await peer_stream.receive()
        assert (header, bytes(back)) == (b"header", payload)
        await peer_stream.aclose()
        await until(lambda: not b._members.connections[a.peer][0].muxed_conn.streams)


async def test_the_peer_of_a_stream_is_who_noise_says():
    async with mesh(2) as (a, b):
        seen = []

        async def handler(peer_stream):
            seen.append(peer_stream.peer)

        a.handle(PROTOCOL, handler)
        peer_stream = await b.open(a.peer, PROTOCOL)
        await until(lambda: seen)
        assert seen == [b.peer]
        assert peer_stream.peer == a.peer


async def test_a_stream_closed_gives_what_was_sent_and_then_ends():
    async with mesh(2) as (a, b):

        async def talk(peer_stream):
            for i in range(20):
                await peer_stream.send(b"%d" % i)

        a.handle(PROTOCOL, talk)
        peer_stream = await b.open(a.peer, PROTOCOL)
        for i in range(20):
            assert (await peer_stream.receive())[0] == b"%d" % i
        with pytest.raises(MeshError) as fault:
            await peer_stream.receive()
        assert fault.value.code == "unreachable"
        await peer_stream.aclose()
        await until(lambda: not b._members.connections[a.peer][0].muxed_conn.streams)


async def test_sending_waits_for_a_slow_reader():
    async with mesh(2) as (a, b):
        go = trio.Event()

        async def slow(peer_stream):
            await go.wait()
            await echo(peer_stream)

        a.handle(PROTOCOL, slow)
        peer_stream = await b.open(a.peer, PROTOCOL)
        sent = 0
        with trio.move_on_after(0.5):
            while True:
                await peer_stream.send(b"x", bytes(200_000))
                sent += 1
        assert sent <= stream.SEND_QUEUE + 3
        go.set()
        for _ in range(sent):
            await peer_stream.receive()


async def test_a_sender_that_is_cancelled_cuts_nothing():
    async with mesh(2) as (a, b):
        a.handle(PROTOCOL, echo)
        peer_stream = await b.open(a.peer, PROTOCOL)
        got = []

        async def read():
            while True:
                header, payload = await peer_stream.receive()
                assert len(payload) == 3_000_000
                got.append(header)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            for i in range(15):
                with trio.move_on_after(0.003 * i):
                    await peer_stream.send(b"%d" % i, bytes(3_000_000))
            await peer_stream.send(b"last", bytes(3_000_000))
            await until(lambda: b"last" in got, 20)
            nursery.cancel_scope.cancel()
        assert got == [*sorted(got[:-1], key=int), b"last"]


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff\xff\xff\xff" + bytes(4),
        bytes(8),
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(65536),
        bytes.fromhex("789ced") + bytes(500),
        (5).to_bytes(4, "big") + b"\x7f\xff\xff\xff" + b"hello",
    ],
)
async def test_bytes_that_are_no_frame_are_refused(raw):
    async with mesh(2) as (a, b):
        faults = []

        async def handler(peer_stream):
            try:
                await peer_stream.receive()
            except MeshError as error:
                faults.append(error.code)
                raise

        a.handle("/bad/1", handler)
        a.handle(PROTOCOL, echo)
        bad = await b.open(a.peer, "/bad/1")
        with contextlib.suppress(MuxedStreamReset):  # it may be refused before all of it is written
            await bad._muxed.write(raw)
        with pytest.raises(MeshError) as fault:
            await bad.receive()
        assert fault.value.code == "unreachable"
        assert faults == ["bad_frame"]
        good = await b.open(a.peer, PROTOCOL)
        await good.send(b"still here")
        assert (await good.receive())[0] == b"still here"


@pytest.mark.parametrize("raw", [b"", b"\x00", (5).to_bytes(4, "big") + (1 << 20).to_bytes(4, "big") + b"hello"])
async def test_a_frame_that_ends_early_is_the_end(raw):
    async with mesh(2) as (a, b):
        faults = []

        async def handler(peer_stream):
            try:
                await peer_stream.receive()
            except MeshError as error:
                faults.append(error.code)

        a.handle(PROTOCOL, handler)
        peer_stream = await b.open(a.peer, PROTOCOL)
        if raw:
            await peer_stream._muxed.write(raw)
        peer_stream.finish_soon()
        await until(lambda: faults)
        assert faults == ["unreachable"]


async def test_a_frame_that_trickles_in_is_given_up(monkeypatch):
    monkeypatch.setattr(stream, "FRAME_LIMIT", 0.3)
    async with mesh(2) as (a, b):
        faults, whole = [], trio.Event()

        async def handler(peer_stream):
            await peer_stream.receive()  # a whole one may take as long to begin as it likes
            whole.set()
            try:
                await peer_stream.receive()
            except MeshError as error:
                faults.append(error.code)

        a.handle(PROTOCOL, handler)
        peer_stream = await b.open(a.peer, PROTOCOL)
        await trio.sleep(0.5)
        await peer_stream.send(b"whole")
        await whole.wait()
        start = time.monotonic()
        for byte in (100).to_bytes(4, "big") + bytes(4) + bytes(100):
            if faults:
                break
            try:
                await peer_stream._muxed.write(bytes([byte]))
            except Exception:
                break
            await trio.sleep(0.03)
        await until(lambda: faults, 1)
        assert faults == ["bad_frame"]
        assert 0.25 < time.monotonic() - start < 1


async def test_a_receiver_that_is_cancelled_loses_nothing():
    async with mesh(2) as (a, b):
        a.handle(PROTOCOL, echo)
        peer_stream = await b.open(a.peer, PROTOCOL)
        for i in range(50):
            with trio.move_on_after(0.001 * (i % 4)):
                await peer_stream.receive()
                pytest.fail("nothing was sent")
            await peer_stream.send(b"%d" % i)
            assert (await peer_stream.receive())[0] == b"%d" % i


async def test_a_protocol_that_nobody_serves_is_said():
    async with mesh(2) as (a, b):
        with pytest.raises(MeshError) as fault:
            await b.open(a.peer, "/none/1")
        assert fault.value.code == "unreachable"


# -- calls


async def test_a_call_is_answered():
    async with mesh(2) as (a, b):
        a.serve(PROTOCOL, answer)
        for size in (1, 1000, 500_000):
            got = await b.call(a.peer, PROTOCOL, bytes(size), timeout=5)
            assert got == b.peer[-4:].encode() + bytes(size)
        await until(lambda: not b._members.connections[a.peer][0].muxed_conn.streams)
        await until(lambda: not a._members.connections[b.peer][0].muxed_conn.streams)


async def test_many_calls_at_once_are_answered():
    async with mesh(2) as (a, b):
        a.serve(PROTOCOL, answer)
        got = []

        async def call(i):
            got.append(await b.call(a.peer, PROTOCOL, b"%d" % i, timeout=20))

        async with trio.open_nursery() as nursery:
            for i in range(300):  # more than a connection has streams
                nursery.start_soon(call, i)
        assert sorted(got) == sorted(b.peer[-4:].encode() + b"%d" % i for i in range(300))


async def test_a_call_that_is_refused_says_why():
    async with mesh(2) as (a, b):

        async def refuse(peer, request):
            raise MeshError("busy", "no session is free " + "x" * 3000)

        a.serve(PROTOCOL, refuse)
        refusal = decode(await b.call(a.peer, PROTOCOL, b"?", timeout=5), Refusal)
        assert refusal.code == "busy"
        assert refusal.say.startswith("no session is free")


async def test_a_server_that_fails_ends_its_call_only():
    async with mesh(2) as (a, b):

        async def fail(peer, request):
            if request == b"fail":
                raise RuntimeError("a fault of ours")
            return request

        a.serve(PROTOCOL, fail)
        with pytest.raises(MeshError) as fault:
            await b.call(a.peer, PROTOCOL, b"fail", timeout=5)
        assert fault.value.code == "unreachable"
        assert await b.call(a.peer, PROTOCOL, b"fine", timeout=5) == b"fine"


async def test_a_call_has_a_limit_and_its_server_hears_of_it():
    async with mesh(2) as (a, b):
        ended = []

        async def hang(peer, request):
            try:
                await trio.sleep_forever()
            finally:
                ended.append(request)

        a.serve(PROTOCOL, hang)
        with pytest.raises(MeshError) as fault:
            await b.call(a.peer, PROTOCOL, b"by time", timeout=0.2)
        assert fault.value.code == "deadline"
        await until(lambda: ended == [b"by time"], 1)
        with trio.move_on_after(0.2):
            await b.call(a.peer, PROTOCOL, b"by the caller", timeout=5)
        await until(lambda: ended[1:] == [b"by the caller"], 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_swallow, b.call(a.peer, PROTOCOL, b"by loss", timeout=5))
            await trio.sleep(0.1)
            await b._members.connections[a.peer][0].close()
        await until(lambda: ended[2:] == [b"by loss"], 1)


async def _swallow(awaitable) -> None:
    with pytest.raises(MeshError):
        await awaitable


async def test_an_answer_too_large_is_refused():
    async with mesh(2) as (a, b):
        a.serve(PROTOCOL, answer)
        with pytest.raises(MeshError) as fault:
            await b.call(a.peer, PROTOCOL, bytes(1000), timeout=5, max_response=100)
        assert fault.value.code == "bad_frame"


# -- connecting


async def test_tasks_that_connect_at_once_share_a_dial():
    async with mesh(1) as (a,), open_network(NodeKey.generate(), SECRET, listen=()) as b:
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(b.connect, a.peer, a.addresses)
        await b.connect(a.peer)
        assert len(b._members.swarm.get_connections()) == 1


async def test_who_gives_up_connecting_takes_nobody_along():
    async with mesh(1) as (a,), open_network(NodeKey.generate(), SECRET, listen=()) as b:
        async with trio.open_nursery() as nursery:
            with trio.move_on_after(0):
                await b.connect(a.peer, a.addresses)
            first = trio.CancelScope()

            async def impatient():
                with first:
                    await b.connect(a.peer, a.addresses)

            nursery.start_soon(impatient)
            nursery.start_soon(b.connect, a.peer, a.addresses)
            await trio.lowlevel.checkpoint()
            first.cancel()
        assert b.connected()


async def test_better_addresses_are_tried_after_a_dial_that_had_none(monkeypatch):
    monkeypatch.setattr(members, "CONNECT_LIMIT", 1.0)
    silent = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address = f"/ip4/127.0.0.1/tcp/{silent[0].socket.getsockname()[1]}"
    async with mesh(1) as (a,), open_network(NodeKey.generate(), SECRET, listen=()) as b:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_swallow_all, b.connect(a.peer, [address]))
            await trio.sleep(0.2)
            await b.connect(a.peer, a.addresses)
    await silent[0].aclose()


async def _swallow_all(awaitable) -> None:
    with contextlib.suppress(MeshError):
        await awaitable


async def test_two_that_dial_each_other_at_once_both_succeed():
    async with mesh(1) as (a,), open_network(NodeKey.generate(), SECRET, listen=LISTEN) as b:
        a.serve(PROTOCOL, answer)
        b.serve(PROTOCOL, answer)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.connect, b.peer, b.addresses)
            nursery.start_soon(b.connect, a.peer, a.addresses)
        assert await a.call(b.peer, PROTOCOL, b"1", timeout=5)
        assert await b.call(a.peer, PROTOCOL, b"1", timeout=5)
        assert len(a.connected()) == len(b.connected()) == 1


@pytest.mark.parametrize("addresses", [[], [NOWHERE], [NOWHERE, "/ip4/127.0.0.1/tcp/2"]])
async def test_a_peer_that_is_not_there_is_unreachable_at_once(addresses):
    async with mesh(1) as (a,):
        with trio.fail_after(1), pytest.raises(MeshError) as fault:
            await a.connect(NOBODY, addresses)
        assert fault.value.code == "unreachable"


async def test_a_port_that_never_answers_is_given_up(monkeypatch):
    monkeypatch.setattr(members, "CONNECT_LIMIT", 0.5)
    silent = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with mesh(1) as (a,):
        with trio.fail_after(1), pytest.raises(MeshError) as fault:
            await a.connect(NOBODY, [f"/ip4/127.0.0.1/tcp/{silent[0].socket.getsockname()[1]}"])
        assert fault.value.code == "unreachable"
    await silent[0].aclose()


async def test_another_peer_at_an_address_is_not_who_was_meant():
    async with mesh(2) as (a, b):
        with pytest.raises(MeshError) as fault:
            await b.connect(NOBODY, [a.addresses[0].split("/p2p/")[0]])
        assert fault.value.code == "unreachable"


@pytest.mark.parametrize("peer", ["", "nonsense", "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"])
async def test_what_is_no_peer_id_is_said(peer):
    async with mesh(1) as (a,):
        with pytest.raises(MeshError):
            await a.connect(peer)


async def test_connecting_to_oneself_is_refused():
    async with mesh(1) as (a,):
        with pytest.raises(MeshError):
            await a.connect(a.peer, a.addresses)


async def test_what_fails_inside_comes_out_as_it_was():
    with pytest.raises(KeyError):
        async with open_network(NodeKey.generate(), SECRET, listen=LISTEN):
            raise KeyError("ours")


async def test_a_peer_that_is_gone_is_not_looked_for_again_and_again(monkeypatch):
    monkeypatch.setattr(members, "GONE_S", 0.3)
    async with mesh(1) as (a,):
        looked = []

        async def locate(peer):
            looked.append(peer)

        a._members.locate = locate
        gone = NodeKey.generate()
        for _ in range(5):
            with pytest.raises(MeshError) as fault:
                await a.open(gone.peer, "/test/1")
            assert fault.value.code == "unreachable"
        assert looked == [gone.peer]
        await trio.sleep(0.35)
        with pytest.raises(MeshError):
            await a.open(gone.peer, "/test/1")
        assert len(looked) == 2
        async with open_network(gone, SECRET, listen=LISTEN) as back:
            await a.connect(back.peer, back.addresses)  # whoever knows an address tries it at once


async def test_bootstrap_goes_on_until_somebody_is_there(monkeypatch):
    monkeypatch.setattr(joining, "FIRST_RETRY", 0.05)
    key = NodeKey.generate()
    async with open_network(key, SECRET, listen=LISTEN) as first:
        address = first.addresses[0]
    async with open_network(NodeKey.generate(), SECRET, listen=LISTEN, bootstrap=[address]) as early:
        with pytest.raises(MeshError) as fault:
            await early.wait_joined()
        assert fault.value.code == "unreachable"
        async with open_network(key, SECRET, listen=[address.split("/p2p/")[0]]) as late:
            await until(lambda: early.connected() and late.connected())


async def test_coming_and_going_is_told_once():
    async with mesh(1) as (a,):
        events = []
        a.on_joined.append(lambda peer: events.append(("joined", peer)))
        a.on_lost.append(lambda peer: events.append(("lost", peer)))
        a.on_lost.append(lambda peer: 1 / 0)  # a fault of a callback harms nobody
        async with open_network(NodeKey.generate(), SECRET, listen=(), bootstrap=a.addresses) as b:
            await b.wait_joined()
            conn = await b._members.swarm.dial_addr(members.parse_address(a.addresses[0]), members.peer_id(a.peer))
            await b._members._introduce(conn)
            await until(lambda: len(a._members.connections[b.peer]) == 2)
            await conn.close()
            await trio.sleep(0.1)
            assert events == [("joined", b.peer)]
        await until(lambda: events == [("joined", b.peer), ("lost", b.peer)], 1)
        assert swarm.MAX_PER_PEER > 2


CHILD = """
import sys, trio
from meshnode.keys import NodeKey
from meshnode.mesh import Mesh
from meshnode.net import open_network

async def main(address, secret):
    async with open_network(NodeKey(bytes([9]) * 32), Mesh("test", bytes.fromhex(secret)), listen=(),
                            bootstrap=[address]) as network:
        await network.wait_joined()
        print("joined", flush=True)
        await trio.sleep_forever()

trio.run(main, *sys.argv[1:])
"""


async def test_a_killed_peer_is_noticed_at_once():
    async with mesh(1) as (a,):
        lost = []
        a.on_lost.append(lambda peer: lost.append(time.monotonic()))
        command = [sys.executable, "-c", CHILD, a.addresses[0], SECRET.secret.hex()]
        child = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE)
        try:
            with trio.fail_after(20):
                assert await child.stdout.receive_some(100)
            await until(a.connected)
            killed = time.monotonic()
            child.send_signal(signal.SIGKILL)
            await until(lambda: lost, 2)
            assert lost[0] - killed < 0.5
            assert not a.connected()
        finally:
            child.kill()
            await child.wait()
