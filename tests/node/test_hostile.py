"""Members that mean harm: what they send ends their own sessions at most."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import pytest
import trio

from meshnode.client import Ask
from meshnode.errors import MeshError
from meshnode.ids import Layers
from meshnode.stage.holding import Holding
from meshnode.wire import messages, statements
from meshnode.worker import Sampled, Worker

from .conftest import CONFIG


def route_open(mesh: Any, thief: Any, session: bytes = b"s" * 16, **changes: Any) -> messages.RouteOpen:
    contract = mesh.nodes[0].stage.holdings[0].contract
    grant = messages.Grant(session, 1, thief.network.peer, contract, 20)  # type: ignore[arg-type]
    signed = statements.sign(thief.client._key, mesh.mesh.mesh_id, grant)
    ask = messages.RouteOpen(signed, 0, (), 2000, 8, messages.Sampling(), (1, 2), 5)
    return dataclasses.replace(ask, **changes)


async def open_route(mesh: Any, thief: Any, **changes: Any) -> Any:
    ask = route_open(mesh, thief, **changes)
    return await thief.links.request(mesh.nodes[0].network.peer, ask, messages.RouteReady, timeout=3)


async def test_route_opens_without_time_leave_no_session_in_the_worker(mesh_of: Any) -> None:
    async with mesh_of("0-6") as mesh:
        model = await mesh.ready()
        for _ in range(2 * CONFIG.max_sessions):
            with pytest.raises(MeshError):
                await open_route(mesh, mesh.entry, deadline=0)
        await mesh.ask(model, max_tokens=2)


@pytest.mark.parametrize(
    "lie",
    [
        {"holding": Layers(100, 200)},
        {"holding": Layers(0, 7)},
        {"contract": {"n_layer": 4096}},
        {"contract": {"n_embd": 1}},
        {"pairs": ()},
    ],
    ids=str,
)
async def test_a_lying_offer_does_not_stop_the_others(mesh_of: Any, lie: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with mesh_of("0-3", "3-6") as mesh:
        model = await mesh.ready()
        liar = await mesh.add(Layers(0, 6))
        await mesh.ready()
        honest = Holding.offer

        def offer(self: Holding, nonce: bytes, node: Any, addresses: tuple[str, ...]) -> messages.Offer:
            made = honest(self, nonce, node, addresses)
            if node != liar.network.peer:
                return made
            changes = dict(lie)
            if "contract" in changes:
                changes["contract"] = dataclasses.replace(made.contract, **changes["contract"])
            return dataclasses.replace(made, **changes)

        monkeypatch.setattr(Holding, "offer", offer)
        await mesh.ask(model, max_tokens=3)
        assert (await mesh.entry.route(model))["complete"]


async def test_a_best_offer_that_never_answers_costs_each_asker_time_once(mesh_of: Any) -> None:
    async with mesh_of("0-3", "3-6") as mesh:
        model = await mesh.ready()
        silent = await mesh.add(Layers(0, 6))
        await mesh.ready()

        async def never(peer: str, ask: Any) -> Any:
            await trio.sleep_forever()

        silent.links.answer(messages.RouteOpen, never)
        mesh.entry.client.open_timeout_s = 2.0
        for _ in range(2):  # the entry node learns it, and the head, which asks for its own successor
            answer = await mesh.ask(model, max_tokens=2)
            assert silent.network.peer not in [hop["peer"] for hop in answer["route"]]
        with trio.fail_after(1.0):
            await mesh.ask(model, max_tokens=2)


async def test_a_session_of_one_entry_node_cannot_be_ended_by_another(mesh_of: Any) -> None:
    async with mesh_of("0-6") as mesh:
        await mesh.ready()
        await open_route(mesh, mesh.entry)
        [mine] = mesh.nodes[0].stage.hops
        thief = await mesh.add(serve=False)
        await open_route(mesh, thief)
        assert mine in mesh.nodes[0].stage.hops


@pytest.mark.parametrize("value", [float("nan"), -float("inf"), 2e8])
async def test_a_fault_in_one_session_is_not_the_links(
    mesh_of: Any, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    """One session's worker gives what cannot be; another session goes over the same two links meanwhile."""
    async with mesh_of("0-3", "3-6") as mesh:
        model = await mesh.ready()
        honest, bad = Worker.step, []

        async def step(self: Worker, handle: int, first: int, layers: Any, **rows: Any) -> Any:
            stepped = await honest(self, handle, first, layers, **rows)
            if layers == (0, 3) and handle in bad:
                absurd = struct.pack("<f", value) * (len(stepped.residual) // 4)
                return dataclasses.replace(stepped, residual=absurd)
            return stepped

        monkeypatch.setattr(Worker, "step", step)
        told: list[MeshError] = []

        async def suffer() -> None:
            with pytest.raises(MeshError) as error:
                await mesh.ask(model, max_tokens=200)
            told.append(error.value)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(suffer)
            with trio.fail_after(5):
                while not mesh.nodes[0].stage.hops:
                    await trio.sleep(0.001)
            bad += [hop.kept.handle for hop in mesh.nodes[0].stage.hops.values()]
            fine = await mesh.ask(model, prompt="other", max_tokens=60)
        assert len(fine["token_ids"]) == 60
        assert f"the hop {mesh.nodes[0].network.peer} (layers 0-3) failed: bad_activation" in told[0].message


async def test_what_nobody_foresaw_ends_a_session_and_no_node(mesh_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with mesh_of("0-6") as mesh:
        model = await mesh.ready()
        honest = Worker.step

        async def step(self: Worker, *place: Any, **rows: Any) -> Any:
            stepped = await honest(self, *place, **rows)
            return dataclasses.replace(stepped, sampled=Sampled(1, b"x" * 1025, False)) if stepped.sampled else stepped

        with monkeypatch.context() as changed:
            changed.setattr(Worker, "step", step)
            with pytest.raises(MeshError) as error:
                await mesh.ask(model, max_tokens=5)
            assert error.value.code == "hop_failed"
        await mesh.ask(model, max_tokens=5)


async def test_a_worker_that_keeps_dying_does_not_end_its_node(mesh_of: Any) -> None:
    async with mesh_of("0-6") as mesh:
        model = await mesh.ready()
        for _ in range(5):
            with trio.fail_after(5):
                while not (worker := mesh.nodes[0].loadings[0].worker):
                    await trio.sleep(0.01)
            worker._process.kill()
            await worker.died.wait()
            with trio.fail_after(5):
                while mesh.nodes[0].loadings[0].worker is worker:
                    await trio.sleep(0.01)
        await mesh.ready()
        await mesh.ask(model, max_tokens=2)


async def test_tokens_beyond_credit_end_the_answer(mesh_of: Any) -> None:
    async with mesh_of("0-3", "3-6") as mesh:
        model = await mesh.ready()
        tail = mesh.nodes[1]
        with pytest.raises(MeshError) as error:
            async with mesh.entry.client.ask(Ask(model, prompt="hello", max_tokens=200)) as events:
                async for event in events:
                    journey = mesh.entry.client.sessions[0]
                    if len(journey.answer.ids) == 3:
                        extra = messages.Tokens(journey.grant.session, 1, 50, tuple(range(200)), pieces=(b"x",) * 200)
                        await tail.links.send(mesh.entry.network.peer, extra)
                        await trio.sleep(0.05)
                    del event
        assert "no credit" in error.value.message


async def test_a_template_that_never_ends_costs_the_one_who_asked(
    mesh_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    source = "{% if messages[0].content == 'loop' %}" + loop + "{% endif %}{{ messages[0].content }}<end>"
    monkeypatch.setenv("MESHNODE_FAKE_TEMPLATE", source)
    async with mesh_of("0-6") as mesh:
        model = await mesh.ready()
        pid = mesh.nodes[0].status()["holdings"][0]["worker"]
        alone = await mesh.ask(model, prompt=None, messages=(("user", "<end>"),), max_tokens=5)
        assert alone["prompt_token_ids"] == [257, *b"<end>", 256], "what the message says is text"

        async def looped() -> None:
            with pytest.raises(MeshError, match="did not end within") as refused:
                await mesh.ask(model, prompt=None, messages=(("user", "loop"),))
            assert refused.value.code == "template_failed"

        async with trio.open_nursery() as nursery:
            nursery.start_soon(looped)
            await trio.sleep(0.2)
            with trio.fail_after(1.5):
                beside = await mesh.ask(model, prompt=None, messages=(("user", "<end>"),), max_tokens=5)
        assert beside["token_ids"] == alone["token_ids"]
        assert mesh.nodes[0].status()["holdings"][0]["worker"] == pid
