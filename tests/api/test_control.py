import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import trio

from meshnode.api import control
from meshnode.api.connect import Control
from meshnode.api.requests import RunRequest
from meshnode.config import Home
from meshnode.errors import MeshError

from .fake_node import ARTIFACT, HOPS, FakeNode, result

ASK = RunRequest("smollm2", "hi", max_tokens=5)


@contextlib.asynccontextmanager
async def serving(home: Home, node: FakeNode) -> AsyncIterator[None]:
    home.create()
    async with trio.open_nursery() as nursery:
        await nursery.start(control.serve_control, node, home)
        yield
        nursery.cancel_scope.cancel()


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / ("long" * 30) / "home")


async def in_thread(home: Home, act):
    def work():
        with Control(home) as connection:
            return act(connection)

    return await trio.to_thread.run_sync(work)


async def raised_in_thread(home: Home, act) -> MeshError:
    with pytest.raises(MeshError) as error:
        await in_thread(home, act)
    return error.value


async def raw(home: Home, method: str, path: str, **rest: object) -> httpx.Response:
    with home.connect_path() as uds:
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=uds), base_url="http://node") as client:
            return await client.request(method, path, **rest)


async def until(what, within_s: float = 2.0) -> None:
    with trio.fail_after(within_s):
        while not what():
            await trio.sleep(0.01)


async def test_questions_and_answers(home: Home) -> None:
    node = FakeNode()
    async with serving(home, node):
        assert (await in_thread(home, lambda c: c.status()))["peer"] == node.peer
        assert len(await in_thread(home, lambda c: c.peers())) == 3
        assert (await in_thread(home, lambda c: c.models()))[0]["artifact"] == ARTIFACT
        assert (await in_thread(home, lambda c: c.route("smollm2")))["hops"] == HOPS
        assert await in_thread(home, lambda c: c.invite(60)) == "meshnode-invite-1.fake60"
        await in_thread(home, lambda c: c.connect(["/ip4/127.0.0.1/tcp/1"]))
        assert node.connected == ["/ip4/127.0.0.1/tcp/1"]


async def test_receipts_and_balances(home: Home) -> None:
    async with serving(home, FakeNode()):
        listed = (await raw(home, "GET", "/receipts?peer=p&since=7")).json()
        assert listed == {"receipts": [{"id": "ab" * 16, "peer": "p", "since": 7}]}
        assert (await raw(home, "GET", "/receipts/abab")).json() == {"id": "ab" * 16}
        missing = await raw(home, "GET", "/receipts/ffff")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_receipt")
        assert (await raw(home, "GET", "/receipts?since=x")).json()["error"]["code"] == "usage"
        assert (await raw(home, "GET", "/balances?peer=p")).json() == {
            "balances": [{"peer": "p", "served": 5, "used": 0}]
        }


async def test_a_run_streams(home: Home) -> None:
    node = FakeNode()
    async with serving(home, node):
        events = await in_thread(home, lambda c: list(c.run(ASK)))
    assert [event["event"] for event in events] == ["route"] + ["token"] * 5 + ["done"]
    assert events[-1]["result"] == result(ASK)
    assert node.requests == [ASK]


async def test_a_run_comes_as_it_happens(home: Home) -> None:
    async with serving(home, FakeNode(pace_s=0.2)):
        when = []
        await in_thread(home, lambda c: when.extend(time.monotonic() for _ in c.run(ASK)))
    assert when[-1] - when[0] > 0.6


async def test_a_refused_run_has_its_reason_and_status(home: Home) -> None:
    for fault, status in (
        (MeshError("context_exceeded", "too long"), 413),
        (MeshError("unknown_model", "nobody knows it"), 404),
        (MeshError("no_route", "layers 10-20 are missing", hint="start one"), 503),
        (ExceptionGroup("", [ExceptionGroup("", [MeshError("deadline", "too slow")])]), 504),
    ):
        async with serving(home, FakeNode(on_open=fault)):
            error = await raised_in_thread(home, lambda c: list(c.run(ASK)))
            answer = await raw(home, "POST", "/run", json=ASK.to_json())
        assert answer.status_code == status
        assert answer.json()["error"] == {"code": error.code, "message": error.message, "hint": error.hint}
        assert error.code in ("context_exceeded", "unknown_model", "no_route", "deadline")


async def test_a_run_that_fails_midway_says_so_after_its_text(home: Home) -> None:
    async with serving(home, FakeNode(fail_at=3)):
        seen: list[str] = []
        error = await raised_in_thread(home, lambda c: seen.extend(e.get("text", "") for e in c.run(ASK)))
        answer = await raw(home, "POST", "/run", json=ASK.to_json())
    assert (error.code, error.message) == ("hop_failed", "the middle is gone")
    assert "".join(seen) == "The answer is"
    last = json.loads(answer.text.splitlines()[-1])
    assert last["event"] == "error"
    assert last["text"] == "The answer is"


async def test_an_unforeseen_fault_tells_its_log_alone(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(home, FakeNode(fail_at=0, fault=ZeroDivisionError("secret detail"))):
        error = await raised_in_thread(home, lambda c: list(c.run(ASK)))
    assert error.code == "internal"
    assert "secret detail" not in error.message
    assert "secret detail" in caplog.text


async def test_who_leaves_cancels(home: Home) -> None:
    node = FakeNode(pace_s=0.05)
    long = RunRequest("smollm2", "hi", max_tokens=1000)
    async with serving(home, node):

        def begin(connection: Control) -> None:
            for event in connection.run(long):
                if event["event"] == "token":
                    assert node.runs == 1
                    return  # the connection closes

        await in_thread(home, begin)
        await until(lambda: node.runs == 0)
        assert node.begun == 1


async def test_who_leaves_before_the_first_event_cancels(home: Home) -> None:
    node = FakeNode(pace_s=60)
    node._events = lambda request: _never()
    async with serving(home, node):
        with home.connect_path() as path:
            async with await trio.open_unix_socket(path) as stream:
                body = json.dumps(ASK.to_json())
                head = f"POST /run HTTP/1.1\r\nHost: node\r\nContent-Length: {len(body)}\r\n\r\n"
                await stream.send_all((head + body).encode())
                await until(lambda: node.runs == 1)
        await until(lambda: node.runs == 0)


async def _never() -> AsyncIterator[dict[str, object]]:
    await trio.sleep_forever()
    yield {}


async def test_runs_at_once_do_not_touch_each_other(home: Home) -> None:
    node = FakeNode(pace_s=0.02)
    async with serving(home, node), trio.open_nursery() as nursery:
        done = []

        async def one(count: int) -> None:
            ask = RunRequest("smollm2", "hi", max_tokens=count)
            events = await in_thread(home, lambda c: list(c.run(ask)))
            done.append((count, len(events)))

        for count in (2, 4, 8, 16):
            nursery.start_soon(one, count)
        await until(lambda: len(done) == 4, 5)
        assert sorted(done) == [(2, 4), (4, 6), (8, 10), (16, 18)]


async def test_signs_of_life(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "ALIVE_S", 0.05)
    async with serving(home, FakeNode(pace_s=0.4)):
        answer = await raw(home, "POST", "/run", json=ASK.to_json() | {"max_tokens": 1})
        events = await in_thread(home, lambda c: list(c.run(RunRequest("smollm2", "hi", max_tokens=1))))
    assert answer.text.count("\n\n") >= 2
    assert [event["event"] for event in events] == ["route", "token", "done"]


async def test_a_client_that_stopped_reading_does_not_hold_the_node(home: Home) -> None:
    node = FakeNode()
    ask = json.dumps(RunRequest("smollm2", "hi", max_tokens=1 << 20).to_json())
    with trio.fail_after(20):
        with socket.socket(socket.AF_UNIX) as client:
            async with serving(home, node):
                with home.connect_path() as path:
                    client.connect(path)
                head = f"POST /run HTTP/1.1\r\nHost: node\r\nContent-Length: {len(ask)}\r\n\r\n"
                client.sendall((head + ask).encode())
                await until(lambda: node.runs == 1)
                await trio.sleep(1)  # the socket is full
            assert node.runs == 0


async def test_stop_is_answered_first(home: Home) -> None:
    node = FakeNode()
    home.create()
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            await nursery.start(control.serve_control, node, home)
            nursery.start_soon(in_thread, home, lambda c: c.stop())
            await node.stopped.wait()
            nursery.cancel_scope.cancel()


async def test_the_end_of_the_node_ends_its_runs_with_a_reason(home: Home) -> None:
    node = FakeNode(pace_s=0.05)
    errors = []

    async def ask() -> None:
        errors.append(await raised_in_thread(home, lambda c: list(c.run(RunRequest("m", "hi", max_tokens=1000)))))

    async with trio.open_nursery() as nursery:
        async with serving(home, node):
            nursery.start_soon(ask)
            await until(lambda: node.runs == 1)
            await trio.sleep(0.1)
    assert errors[0].code == "no_node"


async def test_no_node(home: Home) -> None:
    assert (await raised_in_thread(home, lambda c: c.status())).code == "no_node"
    home.create()
    assert (await raised_in_thread(home, lambda c: c.status())).code == "no_node"
    home.bind_control().close()  # of a node that was killed
    assert (await raised_in_thread(home, lambda c: c.status())).code == "no_node"


@pytest.mark.parametrize(
    ("method", "path", "rest", "status", "code"),
    [
        ("GET", "/nothing", {}, 404, "usage"),
        ("GET", "/run", {}, 405, "usage"),
        ("POST", "/run", {"content": b"{"}, 400, "usage"),
        ("POST", "/run", {"content": b"[" * 100_000}, 400, "usage"),
        ("POST", "/run", {"content": b"[]"}, 400, "usage"),
        ("POST", "/run", {"content": b"\xff"}, 400, "usage"),
        ("POST", "/run", {"content": b'{"model": "m", "prompt": "hi"}'.ljust(control.MAX_BODY + 1)}, 400, "usage"),
        ("POST", "/run", {"json": {"model": "m", "prompt": ""}}, 400, "bad_prompt"),
        ("POST", "/run", {"json": {"model": "m", "prompt": "x" * 600_000}}, 413, "context_exceeded"),
        ("GET", "/route", {}, 400, "usage"),
        ("GET", "/route?model=other", {}, 404, "unknown_model"),
        ("POST", "/invite", {"json": {"expires_s": "soon"}}, 400, "usage"),
        ("POST", "/invite", {"json": {"expires_s": -5}}, 400, "usage"),
        ("POST", "/connect", {"json": {"addresses": []}}, 400, "usage"),
        ("POST", "/connect", {"json": {"addresses": [5]}}, 400, "usage"),
    ],
)
async def test_bad_requests(home: Home, method: str, path: str, rest: dict, status: int, code: str) -> None:
    async with serving(home, FakeNode()):
        answer = await raw(home, method, path, **rest)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert (await raw(home, "GET", "/status")).status_code == 200


async def test_a_request_that_never_ends(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "BODY_S", 0.2)
    async with serving(home, FakeNode()):
        with home.connect_path() as path:
            async with await trio.open_unix_socket(path) as stream:
                await stream.send_all(b"POST /run HTTP/1.1\r\nHost: node\r\nContent-Length: 100\r\n\r\nab")
                with trio.fail_after(5):
                    assert b"504" in await stream.receive_some(1000)


async def test_nothing_on_the_terminal(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("meshnode").setLevel(logging.WARNING)
    async with serving(home, FakeNode()):
        await raw(home, "GET", "/status")
    assert capfd.readouterr() == ("", "")


async def test_descriptors_come_back(home: Home) -> None:
    async with serving(home, FakeNode()):
        await raw(home, "GET", "/status")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        async with serving(home, FakeNode()):
            await in_thread(home, lambda c: list(c.run(ASK)))
    assert len(os.listdir("/proc/self/fd")) <= before
