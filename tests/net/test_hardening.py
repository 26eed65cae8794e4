"""Each test of a cure runs against the stock library too, and has to fail there: once it passes, the cure can go."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.io.exceptions import ConnectionClosedError, IOException
from libp2p.io.trio import TrioTCPStream
from libp2p.io.utils import read_exactly
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.protocol_muxer.exceptions import MultiselectClientError, MultiselectError
from libp2p.protocol_muxer.multiselect import Multiselect
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
from libp2p.transport.tcp.tcp import TCPListener
from libp2p.transport.upgrader import TransportUpgrader
from libp2p.utils.varint import encode_delim, encode_uvarint
from multiaddr import Multiaddr

from meshnode.net import hardening
from meshnode.net.hardening import BufferedTCPStream, Listener, MeshTCP, MeshUpgrader, choose, propose
from meshnode.net.yamux import MeshYamux

LOCAL = Multiaddr("/ip4/127.0.0.1/tcp/0")


def both(ours, stock):
    return pytest.mark.parametrize(
        "what", [ours, pytest.param(stock, id="stock", marks=pytest.mark.xfail(strict=True))]
    )


@both(BufferedTCPStream, TrioTCPStream)
async def test_a_message_may_trickle_in(what):
    near, far = trio.testing.lockstep_stream_pair()
    async with trio.open_nursery() as nursery:

        async def trickle():
            for _ in range(400):
                await far.send_all(b"x")

        nursery.start_soon(trickle)
        assert await read_exactly(what(near), 400) == b"x" * 400


@both(BufferedTCPStream, TrioTCPStream)
async def test_writing_to_a_closed_socket_fails(what):
    near, _ = trio.testing.memory_stream_pair()
    stream = what(near)
    await stream.close()
    with pytest.raises(ConnectionClosedError):
        await stream.write(b"lost")


async def test_reads_are_exact_bounded_and_fail_at_the_end():
    near, far = trio.testing.memory_stream_pair()
    stream = BufferedTCPStream(near)
    await far.send_all(b"abcdef")
    assert await stream.read(2) == b"ab"
    assert await stream.read() == b"cdef"
    with pytest.raises(IOException):
        await stream.read(hardening.MAX_RAW_READ + 1)
    await far.send_all(b"gh")
    await far.aclose()
    with pytest.raises(ConnectionClosedError):
        await stream.read(3)


async def _listen_with_ours(port, nursery):
    async def handler(stream): ...

    listener = Listener(nursery, handler)
    await listener.listen(Multiaddr(f"/ip4/127.0.0.1/tcp/{port}"))
    return listener


async def _listen_with_stock(port, nursery):
    async def handler(stream): ...

    listener = TCPListener(handler)
    await listener.listen(Multiaddr(f"/ip4/127.0.0.1/tcp/{port}"))
    return listener


@both(_listen_with_ours, _listen_with_stock)
async def test_a_taken_port_is_noticed(what):
    async with trio.open_nursery() as nursery:
        first = await what(0, nursery)
        second = None
        try:
            with pytest.raises(OSError, match="in use"):
                second = await what(first.get_addrs()[0].value_for_protocol("tcp"), nursery)
        finally:
            await first.close()
            if second is not None:
                await second.close()


class Counting:
    """A stream of which it is known how much was taken."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.taken = 0

    async def read(self, n: int) -> bytes:
        part = self.data[self.taken : self.taken + n]
        self.taken += len(part)
        return part

    async def write(self, data: bytes) -> None: ...


async def _choose(stream):
    async def offered(_):
        return False

    await choose(stream, offered, lambda: ())


async def _negotiate(stream):
    await Multiselect({NOISE: None}).negotiate(MultiselectCommunicator(stream))


@both(_choose, _negotiate)
async def test_a_line_without_bound_is_refused_unread(what):
    stream = Counting(encode_uvarint(30 << 20) + bytes(30 << 20))
    with pytest.raises(MultiselectError):
        await what(stream)
    assert stream.taken < 2048


@both(_choose, _negotiate)
async def test_proposals_end(what):
    stream = Counting(encode_delim(b"/multistream/1.0.0") + encode_delim(b"/nonsense") * 1000)
    with pytest.raises(MultiselectError):
        await what(stream)
    assert stream.taken < 2048


@both(_choose, _negotiate)
async def test_a_line_that_is_no_text_is_refused(what):
    with pytest.raises(MultiselectError):
        await what(Counting(encode_delim(b"\xff\xfe")))


async def _pair():
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    raw = await MeshTCP().dial(Multiaddr(f"/ip4/127.0.0.1/tcp/{port}"))
    accepted = await listeners[0].accept()
    await listeners[0].aclose()
    return raw, RawConnection(BufferedTCPStream(accepted), False)


def _mesh_upgrader(pair):
    return MeshUpgrader(pair)


def _stock_upgrader(pair):
    noise = NoiseTransport(pair, noise_privkey=hardening.new_x25519().private_key)
    return TransportUpgrader({NOISE: noise}, {YAMUX: MeshYamux})


@both(_mesh_upgrader, _stock_upgrader)
async def test_our_muxer_is_the_one_that_is_used(what):
    ours, theirs = create_new_key_pair(bytes(32)), create_new_key_pair(bytes([1]) * 32)
    raw, accepted = await _pair()
    made = []

    async def upgrade(upgrader, conn, peer):
        secured = await upgrader.upgrade_security(conn, peer is not None, peer)
        made.append(await upgrader.upgrade_connection(secured, secured.get_remote_peer()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(upgrade, what(ours), raw, ID.from_pubkey(theirs.public_key))
        nursery.start_soon(upgrade, what(theirs), accepted, None)
    assert {type(m) for m in made} == {MeshYamux}
    for muxed in made:
        await muxed.close()


@pytest.mark.parametrize("protocol", ["/plaintext/2.0.0", "/secio/1.0.0", "/tls/1.0.0"])
async def test_only_noise_is_on_offer(protocol):
    raw, accepted = await _pair()
    upgrader = MeshUpgrader(create_new_key_pair(bytes(32)))
    async with trio.open_nursery() as nursery:

        async def upgrade():
            with pytest.raises(MultiselectError):
                await upgrader.upgrade_security(accepted, False)

        nursery.start_soon(upgrade)
        with pytest.raises(MultiselectClientError, match="'na'"):
            await propose(raw, protocol)
        await raw.close()
    await accepted.close()


async def test_another_key_than_the_one_dialled_is_refused():
    raw, accepted = await _pair()
    ours, theirs, other = (create_new_key_pair(bytes([i]) * 32) for i in range(3))
    async with trio.open_nursery() as nursery:

        async def serve():
            with trio.move_on_after(2):
                await MeshUpgrader(theirs).upgrade_security(accepted, False)

        nursery.start_soon(serve)
        with pytest.raises(Exception, match="peer id does not correspond"):
            await MeshUpgrader(ours).upgrade_security(raw, True, ID.from_pubkey(other.public_key))
        nursery.cancel_scope.cancel()
    await raw.close()
    await accepted.close()


async def test_small_messages_do_not_wait_for_more():
    raw, accepted = await _pair()
    for conn in (raw, accepted):
        assert conn.stream.stream.getsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NODELAY)
        await conn.close()
