"""Hops that die in the middle of an answer: the same text, after a pause; or a clear end."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import trio

from meshnode.api.requests import RunRequest
from meshnode.errors import MeshError
from meshnode.node import Node
from meshnode.stage import Holding

from .conftest import CONFIG, TTL_S

PROMPT = "once upon a time " * 9  # longer than two chunks
SAMPLED = {"max_tokens": 40, "temperature": 0.8, "seed": 3}
PAIRS = ("0-2", "0-2", "2-4", "2-4", "4-6", "4-6")


def serving(mesh: Any, hop: int) -> Node:
    """The node whose hop of the one session that runs has this place."""
    for node in mesh.nodes:
        for leased in node.stage.hops.values():
            if leased.lease.hop == hop and not leased.over:
                return node  # type: ignore[no-any-return]
    raise AssertionError("nobody serves that hop")


def kill_worker(mesh: Any, node: Node) -> None:
    os.kill(node.status()["holdings"][0]["worker"], signal.SIGKILL)


def end_node(mesh: Any, node: Node) -> None:
    mesh.end(node)


async def disturbed(mesh: Any, model: str, after: dict[int, Any], **asked: Any) -> dict[str, Any]:
    """The answer, whose hops are disturbed after so many tokens: {tokens: (hop, what is done to its node)}."""
    seen = 0
    with trio.fail_after(30):
        async with mesh.entry.run(RunRequest(model, prompt=PROMPT, **asked)) as events:
            async for event in events:
                if event["event"] == "done":
                    return dict(event["result"])
                if event["event"] == "token":
                    seen += 1
                if event["event"] != "recovered" and seen in after:
                    hop, harm = after.pop(seen)
                    harm(mesh, serving(mesh, hop))
    raise AssertionError("an answer has an end")


@pytest.mark.parametrize("harm", [kill_worker, end_node])
@pytest.mark.parametrize("hop", [0, 1, 2])
async def test_a_lost_hop_is_replaced_and_the_text_is_the_same(mesh_of: Any, hop: int, harm: Any) -> None:
    async with mesh_of(*PAIRS, within_s=60) as mesh:
        model = await mesh.ready()
        expected = await mesh.ask(model, PROMPT, **SAMPLED)
        answer = await disturbed(mesh, model, {7: (hop, harm)}, **SAMPLED)
        assert answer["token_ids"] == expected["token_ids"]
        assert answer["text"] == expected["text"]
        [recovered] = answer["recovered"]
        assert not recovered["restarted"]
        assert not recovered["may_differ"]
        assert recovered["replayed"] >= len(expected["prompt_token_ids"])
        assert recovered["seconds"] < 3.0  # 0.1 s where nothing else runs
        assert answer["receipts_error"] is None
        assert {receipt["epoch"] for receipt in answer["route"]} == {recovered["epoch"]}
        await mesh.quiet(TTL_S + 1.0)


async def test_one_hop_after_the_other(mesh_of: Any) -> None:
    async with mesh_of(*PAIRS, within_s=60) as mesh:
        model = await mesh.ready()
        expected = await mesh.ask(model, PROMPT, **SAMPLED)
        harms = {0: (1, kill_worker), 3: (2, kill_worker), 5: (0, kill_worker), 20: (1, kill_worker)}
        answer = await disturbed(mesh, model, harms, **SAMPLED)
        assert answer["token_ids"] == expected["token_ids"]
        assert 3 <= len(answer["recovered"]) <= 4  # the first may hit before the prompt is there
        await mesh.quiet(TTL_S + 1.0)


async def test_a_worker_without_a_spare_is_waited_for(mesh_of: Any) -> None:
    async with mesh_of("0-2", "2-4", "4-6") as mesh:
        model = await mesh.ready()
        expected = await mesh.ask(model, PROMPT, **SAMPLED)
        for hop in range(3):
            answer = await disturbed(mesh, model, {9: (hop, kill_worker)}, **SAMPLED)
            assert answer["token_ids"] == expected["token_ids"]
            await mesh.ready()


async def test_where_nobody_is_equal_another_route_computes_all_again(
    mesh_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_its_own = property(lambda holding: holding.worker.pid.to_bytes(32, "big"))
    monkeypatch.setattr(Holding, "fingerprint", of_its_own)
    async with mesh_of(*PAIRS, within_s=60) as mesh:
        model = await mesh.ready()
        answer = await disturbed(mesh, model, {4: (1, end_node)}, **SAMPLED)
        [recovered] = answer["recovered"]
        assert (recovered["restarted"], recovered["may_differ"]) == (True, True)
        assert len(answer["token_ids"]) == SAMPLED["max_tokens"]
        assert answer["receipts_error"] is None
        await mesh.quiet(TTL_S + 1.0)


async def test_without_a_route_the_fault_is_said(mesh_of: Any) -> None:
    async with mesh_of("0-2", "2-4", "4-6") as mesh:
        model = await mesh.ready()
        with pytest.raises(MeshError) as error:
            await disturbed(mesh, model, {4: (1, end_node)}, **SAMPLED)
        assert error.value.code == "hop_failed"
        assert "layers 2-4" in error.value.message
        await mesh.quiet(2 * TTL_S)


async def test_sessions_beside_it_are_not_touched(mesh_of: Any) -> None:
    async with mesh_of(*PAIRS, within_s=60) as mesh:
        model = await mesh.ready()
        expected = await mesh.ask(model, "another", max_tokens=60)
        same = await mesh.ask(model, PROMPT, **SAMPLED)
        answers: list[list[int]] = []

        async def beside() -> None:
            answers.append((await mesh.ask(model, "another", max_tokens=60))["token_ids"])

        async with trio.open_nursery() as nursery:
            for _ in range(CONFIG.max_sessions - 1):
                nursery.start_soon(beside)
            answer = await disturbed(mesh, model, {5: (1, kill_worker)}, **SAMPLED)
        assert answer["token_ids"] == same["token_ids"]
        assert answers == [expected["token_ids"]] * (CONFIG.max_sessions - 1)
