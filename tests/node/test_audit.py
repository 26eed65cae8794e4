"""What a hop signed is done again by another node, and found to be so, or not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import trio

from meshnode.errors import MeshError
from meshnode.ids import Layers
from meshnode.node import Node
from meshnode.stage.exhibits import MAX_EXHIBITS

from . import conftest


def lies(node: Node, from_position: int) -> None:
    """What this node computes from a position on is something else; it signs for that."""
    [holding] = node.stage.holdings
    honest = holding.worker.step

    async def step(handle: int, first: int, *rest: Any, **more: Any) -> Any:
        stepped = await honest(handle, first, *rest, **more)
        if first >= from_position and stepped.residual:
            return dataclasses.replace(stepped, residual=bytes(4) + bytes(stepped.residual)[4:])
        if first >= from_position and stepped.sampled is not None:
            return dataclasses.replace(stepped, sampled=dataclasses.replace(stepped.sampled, token=65, piece=b"A"))
        return stepped

    holding.worker.step = step  # type: ignore[method-assign]


async def audited(mesh: Any, auditor: Node) -> list[dict[str, Any]]:
    """The findings of every hop of the one session that is known."""
    with trio.fail_after(5):
        while not (known := [c for c in await auditor.receipts(None, 0) if c["verdict"] == "verified"]):
            await trio.sleep(0.05)
    return sorted(await auditor.audit(known[0]["id"]), key=lambda finding: str(finding["peer"]))


async def loaded(mesh: Any, *layers: Layers) -> Node:
    """One more node, which holds these."""
    node: Node = await mesh.add(*layers)
    with trio.fail_after(5):
        while node.status()["state"] != "ready":
            await trio.sleep(0.02)
    return node


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 7}])
async def test_honest_work_agrees_at_every_place(mesh_of: Any, sampling: Any) -> None:
    async with mesh_of("0-2", "2-4", "4-6") as mesh:
        answer = await mesh.ask(await mesh.ready(), "some words " * 12, max_tokens=12, **sampling)
        auditor = await loaded(mesh, Layers(0, 6))
        found = await audited(mesh, auditor)
        assert [f["verdict"] for f in found] == ["agrees"] * 3
        assert {f["position"] for f in found} == {len(answer["prompt_token_ids"]) + 11}
        assert auditor.auditing.lowered == set()
        assert auditor.stage.holdings[0].book.free == auditor.stage.holdings[0].book.places


@pytest.mark.parametrize("place", [0, 1, 2])
async def test_a_liar_is_found_wherever_it_is_and_comes_last(mesh_of: Any, place: int) -> None:
    async with mesh_of("0-2", "2-4", "4-6") as mesh:
        model = await mesh.ready()
        liar = mesh.nodes[place]
        lies(liar, from_position=8)
        await mesh.ask(model, "hello", max_tokens=12)
        auditor = await loaded(mesh, Layers(0, 6))
        found = {f["peer"]: f for f in await audited(mesh, auditor)}
        assert {p: f["verdict"] for p, f in found.items()} == {
            node.network.peer: "differs" if node is liar else "agrees" for node in mesh.nodes[:3]
        }
        assert found[liar.network.peer]["position"] >= 8
        assert auditor.auditing.lowered == {liar.network.peer}
        with trio.fail_after(5):  # everybody hears of it
            while not (await mesh.entry.receipt((await mesh.entry.receipts(None, 0))[0]["id"]))["findings"]:
                await trio.sleep(0.05)
        assert mesh.entry.auditing.lowered == set()  # from one that it does not trust


@pytest.mark.parametrize("lying", [False, True])
async def test_fast_numerics_are_compared_by_distance(
    mesh_of: Any, lying: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "CONFIG", dataclasses.replace(conftest.CONFIG, numerics="fast"))
    async with mesh_of("0-2", "2-4", "4-6") as mesh:
        model = await mesh.ready()
        if lying:
            lies(mesh.nodes[1], from_position=8)
        await mesh.ask(model, "hello", max_tokens=12)
        auditor = await loaded(mesh, Layers(0, 6))
        found = {f["peer"]: f["verdict"] for f in await audited(mesh, auditor)}
        head, middle, tail = (node.network.peer for node in mesh.nodes[:3])
        assert found == {head: "agrees", middle: "differs" if lying else "agrees"}
        assert tail not in found


async def test_in_the_background_one_hop_in_twenty(mesh_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshnode.node.auditing.REST_S", 0.0)
    async with mesh_of("0-3", "3-6") as mesh:
        model = await mesh.ready()
        lies(mesh.nodes[0], from_position=0)
        auditor = await loaded(mesh, Layers(0, 3), Layers(3, 6))
        mesh.nodes[0].stage.holdings[0].token_us = 1  # it says it is quicker than the auditor
        for number in range(40):
            await mesh.ask(model, f"hello {number}", max_tokens=2)
            if auditor.auditing.lowered:
                break
        with trio.move_on_after(3):
            while not auditor.auditing.lowered:
                await trio.sleep(0.05)
        assert auditor.auditing.lowered <= {mesh.nodes[0].network.peer}


async def test_without_consent_nothing_is_kept(mesh_of: Any) -> None:
    async with mesh_of("0-3", "3-6") as mesh:
        mesh.entry.client.audit = False
        await mesh.ask(await mesh.ready(), max_tokens=3)
        assert all(len(node.stage.exhibits) == 0 for node in mesh.nodes)
        auditor = await loaded(mesh, Layers(0, 6))
        with pytest.raises(MeshError, match="consented"):
            await audited(mesh, auditor)


async def test_what_is_kept_is_bounded(mesh_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshnode.stage.exhibits.MAX_EXHIBITS", 3)
    assert MAX_EXHIBITS > 3
    async with mesh_of("0-6") as mesh:
        model = await mesh.ready()
        for number in range(6):
            await mesh.ask(model, f"hello {number}", max_tokens=2)
        assert len(mesh.nodes[0].stage.exhibits) == 3
        mesh.nodes[0].stage.exhibits.expire()
        assert len(mesh.nodes[0].stage.exhibits) == 3
        for exhibit in mesh.nodes[0].stage.exhibits._open.values():
            exhibit.ends = 0.0
        mesh.nodes[0].stage.exhibits.expire()
        assert len(mesh.nodes[0].stage.exhibits) == 0
