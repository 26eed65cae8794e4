from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import trio
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.peer.id import ID
from libp2p.utils.varint import encode_delim, encode_uvarint, read_varint_prefixed_bytes_limited

from meshnode.errors import MeshError
from meshnode.keys import NodeKey
from meshnode.mesh import Generation, Mesh
from meshnode.net import members, membership, open_network, rotation, swarm
from meshnode.net.hardening import MULTISTREAM
from meshnode.net.membership import Hello, Limits, Proof, Refusal, agree, decode, proof
from meshnode.net.stream import PeerStream
from meshnode.net.swarm import HELLO, IDENTIFY
from meshnode.wire import cbor
from meshnode.wire.schema import encode_nested

from .helpers import LISTEN, SECRET, mesh, stranger, until

VECTORS = json.loads((Path(__file__).parents[2] / "protocol/vectors/membership.json").read_text())
KINDS = {"hello": Hello, "proof": Proof, "refusal": Refusal}
KAD = "/ipfs/kad/1.0.0"
PROTOCOL = "/test/1"
OTHER_SECRET = Mesh("test", bytes(32))
OTHER_MESH = Mesh("other", SECRET.secret)
PUBLIC = Mesh("test", None)


# -- the pure part


@pytest.mark.parametrize("case", VECTORS["proofs"], ids=lambda c: c["name"])
def test_proofs_are_those_of_the_vectors(case):
    secret = bytes.fromhex(case["secret"]) if case["secret"] else None
    nonces = (bytes.fromhex(case["initiator_nonce"]), bytes.fromhex(case["responder_nonce"]))
    made = proof(case["mesh_id"], secret, case["role"], case["initiator"], case["responder"], nonces)
    assert made.hex() == case["proof"]


@pytest.mark.parametrize("case", VECTORS["messages"], ids=lambda c: c["name"])
def test_messages_are_those_of_the_vectors(case):
    raw = bytes.fromhex(case["hex"])
    if case["kind"] == "refusal":
        with pytest.raises(membership.Refused) as fault:
            decode(raw, Hello)
        assert fault.value.code == case["code"]
        return
    message = decode(raw, KINDS[case["kind"]])
    if "unknown" not in case["name"]:
        assert encode_nested(message) == raw


@pytest.mark.parametrize("case", VECTORS["refused"], ids=lambda c: c["name"])
def test_bytes_of_the_vectors_are_refused(case):
    with pytest.raises(MeshError) as fault:
        decode(bytes.fromhex(case["hex"]), Hello)
    assert fault.value.code == "bad_frame"


@pytest.mark.parametrize("case", VECTORS["generations"], ids=lambda c: str(c["number"]))
def test_names_of_generations_are_those_of_the_vectors(case):
    assert Generation(case["number"], bytes.fromhex(case["secret"])).name.hex() == case["name"]


@pytest.mark.parametrize("case", VECTORS["handed"], ids=lambda c: c["name"])
def test_what_is_handed_is_that_of_the_vectors(case):
    raw = bytes.fromhex(case["hex"])
    kind = {"handed": rotation.Handed, "taken": rotation.Taken}[case["kind"]]
    assert encode_nested(rotation.decode(raw, kind)) == raw


def test_whatever_a_proof_covers_changes_it():
    nonces = (bytes(32), bytes([1]) * 32)
    base = (SECRET, "initiator", "a", "b", nonces)
    changed = [
        (OTHER_SECRET, "initiator", "a", "b", nonces),
        (OTHER_MESH, "initiator", "a", "b", nonces),
        (SECRET, "responder", "a", "b", nonces),
        (SECRET, "initiator", "c", "b", nonces),
        (SECRET, "initiator", "a", "c", nonces),
        (SECRET, "initiator", "b", "a", nonces),
        (SECRET, "initiator", "a", "b", nonces[::-1]),
    ]
    assert len({proof(m.mesh_id, m.secret, *rest) for m, *rest in [base, *changed]}) == 1 + len(changed)


@pytest.mark.parametrize(
    ("ours", "theirs", "version"), [((1,), (1,), 1), ((1, 2), (2, 3), 2), ((1, 2, 3), (3, 2, 1), 3), ((2, 1), (1,), 1)]
)
def test_the_highest_common_version_is_spoken(ours, theirs, version):
    def hello(versions):
        return Hello(1, versions, "m", bytes(32), ("a", "b"), Limits(5, 6))

    agreement = agree(hello(ours), hello(theirs))
    assert (agreement.version, agreement.capabilities, agreement.limits) == (version, {"a", "b"}, Limits(5, 6))


def test_a_message_of_hello_fits_its_bound():
    hello = Hello(
        1, tuple(range(200, 208)), "m" * 64, bytes(32), tuple("c" * 32 for _ in range(16)), Limits(1 << 40, 1)
    )
    assert len(encode_nested(hello)) <= membership.MAX_MESSAGE


def test_a_secret_reaches_no_log():
    assert SECRET.secret.hex() not in repr(SECRET)
    assert str(SECRET.secret) not in repr(SECRET)


@pytest.mark.parametrize("bad", [("", None), ("x" * 65, None), ("m", b"short")])
def test_a_membership_is_checked(bad):
    with pytest.raises(MeshError):
        Mesh(*bad)


# -- between nodes


async def test_members_of_one_mesh_reach_each_other():
    for shared in (SECRET, PUBLIC):
        async with mesh(2, shared) as (a, b):
            assert [p.peer for p in b.connected()] == [a.peer]
            await until(lambda: [p.peer for p in a.connected()] == [b.peer])
            assert not b.connected()[0].inbound
            assert a.connected()[0].inbound


@pytest.mark.parametrize(
    ("membership", "versions", "code"),
    [
        (OTHER_SECRET, (1,), "not_member"),
        (OTHER_MESH, (1,), "not_member"),
        (PUBLIC, (1,), "not_member"),
        (SECRET, (7,), "version_mismatch"),
    ],
)
@pytest.mark.parametrize("dials", ["the visitor", "the node"])
async def test_who_does_not_fit_is_told_why_and_let_go(membership, versions, code, dials):
    reached = []

    async def handler(stream):
        reached.append(stream.peer)

    visit = open_network(NodeKey.generate(), membership, listen=LISTEN, versions=versions)
    async with mesh(2) as (node, member), visit as visitor:
        for network in (node, visitor):
            network.handle(PROTOCOL, handler)
        dialler, other = (visitor, node) if dials == "the visitor" else (node, visitor)
        with pytest.raises(MeshError) as fault:
            await dialler.connect(other.peer, other.addresses)
        assert fault.value.code == code
        with pytest.raises(MeshError) as fault:
            await dialler.open(other.peer, PROTOCOL)
        assert fault.value.code == code
        await until(lambda: not any(c.peer == visitor.peer for c in node._members.swarm.get_connections()), within=1)
        assert not reached
        assert visitor.peer not in {p.peer for p in node.connected()}
        assert node.peer not in {p.peer for p in visitor.connected()}
        assert not node._dht.table.peer_in_table(ID.from_base58(visitor.peer))
        assert member.peer in {p.peer for p in node.connected()}


async def test_public_meshes_of_different_names_stay_apart():
    other = Mesh("another", None)
    async with mesh(1, PUBLIC) as (node,), open_network(NodeKey.generate(), other, listen=()) as visitor:
        with pytest.raises(MeshError) as fault:
            await visitor.connect(node.peer, node.addresses)
        assert fault.value.code == "not_member"
        assert not node.connected()


async def test_a_public_mesh_does_not_take_a_member_of_the_secret_one():
    async with mesh(1, PUBLIC) as (node,), open_network(NodeKey.generate(), SECRET, listen=()) as visitor:
        with pytest.raises(MeshError) as fault:
            await visitor.connect(node.peer, node.addresses)
        assert fault.value.code == "not_member"


async def test_joining_with_a_wrong_secret_says_so():
    async with mesh(1) as (node,):
        visit = open_network(NodeKey.generate(), OTHER_SECRET, listen=(), bootstrap=node.addresses)
        async with visit as visitor:
            with pytest.raises(MeshError) as fault:
                await visitor.wait_joined()
            assert fault.value.code == "not_member"


async def propose_raw(muxed, protocol: str) -> None:
    await muxed.write(encode_delim(MULTISTREAM.encode()) + encode_delim(protocol.encode()))


@pytest.mark.parametrize("protocol", [KAD, PROTOCOL, "/nobody/has/this"])
async def test_a_stranger_s_stream_is_not_answered(protocol, monkeypatch):
    monkeypatch.setattr(swarm, "PENDING_LIMIT", 0.5)
    reached = []

    async def handler(stream):
        reached.append(stream.peer)

    async with mesh(1) as (node,), open_network(NodeKey.generate(), SECRET, listen=()) as visitor:
        node.handle(PROTOCOL, handler)
        conn = await stranger(visitor, node)
        stream = await conn.muxed_conn.open_stream()
        await propose_raw(stream, protocol)
        said = b""
        with trio.fail_after(3), pytest.raises(Exception, match=r"reset|closed"):
            while True:
                said += await stream.read(100)
        assert said == encode_delim(MULTISTREAM.encode())  # the same whether the node has the protocol or not
        assert not reached
        assert not node._dht.table.size()


async def test_a_stranger_without_hello_is_let_go(monkeypatch):
    monkeypatch.setattr(swarm, "PENDING_LIMIT", 0.3)
    async with mesh(1) as (node,), open_network(NodeKey.generate(), SECRET, listen=()) as visitor:
        conn = await stranger(visitor, node)
        with trio.fail_after(1):
            await conn.event_closed.wait()


async def test_a_stranger_learns_two_protocols_and_no_address():
    async with mesh(1) as (node,), open_network(NodeKey.generate(), SECRET, listen=()) as visitor:
        node.handle(PROTOCOL, None)
        conn = await stranger(visitor, node)
        stream = await conn.muxed_conn.open_stream()
        await propose_raw(stream, "ls")
        await read_varint_prefixed_bytes_limited(stream, 1000)
        listed = (await read_varint_prefixed_bytes_limited(stream, 1000)).decode().split()
        assert set(listed) == {HELLO, IDENTIFY}
        stream = await visitor._members.host.open_on(conn, IDENTIFY)
        message = Identify()
        message.ParseFromString(await read_varint_prefixed_bytes_limited(stream.muxed_stream, 10000))
        assert set(message.protocols) == {HELLO, IDENTIFY}
        assert not message.listen_addrs
        assert not message.signedPeerRecord


async def test_a_stream_that_comes_with_hello_waits_for_it():
    async with mesh(1) as (node,), open_network(NodeKey.generate(), SECRET, listen=()) as visitor:

        async def echo(stream):
            await stream.send(*await stream.receive())

        node.handle(PROTOCOL, echo)
        conn = await stranger(visitor, node)
        opened = []

        async def early():
            raw = await visitor._members.host.open_on(conn, PROTOCOL)
            opened.append(PeerStream(raw, visitor._nursery.start_soon))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(early)
            await trio.sleep(0.1)
            assert not opened
            await visitor._members._introduce(conn)
        await opened[0].send(b"hello")
        assert (await opened[0].receive())[0] == b"hello"


async def hello_stream(visitor, node) -> tuple[object, PeerStream]:
    conn = await stranger(visitor, node)
    raw = await visitor._members.host.open_on(conn, HELLO)
    return conn, PeerStream(raw, visitor._nursery.start_soon)


async def test_a_proof_of_another_connection_does_not_count():
    async with mesh(1) as (node,), open_network(NodeKey.generate(), SECRET, listen=()) as visitor:
        shown = None
        for attempt in range(2):
            conn, stream = await hello_stream(visitor, node)
            nonce = bytes(32)
            await stream.send(encode_nested(Hello(1, (1,), "test", nonce)))
            theirs = decode((await stream.receive())[0], Hello)
            if shown is None:
                nonces = (nonce, theirs.nonce)
                shown = Proof(2, proof(SECRET.mesh_id, SECRET.secret, "initiator", visitor.peer, node.peer, nonces))
            await stream.send(encode_nested(shown))
            answer = cbor.loads((await stream.receive())[0])
            assert answer[0] == (2 if attempt == 0 else 3)
            assert conn.peer == node.peer
        assert answer[2] == "not_member"


async def test_a_proof_echoed_does_not_count():
    """A visitor without the secret shows the node what the node itself showed somebody who dialled."""
    async with mesh(1) as (node,), open_network(NodeKey.generate(), OTHER_SECRET, listen=()) as visitor:
        _, stream = await hello_stream(visitor, node)
        await stream.send(encode_nested(Hello(1, (1,), "test", bytes(32))))
        theirs = decode((await stream.receive())[0], Hello)
        ends, nonces = (visitor.peer, node.peer), (bytes(32), theirs.nonce)
        await stream.send(encode_nested(Proof(2, proof(SECRET.mesh_id, SECRET.secret, "responder", *ends, nonces))))
        with pytest.raises(membership.Refused):
            decode((await stream.receive())[0], Proof)


def _framed(header: bytes) -> bytes:
    return len(header).to_bytes(4, "big") + bytes(4) + header


HOSTILE = {
    "a huge length": b"\xff\xff\xff\xff" + bytes(4),
    "a huge payload": (1).to_bytes(4, "big") + b"\x7f\xff\xff\xff" + b"x",
    "a length of zero": bytes(8),
    "a page of HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(60_000),
    "zlib": bytes.fromhex("789ced") + bytes(500),
    "no CBOR": _framed(b"\xff" * 100),
    "a nested bomb": _framed(b"\x81" * 900 + b"\x00"),
    "an array of 2^40": _framed(b"\x9b\x00\x00\x01\x00\x00\x00\x00\x00"),
    "a map that is no message": _framed(b"\xa0"),
    "a message of another kind": _framed(encode_nested(Proof(2, b""))),
    "a name too long": _framed(cbor.dumps({0: 1, 2: [1], 4: "x" * 65, 6: bytes(32)})),
    "over a KiB": _framed(cbor.dumps({0: 1, 2: [1], 4: "test", 6: bytes(32), 11: bytes(1100)})),
}


@pytest.mark.parametrize("kind", HOSTILE)
async def test_hostile_bytes_in_hello_end_the_connection_only(kind, monkeypatch):
    monkeypatch.setattr(members, "HELLO_LIMIT", 0.5)
    monkeypatch.setattr(members, "REFUSAL_GRACE", 0.1)
    async with mesh(2) as (node, member), open_network(NodeKey.generate(), SECRET, listen=()) as visitor:
        conn = await stranger(visitor, node)
        stream = await visitor._members.host.open_on(conn, HELLO)
        await stream.muxed_stream.write(HOSTILE[kind])
        with trio.fail_after(2):
            await conn.event_closed.wait()
        assert visitor.peer not in {p.peer for p in node.connected()}
        async with open_network(NodeKey.generate(), SECRET, listen=()) as honest:
            await honest.connect(node.peer, node.addresses)
        assert member.peer in {p.peer for p in node.connected()}


async def test_a_hello_that_trickles_in_is_cut_off(monkeypatch):
    monkeypatch.setattr(members, "HELLO_LIMIT", 0.4)
    monkeypatch.setattr(members, "REFUSAL_GRACE", 0.1)
    async with mesh(1) as (node,), open_network(NodeKey.generate(), SECRET, listen=()) as visitor:
        conn = await stranger(visitor, node)
        stream = await visitor._members.host.open_on(conn, HELLO)
        raw = _framed(encode_nested(Hello(1, (1,), "test", bytes(32))))
        with trio.fail_after(2), pytest.raises(Exception, match=r"reset|closed"):
            for byte in raw:
                await stream.muxed_stream.write(bytes([byte]))
                await trio.sleep(0.05)
        with trio.fail_after(1):
            await conn.event_closed.wait()


async def test_hello_is_said_once():
    async with mesh(2) as (node, member):
        conn = member._members.connections[node.peer][0]
        raw = await member._members.host.open_on(conn, HELLO)
        with pytest.raises(Exception, match="reset"):
            await raw.muxed_stream.read(100)
        assert member.connected()


async def test_identify_is_bounded():
    async with mesh(2) as (node, member):
        conn = node._members.connections[member.peer][0] if member.peer in node._members.connections else None
        assert conn is not None

        raw = Identify(protocols=["x" * 100] * 200).SerializeToString()

        async def flood(stream):
            await stream.muxed_stream.write(encode_uvarint(len(raw)) + raw)

        member._members.host.set_stream_handler(IDENTIFY, flood)
        from meshnode.net import identify

        with pytest.raises(MeshError):
            await identify.ask(node._members.host, conn)


async def test_neighbours_of_one_version_apart_speak_the_older():
    async with mesh(1) as (node,):
        for versions, spoken in (((2, 1), 1), ((1,), 1)):
            async with open_network(NodeKey.generate(), SECRET, listen=(), versions=versions) as visitor:
                await visitor.connect(node.peer, node.addresses)
                (conn,) = visitor._members.connections[node.peer]
                assert conn.version == spoken
                assert conn.capabilities == {"rotates"}


async def test_a_crowd_of_strangers_is_gone_in_seconds_and_leaves_nothing(monkeypatch):
    monkeypatch.setattr(swarm, "PENDING_LIMIT", 1.0)
    async with mesh(2) as (node, member), open_network(NodeKey.generate(), OTHER_SECRET, listen=()) as crowd:
        await until(lambda: node.connected())
        before = len(node._members.swarm.get_connections())
        conns = []
        for _ in range(swarm.MAX_PER_PEER):
            conn = await stranger(crowd, node)
            conns.append(conn)
            for _ in range(4):  # as much as a stranger may send before it is cut off
                stream = await conn.muxed_conn.open_stream()
                with contextlib.suppress(Exception):
                    await propose_raw(stream, PROTOCOL)
                    await stream.write(bytes(15 << 10))
        with trio.fail_after(3):
            for conn in conns:
                await conn.event_closed.wait()
        await until(lambda: len(node._members.swarm.get_connections()) == before)
        assert not node._members.swarm.strangers
        assert member.peer in {p.peer for p in node.connected()}
        await node._dht.find(b"key", 2.0)
