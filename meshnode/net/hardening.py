"""Below the muxer: sockets, the choice of protocols, and how a connection is secured.

Stock libp2p 0.8.1 is used through subclasses; nothing is patched in place. Faults that are cured here, each by a test
in tests/net/test_hardening.py (those of the muxer are in yamux.py, those of connections and dispatch in swarm.py):
- `read_exactly` gives up after 100 short reads, so a message that trickles in breaks its connection: read(n) of the
  socket gives n bytes or fails;
- writing to a socket that we closed succeeds silently: it fails;
- the listener shares its port with any other process that asks (SO_REUSEPORT), so that a taken port goes unnoticed;
- lines of the protocol choice have no bound, before anyone is authenticated: MAX_LINE, MAX_LINES;
- a muxer given by `muxer_opt` is ignored, plaintext and secio are on offer: the upgrader knows Noise and our Yamux.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

import trio
from libp2p.abc import IListener
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.x25519 import create_new_key_pair as new_x25519
from libp2p.io.exceptions import ConnectionClosedError, IOException
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.protocol_muxer.exceptions import MultiselectClientError, MultiselectError
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
from libp2p.transport.exceptions import OpenConnectionError
from libp2p.transport.tcp.tcp import TCP
from libp2p.transport.upgrader import TransportUpgrader
from libp2p.utils.multiaddr_utils import extract_ip_from_multiaddr, multiaddr_from_socket
from libp2p.utils.varint import encode_delim, read_varint_prefixed_bytes_limited
from multiaddr import Multiaddr

from .yamux import MeshYamux

READ_SIZE = 256 << 10  # bytes asked of a socket at once: several frames a system call
MAX_RAW_READ = 1 << 16  # a Noise message is at most 65,535 bytes; nothing below the muxer reads more
MAX_LINE = 1 << 10  # bytes of one line of the protocol choice
MAX_LINES = 8  # proposals before a choice is given up
MULTISTREAM = "/multistream/1.0.0"
NOT_AVAILABLE = "na"


# -- sockets


class BufferedTCPStream(TrioTCPStream):  # type: ignore[misc]
    """read(n) gives exactly n bytes, read() what there is; both fail once the connection has ended."""

    def __init__(self, stream: trio.SocketStream) -> None:
        super().__init__(stream)
        self._buffer = bytearray()

    async def read(self, n: int | None = None) -> bytes:
        if n is not None and n > MAX_RAW_READ:
            raise IOException(f"a message of {n} bytes")
        needed = 1 if n is None else n
        while len(self._buffer) < needed:
            try:
                data = await self.stream.receive_some(READ_SIZE)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise ConnectionClosedError(str(error), transport="tcp") from error
            if not data:
                raise ConnectionClosedError("closed by the peer", transport="tcp")
            self._buffer += data
        if n is None or n == len(self._buffer):
            taken = bytes(self._buffer)
            self._buffer.clear()
        else:
            with memoryview(self._buffer) as view:
                taken = bytes(view[:n])
            del self._buffer[:n]
        return taken

    async def write(self, data: bytes) -> None:
        try:
            await self.stream.send_all(data)  # no lock: the handshake's one task writes, then the muxer under its own
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError(str(error), transport="tcp") from error


class Listener(IListener):  # type: ignore[misc]
    """Accepts in the swarm's nursery, on ports of its own."""

    def __init__(self, nursery: trio.Nursery, handler: Callable[[BufferedTCPStream], Awaitable[None]]) -> None:
        self._nursery = nursery
        self._handler = handler
        self._scope = trio.CancelScope()
        self._listeners: Sequence[trio.SocketListener] = ()
        self._addresses: tuple[Multiaddr, ...] = ()

    async def listen(self, maddr: Multiaddr) -> None:
        host, port = _host_of(maddr), int(maddr.value_for_protocol("tcp") or 0)
        if host is None:  # which would mean every address of the machine
            raise OSError(f"{maddr} names no host")
        self._listeners = await trio.open_tcp_listeners(port, host=host)
        self._addresses = tuple(multiaddr_from_socket(listener.socket) for listener in self._listeners)
        self._nursery.start_soon(self._serve)

    async def _serve(self) -> None:
        with self._scope:
            await trio.serve_listeners(self._accept, self._listeners)

    async def _accept(self, stream: trio.SocketStream) -> None:
        await self._handler(BufferedTCPStream(stream))

    def get_addrs(self) -> tuple[Multiaddr, ...]:
        return self._addresses

    async def close(self) -> None:
        self._scope.cancel()
        for listener in self._listeners:
            listener.socket.close()


def _host_of(maddr: Multiaddr) -> str | None:
    """The IP address or the name before the port."""
    host: str | None = extract_ip_from_multiaddr(maddr)
    first = next(iter(maddr.protocols()), None)
    if host is None and first is not None and first.name in ("dns", "dns4", "dns6"):
        host = maddr.value_for_protocol(first.code)
    return host


class MeshTCP(TCP):  # type: ignore[misc]
    async def _dial_resolved(self, maddr: Multiaddr, source: tuple[str, int] | None = None) -> RawConnection:
        host, port = _host_of(maddr), maddr.value_for_protocol("tcp")
        if host is None or port is None:
            raise OpenConnectionError(f"{maddr} is no TCP address")
        try:
            stream = await trio.open_tcp_stream(host, int(port))
        except OSError as error:
            raise OpenConnectionError(f"{maddr}: {error}") from error
        return RawConnection(BufferedTCPStream(stream), True)


# -- the choice of a protocol (multistream-select)


async def _read_line(stream: Any) -> str:
    try:
        raw = await read_varint_prefixed_bytes_limited(stream, MAX_LINE)
        if not raw.endswith(b"\n"):
            raise ValueError("a line without an end")
        return str(raw[:-1], "utf-8")
    except Exception as error:
        raise MultiselectError(f"no line of a protocol choice: {error!r}") from error


async def propose(stream: Any, protocol: str, first: bytes = b"") -> None:
    """Asks for one protocol, in one round trip; MultiselectClientError when the other side does not have it.

    first: what is said in it, sent without waiting for the answer.
    """
    try:
        await stream.write(encode_delim(MULTISTREAM.encode()) + encode_delim(protocol.encode()) + first)
        greeting, answer = await _read_line(stream), await _read_line(stream)
    except MultiselectError as error:
        raise MultiselectClientError(str(error)) from error
    if greeting != MULTISTREAM or answer != protocol:
        raise MultiselectClientError(f"{protocol} was answered by {answer[:80]!r}")


async def choose(stream: Any, offered: Callable[[str], Awaitable[bool]], listed: Callable[[], Collection[str]]) -> str:
    """Answers proposals until `offered` agrees to one. MultiselectError after MAX_LINES."""
    await stream.write(encode_delim(MULTISTREAM.encode()))
    if await _read_line(stream) != MULTISTREAM:
        raise MultiselectError("no multistream-select")
    for _ in range(MAX_LINES):
        wanted = await _read_line(stream)
        answer = wanted if wanted != "ls" and await offered(wanted) else NOT_AVAILABLE
        if wanted == "ls":
            answer = "\n".join(listed()) + "\n"
        await stream.write(encode_delim(answer.encode()))
        if answer == wanted:
            return wanted
    raise MultiselectError("too many proposals")


async def _agree(conn: Any, protocol: str) -> None:
    if conn.is_initiator:
        await propose(conn, protocol)
        return

    async def offered(wanted: str) -> bool:
        return wanted == protocol

    await choose(conn, offered, lambda: (protocol,))


class MeshUpgrader(TransportUpgrader):  # type: ignore[misc]
    """A raw connection becomes a Noise session, that a MeshYamux; nothing else is on offer."""

    def __init__(self, key_pair: KeyPair) -> None:
        noise = NoiseTransport(key_pair, noise_privkey=new_x25519().private_key)
        super().__init__({NOISE: noise}, {YAMUX: MeshYamux})
        self._noise = noise

    async def upgrade_security(self, raw_conn: Any, is_initiator: bool, peer_id: ID | None = None) -> Any:
        await _agree(raw_conn, NOISE)
        if not is_initiator:
            return await self._noise.secure_inbound(raw_conn)
        assert peer_id is not None
        return await self._noise.secure_outbound(raw_conn, peer_id)  # fails unless the peer proves to be peer_id

    async def upgrade_connection(self, conn: Any, peer_id: ID) -> MeshYamux:
        await _agree(conn, YAMUX)
        return MeshYamux(conn, peer_id, is_initiator=conn.is_initiator)
