"""Members on one LAN find each other by multicast DNS, as libp2p's mdns does; what it says is a hint, hello decides.

A node asks for `_p2p-<hash of the mesh id>._udp.local`, and who is of a mesh with that hash answers with its addresses:
neither the mesh's name nor its secret is in it. Everything here may come from anybody on the LAN.
"""

from __future__ import annotations

import hashlib
import logging
import random
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import trio

from ..errors import MeshError
from .members import peer_of_address

log = logging.getLogger(__name__)

GROUP, PORT = "224.0.0.251", 5353
MAX_PACKET = 9000  # bytes, RFC 6762
MAX_RECORDS = 64  # looked at in one packet
MAX_NAMES = 32  # labels of a name, so that pointers cannot go round
MAX_TOLD = 8  # addresses
TTL = 120  # s
ASK_S = (0.0, 1.0, 3.0)  # s after a start: a packet may be lost; then every ASK_LATER
ASK_LATER = 60.0
ANSWER_PAUSE = 1.0  # s between two answers: one reaches all who asked
ANSWER_DELAY = 0.1  # s, at most, by which nodes that were asked at once spread their answers
HEADER = struct.Struct(">6H")
PTR, TXT, IN = 12, 16, 1

Heard = Callable[[str, Sequence[str]], Awaitable[None]]


@dataclass(frozen=True)
class Packet:
    """What matters of one: the names asked for, and the texts of the answers, by name."""

    asked: tuple[str, ...] = ()
    texts: tuple[tuple[str, tuple[str, ...]], ...] = ()


def service(mesh_id: str) -> str:
    return f"_p2p-{hashlib.sha256(b'meshnode/1/mdns' + bytes(1) + mesh_id.encode()).hexdigest()[:16]}._udp.local"


def question(name: str) -> bytes:
    return HEADER.pack(0, 0, 1, 0, 0, 0) + _name(name) + struct.pack(">HH", PTR, IN)


def answer(name: str, addresses: Sequence[str]) -> bytes:
    """A pointer to an instance of the service, and its addresses as the instance's text."""
    instance = f"{secrets.token_hex(16)}.{name}"  # names nobody: the peer's id stands in the addresses
    texts = [f"dnsaddr={address}".encode() for address in addresses[:MAX_TOLD]]
    text = b"".join(bytes((len(t),)) + t for t in texts if len(t) < 256)
    head = HEADER.pack(0, 0x8400, 0, 1, 0, 1)
    return head + _record(name, PTR, _name(instance)) + _record(instance, TXT, text)


def parse(packet: bytes) -> Packet:
    """ValueError for what is no DNS packet."""
    try:
        _, flags, questions, answers, authorities, more = HEADER.unpack_from(packet)
        at, asked, texts = HEADER.size, [], []
        for _ in range(min(questions, MAX_RECORDS)):
            name, at = _read_name(packet, at)
            kind, _ = struct.unpack_from(">HH", packet, at)
            at += 4
            if kind == PTR and not flags & 0x8000:
                asked.append(name)
        for _ in range(min(answers + authorities + more, MAX_RECORDS)):
            name, at = _read_name(packet, at)
            kind, _, _, size = struct.unpack_from(">HHIH", packet, at)
            at += 10
            if kind == TXT and flags & 0x8000:
                texts.append((name, _read_texts(packet[at : at + size])))
            at += size
        return Packet(tuple(asked), tuple(texts))
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ValueError("no DNS packet") from error


def addresses_in(packet: Packet, name: str) -> dict[str, list[str]]:
    """The addresses told of peers by answers for a service."""
    found: dict[str, list[str]] = {}
    for instance, texts in packet.texts:
        if instance.lower().endswith("." + name):
            for text in texts[:MAX_TOLD]:
                key, _, address = text.partition("=")
                try:
                    if key == "dnsaddr":
                        found.setdefault(peer_of_address(address), []).append(address)
                except MeshError as error:
                    log.debug("mDNS: %s", error)
    return found


def _name(name: str) -> bytes:
    return b"".join(bytes((len(label),)) + label.encode() for label in name.split(".")) + b"\0"


def _record(name: str, kind: int, data: bytes) -> bytes:
    return _name(name) + struct.pack(">HHIH", kind, IN, TTL, len(data)) + data


def _read_name(packet: bytes, at: int) -> tuple[str, int]:
    """The name at a place, and the place after it."""
    labels: list[str] = []
    after = -1
    for _ in range(MAX_NAMES):
        size = packet[at]
        if size >= 0xC0:  # a pointer to a name that stands elsewhere
            after = at + 2 if after < 0 else after
            at = struct.unpack_from(">H", packet, at)[0] & 0x3FFF
        elif size:
            labels.append(packet[at + 1 : at + 1 + size].decode())
            at += 1 + size
        else:
            return ".".join(labels), at + 1 if after < 0 else after
    raise ValueError("a name without end")


def _read_texts(data: bytes) -> tuple[str, ...]:
    texts, at = [], 0
    while at < len(data):
        texts.append(data[at + 1 : at + 1 + data[at]].decode(errors="replace"))
        at += 1 + data[at]
    return tuple(texts)


def lan_hosts(addresses: Sequence[str]) -> list[str]:
    """The IPv4 addresses, of those that a node listens on, that have a LAN around them."""
    parts = [address.split("/") for address in addresses]
    hosts = [p[2] for p in parts if p[1] == "ip4" and not p[2].startswith(("127.", "0."))]
    return list(dict.fromkeys(hosts))


class Mdns:
    """addresses: gives this node's own, with /p2p/; heard: told of peers and where they say they listen."""

    def __init__(self, mesh_id: str, hosts: Sequence[str], addresses: Callable[[], list[str]], heard: Heard) -> None:
        self._service = service(mesh_id)
        self._hosts = hosts
        self._addresses = addresses
        self._heard = heard
        self._answered = -ANSWER_PAUSE

    async def run(self) -> None:
        """Until it is cancelled; returns when the LAN cannot be spoken to, which is logged."""
        try:
            sock = await _socket(self._hosts)
        except OSError as error:
            log.warning("members on this LAN are not looked for: %s", error)
            return
        with sock:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._ask, sock)
                while True:
                    try:
                        raw, sender = await sock.recvfrom(MAX_PACKET)
                        packet = parse(raw)
                    except OSError as error:  # what an interface that is gone says
                        log.info("mDNS: %s", error)
                        await trio.sleep(1)
                        continue
                    except ValueError:
                        continue
                    if self._service in (name.lower() for name in packet.asked):
                        self._answer_soon(sock, nursery)
                    for peer, addresses in addresses_in(packet, self._service).items():
                        log.debug("%s speaks of %s", sender, peer)
                        nursery.start_soon(self._heard, peer, addresses)

    async def _ask(self, sock: trio.socket.SocketType) -> None:
        before = 0.0
        for at in ASK_S:
            await trio.sleep(at - before)
            before = at
            await self._say(sock, question(self._service))
        while True:
            await trio.sleep(ASK_LATER * random.uniform(0.5, 1.0))
            await self._say(sock, question(self._service))

    def _answer_soon(self, sock: trio.socket.SocketType, nursery: trio.Nursery) -> None:
        now = trio.current_time()
        if now - self._answered >= ANSWER_PAUSE:
            self._answered = now
            nursery.start_soon(self._answer, sock)

    async def _answer(self, sock: trio.socket.SocketType) -> None:
        await trio.sleep(random.uniform(0.0, ANSWER_DELAY))
        addresses = [address for address in self._addresses() if address.split("/")[2] in self._hosts]
        await self._say(sock, answer(self._service, addresses))

    async def _say(self, sock: trio.socket.SocketType, packet: bytes) -> None:
        for host in self._hosts:
            try:
                sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(host))
                await sock.sendto(packet, (GROUP, PORT))
            except OSError as error:
                log.info("mDNS by %s: %s", host, error)


async def _socket(hosts: Sequence[str]) -> trio.socket.SocketType:
    """One that hears the group on each of the interfaces; others on this machine may have the port too."""
    sock = trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 255)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
        await sock.bind((GROUP, PORT))
        for host in hosts:
            request = socket.inet_aton(GROUP) + socket.inet_aton(host)
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, request)
    except BaseException:
        sock.close()
        raise
    return sock
