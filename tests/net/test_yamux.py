"""Each test of a cure runs against the stock muxer too, and has to fail there: once it passes, the cure can go."""

from __future__ import annotations

import math

import pytest
import trio
import trio.testing
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamError, MuxedStreamReset
from libp2p.stream_muxer.yamux.yamux import Yamux

from meshnode.net import yamux, yamux_stream
from meshnode.net.yamux import MeshYamux

from .helpers import ACK, DATA, FIN, PING, RST, SYN, WINDOW, frame, muxer, socket_pair, until

BOTH = pytest.mark.parametrize(
    "cls", [MeshYamux, pytest.param(Yamux, id="stock", marks=pytest.mark.xfail(strict=True))]
)
WINDOW_SIZE = 256 << 10


@BOTH
async def test_a_peer_that_ignores_the_window_is_cut_off(cls):
    async with muxer(cls) as (muxed, peer):
        await peer.send(frame(WINDOW, SYN, 2))
        await muxed.accept_stream()
        for _ in range(5):
            await peer.send(frame(DATA, 0, 2, body=bytes(WINDOW_SIZE // 4)))
        await trio.testing.wait_all_tasks_blocked()
        assert muxed.is_closed


async def test_a_peer_may_fill_the_window_to_the_last_byte():
    async with muxer(MeshYamux) as (muxed, peer):
        await peer.send(frame(WINDOW, SYN, 2))
        stream = await muxed.accept_stream()
        for _ in range(4):
            await peer.send(frame(DATA, 0, 2, body=bytes(WINDOW_SIZE // 4)))
        await trio.testing.wait_all_tasks_blocked()
        assert len(await stream.read()) == WINDOW_SIZE
        assert not muxed.is_closed


@BOTH
async def test_a_cancelled_write_leaves_no_half_frame(cls):
    async with muxer(cls, await socket_pair()) as (muxed, peer):
        first, second = await muxed.open_stream(), await muxed.open_stream()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first.write, bytes(200_000))
            await trio.sleep(0.05)  # the socket is full, in the middle of a frame
            nursery.cancel_scope.cancel()

            async def read_all():
                with trio.fail_after(3):
                    while True:
                        found = await peer.next(DATA)
                        if found[2] == second.stream_id:
                            return found[4]

            with trio.CancelScope(shield=True):
                async with trio.open_nursery() as shielded:
                    shielded.start_soon(second.write, b"whole")
                    assert await read_all() == b"whole"


@BOTH
async def test_a_stream_closed_in_a_cancelled_task_is_closed(cls):
    async with muxer(cls) as (muxed, peer):
        stream = await muxed.open_stream()
        with trio.CancelScope() as scope:
            scope.cancel()
            await stream.close()
        with trio.fail_after(1):
            assert (await peer.next(WINDOW, FIN))[2] == stream.stream_id


@BOTH
async def test_a_stream_reset_in_a_cancelled_task_is_reset(cls):
    async with muxer(cls) as (muxed, peer):
        stream = await muxed.open_stream()
        with trio.CancelScope() as scope:
            scope.cancel()
            await stream.reset()
        with trio.fail_after(1):
            assert (await peer.next(WINDOW, RST))[2] == stream.stream_id


@BOTH
async def test_a_frozen_peer_is_noticed_within_ten_seconds(cls, autojump_clock):
    async with muxer(cls) as (muxed, _):
        stream = await muxed.open_stream()
        with trio.fail_after(10):
            with pytest.raises(MuxedStreamError):
                await stream.read()
        await trio.testing.wait_all_tasks_blocked()
        assert muxed.is_closed


async def test_a_peer_that_answers_pings_is_kept(autojump_clock):
    async with muxer(MeshYamux) as (muxed, peer), trio.open_nursery() as nursery:

        async def answer():
            while True:
                _, _, _, value, _ = await peer.next(PING, SYN)
                await trio.sleep(0.5)
                await peer.send(frame(PING, ACK, 0, value))

        nursery.start_soon(answer)
        await trio.sleep(100)
        assert not muxed.is_closed
        assert math.isclose(muxed.rtt(), 0.5)
        nursery.cancel_scope.cancel()


async def test_a_node_that_stood_still_itself_lets_its_peers_speak_first(mock_clock):
    async with muxer(MeshYamux) as (muxed, _):
        mock_clock.jump(100)  # one ping, and then nothing ran for long
        await trio.testing.wait_all_tasks_blocked()
        assert not muxed.is_closed
        for _ in range(5):
            mock_clock.jump(yamux.PING_INTERVAL)
            await trio.testing.wait_all_tasks_blocked()
        assert muxed.is_closed


@BOTH
async def test_streams_that_a_peer_opens_are_counted(cls):
    async with muxer(cls) as (muxed, peer), trio.open_nursery() as nursery:

        async def accept():
            while True:
                await muxed.accept_stream()

        nursery.start_soon(accept)
        await peer.send(*(frame(WINDOW, SYN, 2 + 2 * i) for i in range(yamux.MAX_STREAMS + 50)))
        await trio.testing.wait_all_tasks_blocked()
        assert len(muxed.streams) <= yamux.MAX_STREAMS
        with trio.fail_after(1):
            assert (await peer.next(WINDOW, RST))[2] == 2 + 2 * yamux.MAX_STREAMS
        nursery.cancel_scope.cancel()


async def test_a_finished_stream_makes_room_for_another():
    async with muxer(MeshYamux) as (muxed, peer):
        for i in range(2 * yamux.MAX_STREAMS):
            await peer.send(frame(WINDOW, SYN | FIN, 2 + 2 * i))
            await (await muxed.accept_stream()).close()
        assert not muxed.streams
        assert not muxed.is_closed


async def test_a_stranger_has_few_streams_and_little_room():
    async with muxer(MeshYamux) as (muxed, peer):
        muxed.trusted = False
        await peer.send(*(frame(WINDOW, SYN, 2 + 2 * i) for i in range(20)))
        await trio.testing.wait_all_tasks_blocked()
        assert len(muxed.streams) == yamux.PENDING_STREAMS
        await peer.send(*(frame(DATA, 0, 2 + 2 * i, body=bytes(10_000)) for i in range(7)))
        await trio.testing.wait_all_tasks_blocked()
        assert muxed.is_closed


@BOTH
async def test_what_came_before_the_end_can_be_read(cls):
    async with muxer(cls) as (muxed, peer):
        await peer.send(frame(WINDOW, SYN, 2), frame(DATA, 0, 2, body=b"last words"))
        stream = await muxed.accept_stream()
        await peer.stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert await stream.read(100) == b"last words"
        with pytest.raises(MuxedStreamEOF):
            await stream.read(100)


@BOTH
async def test_credit_is_given_back_lazily(cls):
    async with muxer(cls) as (muxed, peer):
        await peer.send(frame(WINDOW, SYN, 2))
        stream = await muxed.accept_stream()
        for _ in range(50):
            await peer.send(frame(DATA, 0, 2, body=b"x" * 100))
            await stream.read(100)
        await stream.close()
        updates = 0
        with trio.fail_after(2):
            while (found := await peer.frame())[1] != FIN:
                updates += found[0] == WINDOW and found[1] == 0
        assert updates == 0


async def test_a_window_that_is_used_grows_within_the_budget(monkeypatch):
    monkeypatch.setattr(yamux, "WINDOW_BUDGET", 20 << 20)
    async with muxer(MeshYamux) as (muxed, peer):
        streams = []
        for stream_id, gain in ((2, (16 << 20) - WINDOW_SIZE), (4, (4 << 20) + WINDOW_SIZE), (6, 0)):
            await peer.send(frame(WINDOW, SYN, stream_id))
            streams.append(await muxed.accept_stream())
            await peer.send(frame(DATA, 0, stream_id, body=bytes(WINDOW_SIZE)))
            await trio.testing.wait_all_tasks_blocked()
            await streams[-1].read()
            assert (await peer.next(WINDOW, 0))[3] == WINDOW_SIZE + gain
        await streams[0].reset()
        assert muxed.window_budget == (16 << 20) - WINDOW_SIZE


@BOTH
async def test_a_write_waits_for_credit_as_long_as_the_peer_lives(cls, autojump_clock):
    async with muxer(cls) as (muxed, peer), trio.open_nursery() as nursery:
        stream = await muxed.open_stream()

        async def read_and_give():
            got = 0
            while got < WINDOW_SIZE:
                kind, flags, _, value, body = await peer.frame()
                got += len(body)
                if kind == PING and flags == SYN:
                    await peer.send(frame(PING, ACK, 0, value))
            for _ in range(20):
                await trio.sleep(1)
                await peer.send(frame(PING, SYN, 0, 1))
            await peer.send(frame(WINDOW, 0, stream.stream_id, 1))

        nursery.start_soon(read_and_give)
        await stream.write(bytes(WINDOW_SIZE + 1))


async def test_a_write_without_credit_ends_in_time(autojump_clock):
    async with muxer(MeshYamux) as (muxed, peer), trio.open_nursery() as nursery:

        async def only_ping():
            while True:
                await trio.sleep(1)
                await peer.send(frame(PING, SYN, 0, 1))

        nursery.start_soon(only_ping)
        stream = await muxed.open_stream()
        with trio.fail_after(yamux_stream.CREDIT_LIMIT + 1):
            with pytest.raises(MuxedStreamError, match="credit"):
                await stream.write(bytes(WINDOW_SIZE + 1))
        assert not muxed.is_closed
        nursery.cancel_scope.cancel()


async def test_a_peer_that_takes_no_bytes_is_given_up(monkeypatch):
    monkeypatch.setattr(yamux, "FRAME_WRITE_LIMIT", 0.2)
    monkeypatch.setattr(yamux, "PING_INTERVAL", 0.1)
    monkeypatch.setattr(yamux, "DEAD_AFTER", math.inf)
    async with muxer(MeshYamux, await socket_pair()) as (muxed, _):
        stream = await muxed.open_stream()
        with trio.fail_after(2):
            with pytest.raises(Exception, match="closed"):
                await stream.write(bytes(100_000))
            await until(lambda: muxed.is_closed)


async def test_a_peer_that_asks_without_reading_is_cut_off():
    async with muxer(MeshYamux, await socket_pair()) as (muxed, peer):

        async def flood():
            while True:
                await peer.send(frame(PING, SYN, 0, 1) * 1000)

        with trio.fail_after(3), pytest.raises(trio.BrokenResourceError):
            await flood()
        await until(lambda: muxed.is_closed, 1)


@pytest.mark.parametrize(
    "bad",
    [
        b"\x01" + bytes(11),  # another version
        frame(7, 0, 0),  # no such frame
        frame(WINDOW, SYN, 3),  # an id of our own kind
        frame(WINDOW, SYN, 4) + frame(WINDOW, SYN, 2),  # backwards
        frame(DATA, SYN, 2, length=(1 << 32) - 1),
    ],
)
async def test_broken_frames_end_the_connection(bad):
    async with muxer(MeshYamux) as (muxed, peer):
        await peer.send(bad)
        await trio.testing.wait_all_tasks_blocked()
        assert muxed.is_closed


async def test_frames_may_be_cut_anywhere():
    async with muxer(MeshYamux) as (muxed, peer):
        raw = b"".join(
            [
                frame(DATA, SYN, 2, body=b"one"),
                frame(PING, SYN, 0, 7),
                frame(DATA, 0, 2, body=b"two"),
                frame(DATA, 0, 98, body=b"to a stream that is gone"),
                frame(DATA, FIN, 2, body=b"three"),
            ]
        )
        for i in range(len(raw)):
            await peer.send(raw[i : i + 1])
            await trio.testing.wait_all_tasks_blocked()
        stream = await muxed.accept_stream()
        assert await stream.read() == b"onetwothree"
        with pytest.raises(MuxedStreamEOF):
            await stream.read()
        assert (await peer.next(PING, ACK))[3] == 7


async def test_a_reset_drops_what_was_not_read():
    async with muxer(MeshYamux) as (muxed, peer):
        await peer.send(frame(DATA, SYN, 2, body=b"never mind"), frame(WINDOW, RST, 2))
        stream = await muxed.accept_stream()
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(MuxedStreamReset):
            await stream.read()
        with pytest.raises(MuxedStreamReset):
            await stream.write(b"x")
        assert not muxed.streams


async def test_a_half_that_never_closes_is_swept(autojump_clock):
    async with muxer(MeshYamux) as (muxed, peer), trio.open_nursery() as nursery:

        async def live():
            while True:
                await trio.sleep(1)
                await peer.send(frame(PING, SYN, 0, 1))

        nursery.start_soon(live)
        stream = await muxed.open_stream()
        await stream.close()
        assert muxed.streams
        await trio.sleep(yamux.CLOSE_GRACE + 31)
        assert not muxed.streams
        nursery.cancel_scope.cancel()
