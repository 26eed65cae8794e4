"""What a node writes down of its mesh, and finds there when it starts again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio

from meshnode.config import Home
from meshnode.errors import MeshError
from meshnode.keys import NodeKey
from meshnode.mesh import Mesh
from meshnode.node import open_node
from meshnode.wire.invite import parse

from .conftest import CONFIG

PEER = NodeKey(bytes(32)).peer


async def until(condition) -> None:
    with trio.fail_after(5):
        while not condition():
            await trio.sleep(0.02)


async def test_a_new_secret_is_written_down_by_everybody_and_goes_into_invites(tmp_path: Path) -> None:
    mesh = Mesh.private()
    homes = [Home(tmp_path / name) for name in "ab"]
    async with open_node(homes[0], CONFIG, mesh=mesh) as a:
        async with open_node(homes[1], CONFIG, mesh=mesh, bootstrap=a.network.addresses) as b:
            await until(lambda: a.network.connected() and b.network.connected())
            assert a.rotate(60.0) == {"mesh_id": mesh.mesh_id, "generation": 1}
            await until(lambda: all((k := h.known_mesh()) and k.mesh.number == 1 for h in homes))
            kept = [home.known_mesh() for home in homes]
            assert kept[0] is not None
            assert kept[1] is not None
            assert kept[0].mesh.secret == kept[1].mesh.secret != mesh.secret
            invite = parse(await b.invite(60.0))
            assert (invite.secret, invite.generation) == (kept[0].mesh.secret, 1)
            assert any(a.network.peer in address for address in invite.addresses)
    found = homes[1].known_mesh()
    assert found is not None
    assert [g.secret for g in found.mesh.generations] == [kept[0].mesh.secret, mesh.secret]


async def test_who_is_denied_stays_so(tmp_path: Path) -> None:
    home, mesh = Home(tmp_path / "a"), Mesh.private()
    async with open_node(home, CONFIG, mesh=mesh) as node:
        node.deny(PEER)
    assert home.denied_path.stat().st_mode & 0o777 == 0o600
    async with open_node(home, CONFIG, mesh=mesh) as node:
        assert node.denied() == [PEER]
        with pytest.raises(MeshError) as fault:
            await node.connect([f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}"])
        assert fault.value.code == "denied"
        for nonsense in ("nobody", node.network.peer):
            with pytest.raises(MeshError) as fault:
                node.deny(nonsense)
            assert fault.value.code == "usage"
        node.allow(PEER)
    assert json.loads(home.denied_path.read_text()) == []


async def test_a_damaged_list_lets_nobody_in(tmp_path: Path) -> None:
    home = Home(tmp_path / "a").create()
    home.denied_path.write_text("{")
    with pytest.raises(MeshError) as fault:
        async with open_node(home, CONFIG, mesh=Mesh.private()):
            pass
    assert fault.value.code == "bad_home"


async def test_a_node_alone_says_so_and_members_that_dialled_it_are_remembered(tmp_path: Path) -> None:
    home, mesh = Home(tmp_path / "a"), Mesh.private()
    async with open_node(home, CONFIG, mesh=mesh) as a:
        assert a.status()["alone"]
        async with open_node(Home(tmp_path / "b"), CONFIG, mesh=mesh, bootstrap=a.network.addresses) as b:
            await until(lambda: a.network.connected() and a.network.known_addresses(b.network.peer))
            assert not a.status()["alone"]
            a.memory.remember_now()
            known = home.known_mesh()
            assert known is not None
            assert set(known.peers) == set(b.network.addresses)
