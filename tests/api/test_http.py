"""The HTTP API around a node that answers by heart."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
import trio
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error

from meshnode.api import http
from meshnode.api.guard import read_key
from meshnode.errors import MeshError

from .fake_node import ARTIFACT, HOPS, PEERS, FakeNode

KEY = "k" * 32
JSON = {"content-type": "application/json"}
CHAT = {"model": "smollm2", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


@contextlib.asynccontextmanager
async def serving(
    node: FakeNode, key: str | None = None, where: str = "127.0.0.1:0"
) -> AsyncIterator[httpx.AsyncClient]:
    bound = http.listen(where, key=key)
    async with trio.open_nursery() as nursery:
        await nursery.start(http.serve_http, node, bound, key)
        async with httpx.AsyncClient(base_url=http.url_of(bound[0]), timeout=10) as client:
            yield client
        nursery.cancel_scope.cancel()


def events(text: str) -> list[Any]:
    """Of a stream, up to [DONE]."""
    said = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert said[-1] == "[DONE]"
    return [json.loads(one) for one in said[:-1]]


async def until(what: Any, within_s: float = 2.0) -> None:
    with trio.fail_after(within_s):
        while not what():
            await trio.sleep(0.01)


async def test_a_chat_is_answered_whole() -> None:
    async with serving(FakeNode()) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT | {"n": 2})
    said = answer.json()
    assert [choice["message"]["content"] for choice in said["choices"]] == ["The answer is 42."] * 2
    assert [choice["index"] for choice in said["choices"]] == [0, 1]
    assert said["usage"]["completion_tokens"] == 10
    assert (said["object"], said["model"]) == ("chat.completion", "smollm2")
    hops = ",".join(f"{peer}:{a}-{a + 10}" for peer, a in zip(PEERS, (0, 10, 20), strict=True))
    assert answer.headers["x-meshnode-route"] == hops


async def test_a_stream_has_its_parts_its_usage_and_its_end() -> None:
    ask = CHAT | {"stream": True, "stream_options": {"include_usage": True}, "stop": [" 42", "never"]}
    async with serving(node := FakeNode()) as client:
        answer = await client.post("/v1/chat/completions", json=ask)
        await until(lambda: node.runs == 0)
    said = events(answer.text)
    assert said[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in said[:-1]) == "The answer is"
    assert said[-2]["choices"][0]["finish_reason"] == "stop"
    assert (said[-1]["choices"], said[-1]["usage"]["completion_tokens"]) == ([], 4)
    assert all(one["usage"] is None for one in said[:-1])
    assert len({one["id"] for one in said}) == 1
    assert answer.headers["content-type"].startswith("text/event-stream")


async def test_completions_echo_and_prefill_alone() -> None:
    async with serving(node := FakeNode()) as client:
        said = (await client.post("/v1/completions", json={"model": "smollm2", "prompt": "Q:", "echo": True})).json()
        assert said["choices"][0]["text"].startswith("Q:The answer")
        nothing = {"model": "smollm2", "prompt": [1, 2], "max_tokens": 0}
        said = (await client.post("/v1/completions", json=nothing)).json()
        assert (said["choices"][0]["text"], said["usage"]["completion_tokens"]) == ("", 0)
        assert said["usage"]["prompt_tokens"] == 3
        await until(lambda: node.runs == 0)
    assert node.requests[-1].tokens == (1, 2)


async def test_what_a_mesh_refuses_is_said_in_openais_shape() -> None:
    for fault, status, code in (
        (MeshError("unknown_model", "nobody knows it"), 404, "model_not_found"),
        (MeshError("context_exceeded", "too long"), 400, "context_length_exceeded"),
        (MeshError("no_route", "layers 10-20 are missing"), 503, "no_route"),
        (MeshError("deadline", "too slow"), 504, "deadline"),
        (MeshError("no_route", "12D: bad_frame, a token id is outside the vocabulary"), 400, "bad_prompt"),
        (ValueError("unforeseen"), 500, "internal"),
    ):
        async with serving(FakeNode(on_open=fault)) as client:
            answer = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert {"message", "type", "param", "code"} <= set(answer.json()["error"])


async def test_a_stream_that_fails_says_so_and_has_no_end() -> None:
    async with serving(FakeNode(fail_at=2)) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
    last = [line for line in answer.text.split("\n\n") if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "hop_failed"
    assert "[DONE]" not in answer.text


async def test_faults_of_requests() -> None:
    async with serving(FakeNode()) as client:
        for method, path, rest, status in (
            ("POST", "/v1/chat/completions", {"content": b"{", "headers": JSON}, 400),
            ("POST", "/v1/chat/completions", {"content": b"{}"}, 415),
            ("POST", "/v1/chat/completions", {"json": {"prompt": "x" * (5 << 20)}}, 413),
            (
                "POST",
                "/v1/chat/completions",
                {"content": b"[" * 100_000, "headers": JSON},
                400,
            ),
            ("GET", "/v1/chat/completions", {}, 405),
            ("POST", "/v1/embeddings", {"json": {"model": "x", "input": "y"}}, 404),
            ("POST", "/v1/responses", {"json": {}}, 404),
            ("GET", "/v1/models/none", {}, 404),
            ("GET", "/v1/files", {}, 404),
        ):
            answer = await client.request(method, path, **rest)
            assert answer.status_code == status, (path, answer.text)
            assert {"message", "type", "param", "code"} <= set(answer.json()["error"]), path


async def test_what_it_tells_of_itself() -> None:
    async with serving(FakeNode()) as client:
        [model] = (await client.get("/v1/models")).json()["data"]
        assert (model["id"], model["object"], model["meshnode"]["artifact"]) == ("smollm2", "model", ARTIFACT)
        assert (await client.get("/v1/models/smollm2")).json() == model
        assert (await client.get(f"/v1/models/{ARTIFACT}")).json() == model
        assert (await client.get("/health")).json() == {"live": True, "ready": True, "models": ["smollm2"]}
        assert (await client.post("/tokenize", json={"model": "smollm2", "prompt": "ab"})).json()["tokens"] == [97, 98]
        await client.post("/v1/chat/completions", json=CHAT)
        metrics = (await client.get("/metrics")).text
        assert "meshnode_completion_tokens_total 5\n" in metrics
        assert 'meshnode_answers_total{outcome="ok"} 1\n' in metrics
        mesh = (await client.get("/mesh")).json()
        assert mesh["routes"][ARTIFACT]["hops"] == HOPS
        assert "/somewhere" not in json.dumps(mesh)


async def test_ready_means_a_whole_route() -> None:
    async with serving(FakeNode(complete=False)) as client:
        for path in ("/health", "/health/ready"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["ready"]) == (503, False)
        assert (await client.get("/health/live")).status_code == 200
        assert "meshnode_ready 0\n" in (await client.get("/metrics")).text


async def test_a_client_that_goes_ends_the_work() -> None:
    async with serving(node := FakeNode(pace_s=0.05)) as client:
        for stream in (True, False):
            with trio.move_on_after(0.2):
                await client.post("/v1/chat/completions", json=CHAT | {"stream": stream, "max_tokens": 1000})
            await until(lambda: node.runs == 0, within_s=0.5)
    assert node.begun == 2


async def test_requests_wait_in_line_while_every_session_is_taken() -> None:
    class Small(FakeNode):
        @contextlib.asynccontextmanager
        async def run(self, request: Any) -> AsyncIterator[Any]:
            if self.runs >= 2:
                raise MeshError("no_route", "no route could be opened: 12D at layer 10: no_route, busy: every session")
            async with super().run(request) as events_:
                yield events_

    answers = []
    async with serving(node := Small(pace_s=0.01)) as client:

        async def ask() -> None:
            answers.append(await client.post("/v1/chat/completions", json=CHAT))

        async with trio.open_nursery() as nursery:
            for _ in range(12):
                nursery.start_soon(ask)
    assert [answer.status_code for answer in answers] == [200] * 12
    assert (node.begun, node.runs) == (12, 0)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403),
        ({"host": "evil.example:80"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:1"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"host": "localhost:99"}, 200),
        ({"host": "[::1]"}, 200),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 200),
    ],
)
async def test_pages_of_other_sites_may_not_ask(headers: dict[str, str], status: int) -> None:
    async with serving(FakeNode()) as client:
        answer = await client.get("/v1/models", headers=headers)
        own = await client.get("/v1/models", headers={"origin": str(client.base_url).rstrip("/")})
    assert (answer.status_code, own.status_code) == (status, 200)
    assert "access-control-allow-origin" not in answer.headers


async def test_a_key_is_asked_for() -> None:
    async with serving(FakeNode(), KEY) as client:
        for headers, status in (
            ({}, 401),
            ({"authorization": f"Bearer {KEY}x"}, 401),
            ({"authorization": f"Basic {KEY}"}, 401),
            ({"authorization": "Bearer \xe9".encode("latin-1")}, 401),
            ({"authorization": f"Bearer {KEY}"}, 200),
            ({"authorization": f"bearer {KEY}", "host": "mesh.example"}, 200),
        ):
            answer = await client.get("/v1/models", headers=headers)
            assert answer.status_code == status, headers
            if status == 401:
                assert answer.json()["error"]["code"] == "invalid_api_key"
        assert (await client.get("/health")).status_code == 200


def test_beyond_the_loopback_only_with_a_key(tmp_path: Path) -> None:
    for where in ("0.0.0.0:0", "[::]:0", "192.0.2.1:80", "example.org:80"):
        with pytest.raises(MeshError) as error:
            http.listen(where, key=None)
        assert error.value.code == "bad_config"
    [bound] = http.listen("0.0.0.0:0", key=KEY)
    bound.close()
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(MeshError) as error:
        http.listen(f"127.0.0.1:{taken.getsockname()[1]}", key=None)
    assert error.value.code == "port_in_use"
    for where in ("8080", "127.0.0.1", ":80", "127.0.0.1:99999", "127.0.0.1:x"):
        with pytest.raises(MeshError):
            http.listen(where, key=None)
    assert http.listen_somewhere("off", key=None) == []
    file = tmp_path / "key"
    for text, mode, fault in (
        (KEY, 0o600, None),
        (KEY, 0o644, "others"),
        ("short", 0o600, "characters"),
        ("é" * 20, 0o600, "ASCII"),
    ):
        file.write_text(text + "\n")
        os.chmod(file, mode)
        if fault is None:
            assert read_key(file) == KEY
            continue
        with pytest.raises(MeshError, match=fault):
            read_key(file)


async def test_the_usual_port_or_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(http, "DEFAULT", f"127.0.0.1:{taken.getsockname()[1]}")
        [bound] = http.listen_somewhere(None, key=None)
        assert bound.getsockname()[0] == "127.0.0.1"
        assert bound.getsockname()[1] != taken.getsockname()[1]
        bound.close()


async def test_nothing_that_its_description_allows_is_a_server_error() -> None:
    """Requests drawn from the OpenAPI document, and wrong ones; those that the fake refuses are of no interest."""
    async with serving(FakeNode()) as client:
        url = str(client.base_url)
        document = (await client.get("/openapi.json")).json()

        def work() -> int:
            schema = schemathesis.openapi.from_dict(document)
            asked = 0
            for result in schema.get_all_operations():

                @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), database=None)
                @given(case=result.ok().as_strategy())
                def ask(case: Any) -> None:
                    nonlocal asked
                    asked += 1
                    case.call_and_validate(base_url=url, checks=[not_a_server_error])

                ask()
            return asked

        assert await trio.to_thread.run_sync(work) > 50
