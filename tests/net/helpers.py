"""Small meshes in one process, and muxers whose peer is the test."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import trio
import trio.testing
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID

from meshnode.keys import NodeKey
from meshnode.mesh import Mesh
from meshnode.net import Network, open_network
from meshnode.net.hardening import BufferedTCPStream
from meshnode.net.swarm import MeshConn

LISTEN = ("/ip4/127.0.0.1/tcp/0",)
SECRET = Mesh("test", bytes(range(32)))
HEADER = struct.Struct(">BBHII")
DATA, WINDOW, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8
PEER = ID.from_pubkey(create_new_key_pair(bytes(32)).public_key)


@asynccontextmanager
async def mesh(size: int, membership: Mesh = SECRET) -> AsyncIterator[list[Network]]:
    """The first is everybody's bootstrap peer."""
    async with AsyncExitStack() as stack:
        nodes: list[Network] = []
        for _ in range(size):
            bootstrap = nodes[0].addresses if nodes else ()
            network = open_network(NodeKey.generate(), membership, listen=LISTEN, bootstrap=bootstrap)
            nodes.append(await stack.enter_async_context(network))
        for node in nodes[1:]:
            await node.wait_joined()
        yield nodes


async def until(condition: Callable[[], object], within: float = 5.0) -> None:
    with trio.fail_after(within):
        while not condition():
            await trio.sleep(0.01)


async def until_async(condition: Callable[[], Awaitable[object]], within: float = 5.0) -> None:
    with trio.fail_after(within):
        while not await condition():
            await trio.sleep(0.02)


def port_of(network: Network) -> int:
    return int(network.addresses[0].split("/")[4])


async def stranger(network: Network, to: Network) -> MeshConn:
    """A connection with Noise and Yamux on which `network` has not said hello."""
    from multiaddr import Multiaddr

    address = Multiaddr(to.addresses[0])
    return await network._members.swarm.dial_addr(address, ID.from_base58(to.peer))


class Secured(BufferedTCPStream):
    """Stands for a secured connection."""

    is_initiator = True


def frame(kind: int, flags: int, stream: int, length: int = 0, body: bytes = b"") -> bytes:
    return HEADER.pack(0, kind, flags, stream, length or len(body)) + body


class RawPeer:
    """The other side of a muxer, frame by frame."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self._buffer = b""

    async def send(self, *frames: bytes) -> None:
        await self.stream.send_all(b"".join(frames))

    async def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            data = await self.stream.receive_some(1 << 16)
            if not data:
                raise EOFError
            self._buffer += data
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken

    async def frame(self) -> tuple[int, int, int, int, bytes]:
        """(type, flags, stream, length, body)"""
        version, kind, flags, stream, length = HEADER.unpack(await self._exactly(HEADER.size))
        assert version == 0
        assert kind <= GO_AWAY, "not a frame: the bytes before it were cut"
        return kind, flags, stream, length, await self._exactly(length) if kind == DATA else b""

    async def next(self, kind: int, flags: int | None = None) -> tuple[int, int, int, int, bytes]:
        """The next frame of a kind, with these flags; others, such as pings, are skipped."""
        while True:
            found = await self.frame()
            if found[0] == kind and (flags is None or found[1] == flags):
                return found

    async def closed(self) -> bool:
        try:
            while await self.stream.receive_some(1 << 16):
                pass
        except trio.BrokenResourceError:
            pass
        return True


@asynccontextmanager
async def muxer(cls: type, streams: tuple | None = None) -> AsyncIterator[tuple[object, RawPeer]]:
    """A running muxer of a class, and its raw peer."""
    near, far = streams or trio.testing.memory_stream_pair()
    muxed = cls(Secured(near), PEER, is_initiator=True)
    if hasattr(muxed, "trusted"):
        muxed.trusted = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(muxed.start)
        await muxed.event_started.wait()
        yield muxed, RawPeer(far)
        nursery.cancel_scope.cancel()


async def socket_pair(send_buffer: int = 4096) -> tuple[trio.SocketStream, trio.SocketStream]:
    a, b = trio.socket.socketpair()
    for sock in (a, b):
        sock.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_SNDBUF, send_buffer)
    return _plain(a), _plain(b)


def _plain(sock: trio.socket.SocketType) -> trio.SocketStream:
    return trio.SocketStream(sock)
