"""The main job, whole but for the engine: routes, the ring, receipts, and what happens when something is amiss."""

from __future__ import annotations

import dataclasses
import itertools
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from meshnode.api.requests import RunRequest
from meshnode.artifact.catalogue import Catalogue
from meshnode.config import Home
from meshnode.errors import MeshError
from meshnode.ids import Layers
from meshnode.mesh import KnownMesh, Mesh
from meshnode.net import peer_of_address
from meshnode.node import ServeModel, open_node
from meshnode.node.load import Loading
from meshnode.stage import turns
from meshnode.wire import messages, statements
from meshnode.wire.invite import parse

from .conftest import CONFIG, TTL_S

ROUTES = [
    ("0-6",),
    ("0-2", "2-4", "4-6"),
    ("0-1", "1-5", "5-6"),
    ("0-4", "2-6"),
    (("0-1", "5-6"), "1-5"),  # one node is head and tail, with a worker each
]


async def whole(mesh_of: Any, prompt: str, **options: Any) -> dict[str, Any]:
    async with mesh_of("0-6") as mesh:
        return dict(await mesh.ask(await mesh.ready(), prompt, **options))


@pytest.mark.parametrize("ranges", ROUTES, ids=str)
async def test_every_split_gives_the_answer_of_the_whole(mesh_of: Any, ranges: Any) -> None:
    options = {"max_tokens": 20, "temperature": 0.8, "seed": 3}
    expected = await whole(mesh_of, "once upon a time " * 12, **options)  # longer than one chunk
    async with mesh_of(*ranges) as mesh:
        answer = await mesh.ask(await mesh.ready(), "once upon a time " * 12, **options)
        await mesh.quiet(1.0)
    assert answer["prompt_token_ids"] == expected["prompt_token_ids"]
    assert len(answer["prompt_token_ids"]) > CONFIG.chunk
    assert answer["token_ids"] == expected["token_ids"]
    assert answer["text"] == expected["text"]
    tiles = [hop["effective"] for hop in answer["route"]]
    assert tiles[0][0] == 0
    assert tiles[-1][1] == 6
    assert all(a[1] == b[0] for a, b in itertools.pairwise(tiles))
    assert len(answer["receipts"]) == len(tiles)
    assert {receipt["positions"] for receipt in answer["receipts"]} == {len(answer["prompt_token_ids"]) + 19}


async def test_the_tail_keeps_to_a_grammar_and_tells_what_else_was_likely(mesh_of: Any) -> None:
    async with mesh_of("0-3", "3-6") as mesh:
        model = await mesh.ready()
        asked = {"temperature": 2.0, "seed": 5, "logit_bias": ((ord("b"), -100.0),), "typical_p": 0.99, "logprobs": 2}
        request = RunRequest(model, prompt="x", max_tokens=50, grammar='root ::= "[" [a-f]{9} "]"', **asked)
        async with mesh.entry.run(request) as events:
            seen = [event async for event in events]
        result = seen[-1]["result"]
        assert re.fullmatch(r"\[[ac-f]{9}\]", result["text"])
        assert result["finish_reason"] == "stop"
        tokens = [event for event in seen if event["event"] == "token"]
        assert [token["id"] for token in tokens] == result["token_ids"]
        for token in tokens:
            first, second = token["logprobs"]["top"]
            assert 0 >= first["logprob"] >= second["logprob"]
            assert first["logprob"] >= token["logprobs"]["logprob"]


async def test_what_only_the_tail_finds_wrong_with_a_request_is_said_as_such(mesh_of: Any) -> None:
    async with mesh_of("0-2", "2-4", "4-6", "4-6") as mesh:
        model = await mesh.ready()
        wrong = {"bad_grammar": {"grammar": "root ::= root"}, "bad_bias": {"logit_bias": ((10**6, 1.0),)}}
        for code, asked in wrong.items():
            assert (await refused(mesh, model=model, prompt="x", **asked)).code == code


async def test_sessions_at_once_are_each_as_if_alone(mesh_of: Any) -> None:
    async with mesh_of("0-3", "3-6") as mesh:
        model = await mesh.ready()
        prompts = ["a", "bb bb", "ccc"]
        alone = [(await mesh.ask(model, prompt, max_tokens=30))["token_ids"] for prompt in prompts]
        together: dict[str, list[int]] = {}

        async def ask(prompt: str) -> None:
            together[prompt] = (await mesh.ask(model, prompt, max_tokens=30))["token_ids"]

        async with trio.open_nursery() as nursery:
            for prompt in prompts:
                nursery.start_soon(ask, prompt)
    assert [together[prompt] for prompt in prompts] == alone


async def refused(mesh: Any, **request: Any) -> MeshError:
    with pytest.raises(MeshError) as error:
        await mesh.ask(**request)
    return error.value


async def test_what_cannot_be_answered_is_refused_with_a_reason(mesh_of: Any) -> None:
    async with mesh_of("0-3", "3-6") as mesh:
        model = await mesh.ready()
        assert (await refused(mesh, model="nobody-has-this")).code == "unknown_model"
        long = await refused(mesh, model=model, prompt="x" * 5000)
        assert long.code == "context_exceeded"
        assert not any(node.status()["sessions"] for node in mesh.nodes)
        assert (await refused(mesh, model=model, max_tokens=5000)).code == "context_exceeded"
        assert (await mesh.ask(model[:20], max_tokens=2))["finish_reason"] == "length"  # a prefix names it
        assert (await mesh.ask("tiny q8_0", max_tokens=2))["token_ids"]  # a name too


async def test_a_range_that_nobody_holds_is_named(mesh_of: Any) -> None:
    async with mesh_of("0-2", "4-6") as mesh:
        with trio.fail_after(10):
            while not (models := await mesh.entry.models()) or models[0]["missing"] != [[2, 4]]:
                await trio.sleep(0.02)
        error = await refused(mesh, model=models[0]["artifact"])
        assert error.code == "no_route"
        assert "2-4" in error.message


@pytest.mark.parametrize("wait_s", [0.05, 10.0])
async def test_a_full_node_lets_wait_and_then_says_so(
    mesh_of: Any, wait_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "WAIT_S", wait_s)
    async with mesh_of("0-6") as mesh:
        model = await mesh.ready()
        async with trio.open_nursery() as nursery:
            for _ in range(CONFIG.max_sessions):
                nursery.start_soon(partial(mesh.ask, model, max_tokens=240))
            with trio.move_on_after(5):
                while mesh.nodes[0].stage.holdings[0].book.free:
                    await trio.sleep(0.001)
                if wait_s < 1:
                    assert (await refused(mesh, model=model, max_tokens=5)).code == "busy"
                else:
                    assert (await mesh.ask(model, max_tokens=5))["finish_reason"] == "length"
            nursery.cancel_scope.cancel()
        await mesh.quiet(2.0)
        await mesh.ask(model, max_tokens=2)


async def test_a_request_that_is_given_up_leaves_nothing(mesh_of: Any) -> None:
    async with mesh_of("0-2", "2-4", "4-6") as mesh:
        model = await mesh.ready()
        for tokens in (0, 1, 5):
            async with mesh.entry.run(RunRequest(model, prompt="hello", max_tokens=200)) as events:
                seen = 0
                async for event in events:
                    seen += event["event"] == "token"
                    if seen >= tokens:
                        break
            await mesh.quiet(1.0)
        assert all(node.stage.holdings[0].book.free == CONFIG.max_sessions for node in mesh.nodes)


@pytest.mark.parametrize("index", [0, 1, 2])
async def test_a_node_that_goes_away_ends_the_answer_at_once(mesh_of: Any, index: int) -> None:
    async with mesh_of("0-2", "2-4", "4-6") as mesh:
        model, gone = await mesh.ready(), mesh.nodes[index]
        with trio.fail_after(5), pytest.raises(MeshError) as error:
            async with mesh.entry.run(RunRequest(model, prompt="hello", max_tokens=240)) as events:
                async for event in events:
                    if event["event"] == "token" and gone in mesh.nodes:
                        mesh.end(gone)
        assert error.value.code == "hop_failed"
        await mesh.quiet(2 * TTL_S)


async def test_leases_end_when_the_entry_node_is_gone(mesh_of: Any) -> None:
    async with mesh_of("0-3", "3-6") as mesh:
        model = await mesh.ready()
        async with mesh.entry.run(RunRequest(model, prompt="hello", max_tokens=200)) as events:
            async for event in events:
                if event["event"] == "token":
                    break
            # from here on as if killed: nothing is renewed or taken any more, and nothing is closed
            mesh.entry.client.sessions[0].stop_renewing()
            assert all(node.status()["sessions"] for node in mesh.nodes)
            await trio.sleep(TTL_S + 1.0)
            assert not any(node.status()["sessions"] for node in mesh.nodes)


async def test_a_member_that_is_not_the_leased_predecessor_changes_nothing(mesh_of: Any) -> None:
    """Pushes, tokens, credits, renewals and closes of a session, sent by another member."""
    async with mesh_of("0-3", "3-6") as mesh:
        model = await mesh.ready()
        expected = (await mesh.ask(model, max_tokens=40))["token_ids"]
        thief = await mesh.add(serve=False)
        async with mesh.entry.run(RunRequest(model, prompt="hello", max_tokens=40)) as events:
            ids = []
            async for event in events:
                if event["event"] == "token":
                    ids.append(event["id"])
                if len(ids) == 3 and event["event"] == "token":
                    for node in mesh.nodes:
                        for hop in list(node.stage.hops.values()):
                            lease, peer = hop.lease, node.network.peer
                            name = (lease.lease, lease.session, lease.epoch)
                            push = messages.Push(*name, hop.session.steps, hop.session.positions, 1,
                                                 lease.effective.begin, hop.session.positions)  # fmt: skip
                            tensor = messages.Tensor("tokens", "i32", (1,), "raw", b"d" * 32)
                            at = hop.session.positions
                            for message in (
                                messages.Pushes((push,), (tensor,)),
                                messages.Tokens(lease.session, lease.epoch, at, (1,), lease.lease),
                                messages.Credit(*name, 1000),
                                messages.Renew(*name),
                            ):
                                await thief.links.send(peer, message)
                            with pytest.raises(MeshError):
                                close = messages.Close(*name, "done")
                                await thief.links.request(peer, close, messages.Closed, timeout=2)
        assert ids == expected


async def test_a_stale_grant_and_a_foreign_one_open_nothing(mesh_of: Any) -> None:
    async with mesh_of("0-6") as mesh:
        await mesh.ready()
        head, client = mesh.nodes[0], mesh.entry.client
        contract = head.stage.holdings[0].contract
        grant = messages.Grant(b"s" * 16, 1, mesh.entry.network.peer, contract, 20)  # type: ignore[arg-type]

        async def answer(grant: messages.Grant, **changes: Any) -> str:
            signed = statements.sign(client._key, mesh.mesh.mesh_id, grant)
            ask = messages.RouteOpen(signed, 0, (), 2000, 8, messages.Sampling(), (1, 2), 5)
            ask = dataclasses.replace(ask, **changes)
            try:
                await mesh.entry.links.request(head.network.peer, ask, messages.RouteReady, timeout=3)
            except MeshError as error:
                return error.code
            return "ready"

        other = dataclasses.replace(contract, numerics="fast")
        assert await answer(dataclasses.replace(grant, contract=other)) == "contract_mismatch"
        assert await answer(dataclasses.replace(grant, entry=head.network.peer)) == "bad_signature"
        assert await answer(dataclasses.replace(grant, context=10**6)) == "context_exceeded"
        chain = (messages.Hop(head.network.peer, b"l" * 8),)  # type: ignore[arg-type]
        assert await answer(grant, chain=chain) == "bad_lease"
        assert await answer(grant, begin=6) == "bad_layers"
        assert await answer(grant) == "ready"
        [hop] = head.stage.hops.values()
        assert await answer(grant) == "ready"  # nothing came: asking again replaces the lease
        assert list(head.stage.hops.values()) != [hop]
        assert len(head.stage.hops) == 1


async def test_a_file_that_changes_is_no_longer_served(mesh_of: Any, toy: Path) -> None:
    async with mesh_of("0-6") as mesh:
        model = await mesh.ready()
        await mesh.ask(model, max_tokens=2)
        raw = bytearray(toy.read_bytes())
        raw[-1] ^= 1
        toy.write_bytes(raw)
        error = await refused(mesh, model=model)
        assert "identity_changed" in error.message
        assert str(toy.parent) not in error.message
        with trio.fail_after(3):
            while mesh.nodes[0].status()["holdings"][0]["state"] != "failed":
                await trio.sleep(0.02)
        assert (await refused(mesh, model=model)).code == "unknown_model"


def test_layers_can_only_be_asked_of_who_holds_them(toy: Any) -> None:
    with pytest.raises(MeshError) as error:
        Loading(ServeModel(toy, Layers(3, 7)), CONFIG, Catalogue())
    assert error.value.code == "bad_layers"


async def test_any_member_can_invite_and_is_remembered_by_full_addresses(
    toy: Path, fake_worker: Path, tmp_path: Path
) -> None:
    mesh = Mesh.private()

    def opened(name: str, bootstrap: tuple[str, ...] = ()) -> Any:
        return open_node(Home(tmp_path / name), CONFIG, mesh=mesh, bootstrap=bootstrap, worker=fake_worker)

    async with opened("first") as first, opened("second", tuple(first.network.addresses)) as second:
        with trio.fail_after(5):
            while (
                not second.network.connected() or not (Home(tmp_path / "second").known_mesh() or KnownMesh(mesh)).peers
            ):
                await trio.sleep(0.02)
                second.memory.remember_now()
        invite = parse(await second.invite(60.0))
        known = Home(tmp_path / "second").known_mesh()
        assert known
        addresses = (*invite.addresses, *known.addresses)
        assert all(peer_of_address(address) for address in addresses)
        assert {peer_of_address(address) for address in addresses} == {first.network.peer, second.network.peer}
        async with opened("third", ("/ip4/127.0.0.1/tcp/1", *invite.addresses)) as third:
            with trio.fail_after(5):
                while not third.network.connected():
                    await trio.sleep(0.02)
