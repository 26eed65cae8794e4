"""Receipts of real sessions: in every ledger, whatever became of the session."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from meshnode.api.requests import RunRequest
from meshnode.ledger import account, views
from meshnode.ledger.store import Ledger
from meshnode.node import Node


def known(node: Node) -> list[dict[str, Any]]:
    return views.receipts(node._ledger)


async def until_known(nodes: list[Node], verdicts: list[str], within: float = 5.0) -> dict[str, Any]:
    """The last chain, once every node knows as many as there are verdicts."""
    with trio.fail_after(within):
        while True:
            found = [known(node) for node in nodes]
            if all([chain["verdict"] for chain in chains] == verdicts for chains in found):
                return found[0][-1]
            await trio.sleep(0.05)


async def test_every_ledger_has_the_receipts_of_an_answer(mesh_of: Any) -> None:
    async with mesh_of("0-2", "2-4", "4-6") as mesh:
        await mesh.ask(await mesh.ready(), max_tokens=5)
        chain = await until_known([*mesh.nodes, mesh.entry], ["verified"])
        assert [hop["peer"] for hop in chain["hops"]] == [node.network.peer for node in mesh.nodes]
        assert (chain["entry"], chain["tokens"]) == (mesh.entry.network.peer, 5)
        every = {row["peer"]: row for row in views.balances(mesh.nodes[0]._ledger)}
        done = chain["hops"][0]["positions"] * 2
        assert {row["served"] for row in every.values()} == {done, 0}
        assert every[mesh.entry.network.peer]["used"] == 3 * done


async def test_a_long_session_is_cut_alike_by_all(mesh_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "SEGMENT_POSITIONS", 100)
    async with mesh_of("0-3", "3-6") as mesh:
        answer = await mesh.ask(await mesh.ready(), "many words " * 12, max_tokens=100)
        chain = await until_known([*mesh.nodes, mesh.entry], ["verified"])
        assert len(chain["hops"][0]["receipts"]) == len(chain["hops"][1]["receipts"]) > 1
        assert len(answer["accepted"]) == len(chain["hops"][0]["receipts"])


async def test_a_cancelled_session_is_nobodys_fault_and_counts(mesh_of: Any) -> None:
    async with mesh_of("0-2", "2-4", "4-6") as mesh:
        request = RunRequest(await mesh.ready(), prompt="hello", max_tokens=200)
        async with mesh.entry.run(request) as events:
            async for event in events:
                if event["event"] == "token":
                    break
        with trio.fail_after(5):
            while not all(len(known(node)) == 1 and len(node._ledger) == 4 for node in [*mesh.nodes, mesh.entry]):
                await trio.sleep(0.05)
        [chain] = known(mesh.entry)
        assert chain["verdict"] in ("verified", "incomplete")
        assert all(not fault["by"] for fault in chain["faults"])
        served = {row["peer"]: row["served"] for row in views.balances(mesh.entry._ledger)}
        assert all(served[node.network.peer] > 0 for node in mesh.nodes)


async def test_a_hop_that_dies_costs_its_neighbours_nothing(mesh_of: Any) -> None:
    async with mesh_of("0-2", "2-4", "4-6") as mesh:
        request = RunRequest(await mesh.ready(), prompt="hello", max_tokens=200)
        with pytest.raises(RuntimeError, match="over"):
            async with mesh.entry.run(request) as events:
                async for event in events:
                    if event["event"] == "token" and event["id"] is not None:
                        dead = mesh.nodes[1]
                        dead.gossip.tell_own = lambda *_: None  # it takes its receipt along
                        dead.gossip.tell = lambda *_: None
                        dead.stage.on_receipt.clear()
                        for conns in list(dead.network._members.connections.values()):
                            for conn in conns:
                                await conn.close()
                        mesh.end(dead)
                        break
                raise RuntimeError("over")
        head, tail = mesh.nodes[0], mesh.nodes[-1]

        def served(ledger: Ledger) -> set[str]:
            return {row["peer"] for row in views.balances(ledger) if row["served"]}

        with trio.move_on_after(4):
            while not {head.network.peer, tail.network.peer} <= served(mesh.entry._ledger):
                await trio.sleep(0.05)
        assert {head.network.peer, tail.network.peer} <= served(mesh.entry._ledger), known(mesh.entry)
        assert not any(fault["by"] for chain in known(mesh.entry) for fault in chain["faults"])
