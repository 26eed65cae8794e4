"""A mesh whose secret is replaced while it runs, and peers that are denied."""

from __future__ import annotations

import time

import pytest
import trio

from meshnode.errors import MeshError
from meshnode.keys import NodeKey
from meshnode.mesh import Generation, Mesh
from meshnode.net import open_network, rotation
from meshnode.wire.schema import encode_nested

from .helpers import LISTEN, SECRET, mesh, until

OLD = Mesh("test", SECRET.secret)


def visitor(of: Mesh, **more: object):
    return open_network(NodeKey.generate(), of, listen=LISTEN, **more)


async def test_a_new_secret_reaches_every_member_and_lets_both_kinds_in():
    async with mesh(4) as nodes:
        nodes[1].admission.rotate(60.0, ())
        await until(lambda: all(node.admission.mesh.number == 1 for node in nodes), 3)
        now = nodes[0].admission.mesh
        assert {node.admission.mesh.secret for node in nodes} == {now.secret}
        async with visitor(OLD) as old, visitor(Mesh("test", now.secret, 1)) as new:
            for guest in (old, new):
                await guest.connect(nodes[3].peer, nodes[3].addresses)
            await until(lambda: old.admission.mesh.secret == now.secret)  # it is handed on, and takes
            await old.connect(new.peer, new.addresses)


async def test_after_the_overlap_the_old_secret_is_worth_nothing():
    async with mesh(2) as (a, b):
        a.admission.rotate(0.3, ())
        await until(lambda: b.admission.mesh.number == 1)
        await trio.sleep(0.35)
        async with visitor(OLD) as guest:
            for node in (a, b):
                with pytest.raises(MeshError) as fault:
                    await guest.connect(node.peer, node.addresses)
                assert fault.value.code == "not_member"
                assert "replaced" in fault.value.message
        assert a.connected()
        assert b.connected()  # whoever took it stays


async def test_who_is_denied_is_not_given_it_and_goes_with_the_old_one(monkeypatch):
    monkeypatch.setattr(rotation, "LOOK_S", 0.1)
    async with mesh(3) as (a, b, evil):
        await until(lambda: len(a.connected()) == 2)
        await evil.connect(b.peer, b.addresses)
        a.admission.rotate(0.5, [evil.peer])
        await until(lambda: b.admission.mesh.number == 1)
        await trio.sleep(0.2)
        assert evil.admission.mesh.number == 0
        assert evil.peer in {p.peer for p in b.connected()}  # until the old secret ends
        await until(lambda: not evil.connected(), 3)
        with pytest.raises(MeshError):
            await evil.connect(b.peer, b.addresses)


async def test_two_that_rotate_at_once_agree(monkeypatch):
    monkeypatch.setattr(rotation, "LOOK_S", 0.1)
    monkeypatch.setattr(rotation, "CALM_S", 0.2)
    async with mesh(3) as nodes:
        nodes[0].admission.rotate(60.0, ())
        nodes[2].admission.rotate(60.0, ())
        await until(lambda: len({node.admission.mesh.secret for node in nodes}) == 1, 5)
        await nodes[1].connect(nodes[2].peer, nodes[2].addresses)


async def test_a_member_of_before_there_were_generations_gets_in_with_the_first(monkeypatch):
    async with mesh(1) as (node,), visitor(OLD) as guest:
        monkeypatch.setattr(guest._members._party, "_hello", _without_names(guest._members._party))
        node.admission.rotate(60.0, ())
        await guest.connect(node.peer, node.addresses)
        assert node.connected()


def _without_names(party):
    from dataclasses import replace

    made = party._hello
    return lambda: replace(made(), generations=(), capabilities=())


async def test_nonsense_changes_no_secret():
    async with mesh(2) as (a, b):
        leap = rotation.Handed(4, 1 << 20, bytes([7]) * 32, 1000)
        for raw in (b"\0", b"\xff" * 50, encode_nested(leap)):
            answer = await b.call(a.peer, rotation.PROTOCOL, raw, timeout=2)
            assert b"bad_frame" in answer
        assert a.admission.mesh == OLD


async def test_a_member_that_hands_out_secrets_without_end_is_slowed_down():
    async with mesh(2) as (a, b):
        for number in (1, 2, 3):
            message = rotation.Handed(4, number, bytes([number]) * 32, 60_000)
            await b.call(a.peer, rotation.PROTOCOL, encode_nested(message), timeout=2)
        assert a.admission.mesh.number == 1


def test_a_secret_handed_reaches_no_log():
    assert "07" * 32 not in repr(rotation.Handed(4, 1, bytes([7]) * 32, 1))
    assert str(bytes([7]) * 32) not in repr(rotation.Handed(4, 1, bytes([7]) * 32, 1))


# -- denying


async def test_a_denied_peer_is_closed_refused_and_not_dialled():
    async with mesh(3) as (a, b, c):
        await until(lambda: len(a.connected()) == 2)
        await c.provide(b"key")
        a.deny(c.peer)
        await until(lambda: c.peer not in {p.peer for p in a.connected()})
        with pytest.raises(MeshError) as fault:
            await c.connect(a.peer, a.addresses)
        assert fault.value.code == "not_member"
        assert "denies" in fault.value.message
        with pytest.raises(MeshError) as fault:
            await a.connect(c.peer, c.addresses)
        assert fault.value.code == "denied"
        assert await a.find(b"key") == []
        assert c.peer in await b.find(b"key")  # one node's word is its own
        a.allow(c.peer)
        await c.connect(a.peer, a.addresses)


async def test_one_does_not_deny_oneself():
    async with mesh(1) as (a,):
        for peer in (a.peer, "nobody"):
            with pytest.raises(MeshError):
                a.deny(peer)
        assert not a.admission.denied


async def test_a_peer_denied_from_the_start_stays_out():
    key = NodeKey.generate()
    async with visitor(SECRET, denied=[key.peer]) as node:
        async with open_network(key, SECRET, listen=(), bootstrap=node.addresses) as evil:
            with pytest.raises(MeshError) as fault:
                await evil.wait_joined()
            assert fault.value.code == "not_member"


def test_a_generation_that_ended_is_not_named():
    gone = Generation(0, bytes(32), time.time() - 1)
    from meshnode.net.admission import Admission

    admission = Admission(Mesh("m", bytes([1]) * 32, 1, (), (gone,)))
    assert [g.number for g in admission.mesh.generations] == [1]
