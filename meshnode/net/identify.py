"""libp2p's identify: between members their addresses and protocols; to anyone else a key and two protocol names.

Cures of stock libp2p 0.8.1: identify tells whoever connects every address and protocol; its answer may be 1 MiB with
1,000 addresses; it runs in tasks that nobody owns.
"""

from __future__ import annotations

from collections.abc import Iterable

import trio
from libp2p.abc import INetStream
from libp2p.exceptions import BaseLibp2pError
from libp2p.identity.identify.identify import _mk_identify_protobuf
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore, PeerStoreError
from libp2p.utils.varint import encode_uvarint, read_varint_prefixed_bytes_limited
from multiaddr import Multiaddr

from ..errors import MeshError
from .swarm import IDENTIFY, MeshConn, MeshHost

MAX_ANSWER = 16 << 10  # bytes
MAX_ADDRESSES = 8  # that are kept of a peer
ADDRESS_TTL = 7200  # s, libp2p's own; connected peers say their addresses anew
IDENTIFY_LIMIT = 5.0  # s


async def answer(host: MeshHost, stream: INetStream) -> None:
    conn: MeshConn = stream.swarm_conn
    message = _mk_identify_protobuf(host, None)
    message.agent_version = "meshnode"
    del message.protocols[:]
    message.protocols.extend(host.visible_protocols(conn))
    if not conn.member:
        message.ClearField("listen_addrs")
        message.ClearField("signedPeerRecord")
    raw = message.SerializeToString()
    await stream.muxed_stream.write(encode_uvarint(len(raw)) + raw)


async def ask(host: MeshHost, conn: MeshConn) -> None:
    """Keeps the addresses that a member says it listens on."""
    message = Identify()
    try:
        with trio.fail_after(IDENTIFY_LIMIT):
            stream = await host.open_on(conn, IDENTIFY)
            try:
                raw = await read_varint_prefixed_bytes_limited(stream.muxed_stream, MAX_ANSWER)
            finally:
                stream.muxed_stream.close_now()
                conn.remove_stream(stream)
        message.ParseFromString(raw)
    except (BaseLibp2pError, OSError, trio.TooSlowError, ValueError) as error:
        raise MeshError("unreachable", f"{conn.peer} does not say who it is: {error!r}") from error
    peer = ID.from_base58(conn.peer)
    host.get_peerstore().clear_addrs(peer)
    proven = [] if conn.inbound else [Multiaddr(conn.address).to_bytes()]  # it may not know the address that works
    remember(host.get_peerstore(), peer, [*proven, *message.listen_addrs])


def remember(peerstore: PeerStore, peer: ID, raw_addresses: Iterable[bytes]) -> None:
    """Adds up to MAX_ADDRESSES TCP addresses of a peer to the address book."""
    known = known_addresses(peerstore, peer)
    for raw in raw_addresses:
        try:
            address = Multiaddr(raw)
            names = [protocol.name for protocol in address.protocols()]
        except Exception:  # noqa: S112 - the library raises whatever the bytes lead it to; it is no address then
            continue
        if names[:2] in (["ip4", "tcp"], ["ip6", "tcp"], ["dns4", "tcp"], ["dns6", "tcp"], ["dns", "tcp"]) and (
            names[2:] in ([], ["p2p"])
        ):
            bare = _bare(address)
            if bare not in known and len(known) < MAX_ADDRESSES:
                known.append(bare)
    if known:
        peerstore.add_addrs(peer, known, ADDRESS_TTL)


def known_addresses(peerstore: PeerStore, peer: ID) -> list[Multiaddr]:
    """Without their /p2p/ part."""
    try:
        return [_bare(address) for address in peerstore.addrs(peer)]
    except PeerStoreError:
        return []


def _bare(address: Multiaddr) -> Multiaddr:
    try:
        peer = address.value_for_protocol("p2p")
    except Exception:  # the library's own name for "has none" is private
        return address
    return address.decapsulate(Multiaddr(f"/p2p/{peer}"))
