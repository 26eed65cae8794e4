"""Finding members on a LAN, of which the loopback interface stands for one."""

from __future__ import annotations

import random
import socket

import pytest
import trio

from meshnode.keys import NodeKey
from meshnode.mesh import Mesh
from meshnode.net import mdns, open_network

from .helpers import LISTEN, SECRET, until

PEER = NodeKey(bytes(32)).peer
ADDRESS = f"/ip4/192.0.2.7/tcp/4001/p2p/{PEER}"
NAME = mdns.service("mesh")


@pytest.fixture
def lan(monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.1 is a LAN, with a port that nothing else on this machine speaks on."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setattr(mdns, "PORT", probe.getsockname()[1])
    monkeypatch.setattr(mdns, "lan_hosts", lambda _: ["127.0.0.1"])


def test_a_question_and_an_answer_are_what_they_say() -> None:
    assert mdns.parse(mdns.question(NAME)).asked == (NAME,)
    packet = mdns.parse(mdns.answer(NAME, [ADDRESS]))
    assert packet.asked == ()
    assert mdns.addresses_in(packet, NAME) == {PEER: [ADDRESS]}
    assert mdns.addresses_in(packet, mdns.service("other")) == {}


def test_names_may_point_at_names() -> None:
    """As other responders write them."""
    packet = bytes(mdns.HEADER.size) + mdns._name(NAME) + b"\x01x\xc0" + bytes((mdns.HEADER.size,)) + b"rest"
    assert mdns._read_name(packet, mdns.HEADER.size + len(mdns._name(NAME))) == (f"x.{NAME}", len(packet) - 4)


def test_neither_the_name_of_the_mesh_nor_its_secret_is_told() -> None:
    mesh = Mesh.private()
    assert mesh.secret is not None
    for packet in (mdns.question(mdns.service(mesh.mesh_id)), mdns.answer(mdns.service(mesh.mesh_id), [ADDRESS])):
        assert mesh.mesh_id.encode() not in packet
        assert mesh.mesh_id[5:].encode() not in packet
        assert mesh.secret not in packet


def test_whatever_comes_is_survived() -> None:
    draw = random.Random(1)
    sound = [mdns.question(NAME), mdns.answer(NAME, [ADDRESS] * 8)]
    loop = mdns.HEADER.pack(0, 0, 1, 0, 0, 0) + b"\xc0\x0c\0\x0c\0\1"
    cases = [b"", bytes(12), bytes(9000), b"\xff" * 9000, loop]
    for _ in range(2000):
        packet = bytearray(draw.choice(sound))
        for _ in range(draw.randint(1, 4)):
            packet[draw.randrange(len(packet))] = draw.randrange(256)
        cases.append(bytes(packet[: draw.randint(0, len(packet))]))
    for case in cases:
        try:
            mdns.addresses_in(mdns.parse(case), NAME)
        except ValueError:
            continue


def test_only_addresses_with_a_lan_around_them_count() -> None:
    addresses = ["/ip4/127.0.0.1/tcp/1", "/ip4/10.0.0.2/tcp/1", "/ip6/::1/tcp/1", "/ip4/10.0.0.2/tcp/2"]
    assert mdns.lan_hosts(addresses) == ["10.0.0.2"]


async def test_members_meet_and_strangers_do_not(lan: None) -> None:
    others = Mesh("other", SECRET.secret), Mesh("test", bytes(32))
    async with (
        open_network(NodeKey.generate(), SECRET, listen=LISTEN) as a,
        open_network(NodeKey.generate(), others[0], listen=LISTEN) as foreign,
        open_network(NodeKey.generate(), others[1], listen=LISTEN) as impostor,
        open_network(NodeKey.generate(), SECRET, listen=LISTEN) as b,
    ):
        await until(lambda: a.connected() and b.connected())
        await trio.sleep(0.3)
        assert [p.peer for p in a.connected()] == [b.peer]
        assert not foreign.connected()
        assert not impostor.connected()


async def test_who_does_not_want_to_is_not_found(lan: None) -> None:
    async with (
        open_network(NodeKey.generate(), SECRET, listen=LISTEN, lan=False) as quiet,
        open_network(NodeKey.generate(), SECRET, listen=LISTEN) as other,
    ):
        await trio.sleep(0.5)
        assert not quiet.connected()
        assert not other.connected()


async def test_a_crowd_of_made_up_peers_is_dialled_within_bounds(lan: None, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_network(NodeKey.generate(), SECRET, listen=LISTEN) as node:
        dialled = []

        async def connect(peer: str, addresses: object) -> None:
            dialled.append(peer)

        monkeypatch.setattr(node._members, "connect", connect)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
            for number in range(60):
                crowd = [f"/ip4/127.0.0.1/tcp/9/p2p/{NodeKey(bytes([number]) * 32).peer}"]
                sock.sendto(mdns.answer(mdns.service("test"), crowd), (mdns.GROUP, mdns.PORT))
                await trio.sleep(0.002)
        await trio.sleep(0.2)
        assert len(dialled) == 32
