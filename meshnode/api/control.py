"""The control API: what the commands of this machine's owner ask of a running node, over a Unix socket in its home.

GET  /status /peers /models /route?model=M      one JSON object each
GET  /receipts?peer=P&since=T /receipts/ID /balances?peer=P      likewise
POST /audit {"receipt": the beginning of an id}
POST /invite {"expires_s"} /rotate {"overlap_s"} /connect {"addresses"} /stop
GET  /denied; POST /denied {"peer", "deny": true | false}
POST /run    a RunRequest; answered by lines of JSON, one event each, as they happen:
    {"event": "route", "route": [...]}
    {"event": "token", "id": 5, "text": "..."}          text may be empty: half a character waits for its other half
    {"event": "done", "result": {...}}                    or
    {"event": "error", "error": {...}, "text": "so far"}
    Empty lines are signs of life. Who disconnects cancels.

Every error is {"error": {"code", "message", "hint"}} with an HTTP status of its kind. Nothing here knows a path of a
model, and the socket is its owner's alone (mode 600), so there is no other authentication.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Protocol

import hypercorn
import trio
from hypercorn.config import Sockets
from hypercorn.trio.run import worker_serve
from hypercorn.utils import wrap_app
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ..config import INVITE_S, Home
from ..errors import MeshError, root_cause
from ..mesh import OVERLAP_S
from . import hangup
from .requests import RunRequest

log = logging.getLogger(__name__)

MAX_BODY = 4 << 20  # the longest prompt, each byte of it escaped as \u00xx, and room for the rest
BODY_S = 10.0  # for a request to arrive: its sender is on this machine
ALIVE_S = 5.0  # between signs of life of a run; the client gives up after a multiple of it
STATUS_OF_EXIT = {2: 400, 3: 422, 4: 404, 5: 413, 6: 409, 7: 502, 8: 403, 9: 503, 10: 502, 130: 499}
Event = dict[str, Any]


class Backend(Protocol):
    """What a node can be asked. Everything raises MeshError alone; values are plain JSON."""

    def status(self) -> dict[str, Any]:
        """{pid, peer, mesh_id, generation: of its secret | null, addresses, home, state: starting | ready | degraded,
        holdings: [{artifact, name, layers: [a, b], n_layer, state: hashing | loading | ready | failed, progress?,
        error?, worker?}], sessions: [{session, epoch, artifact, role: hop | entry, positions, effective?: [a, b] of a
        hop}], alone}"""

    async def peers(self) -> list[dict[str, Any]]:
        """[{peer, address, direction, rtt_ms, bandwidth_mb_s, since_s}]"""

    async def models(self) -> list[dict[str, Any]]:
        """[{artifact, name, architecture, n_layer, bytes: null unless it lies here, covered: [[a, b]],
        missing: [[a, b]], holders: [{peer, layers}], local}]"""

    async def route(self, model: str) -> dict[str, Any]:
        """{artifact, complete, hops: [{peer, holding, effective}], missing: [[a, b]], candidates: [{peer, holding,
        usable, reason}]}"""

    async def receipts(self, peer: str | None, since: int) -> list[dict[str, Any]]:
        """Sessions as meshnode.ledger.views has them. since: seconds since 1970."""

    async def receipt(self, name: str) -> dict[str, Any]:
        """One session, named by the beginning of its id."""

    async def audit(self, name: str) -> list[dict[str, Any]]:
        """[{receipt, peer, auditor, verdict, position, ended}]"""

    async def balances(self, peer: str | None) -> list[dict[str, Any]]:
        """[{peer, served, used}]"""

    async def invite(self, expires_s: float) -> str:
        """One line that lets a machine in."""

    def rotate(self, overlap_s: float) -> dict[str, Any]:
        """{mesh_id, generation}: the mesh has a new secret; the one before it counts for so long."""

    def denied(self) -> list[str]:
        """Peers that this node has nothing to do with."""

    def deny(self, peer: str) -> None: ...

    def allow(self, peer: str) -> None: ...

    async def connect(self, addresses: list[str]) -> None:
        """Dials the first of the multiaddrs that answers."""

    async def tokenize(self, model: str, prompt: str | None, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Ids of a raw text, or of (role, content) turns under the model's chat template."""

    def run(self, request: RunRequest) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        """The events of one request. Leaving the context cancels it, on every hop."""

    def stop(self) -> None:
        """Begins an orderly end."""


async def serve_control(
    backend: Backend,
    home: Home,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,  # type: ignore[name-defined]  # libp2p brings old stubs
) -> None:
    """Serves until it is cancelled; started once the socket listens. Only for who holds the home's lock."""
    config = hypercorn.Config()
    config.errorlog = log
    config.include_server_header = False
    config.graceful_timeout = 0.5  # an answer under way is cancelled with the node
    listener = home.bind_control()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hangup.at_end, listener)
            sockets = Sockets([], [listener], [])
            app = wrap_app(control_app(backend), MAX_BODY, "asgi")
            await nursery.start(partial(worker_serve, app, config, sockets=sockets))
            task_status.started()
    finally:
        listener.close()
        home.unbind_control()


def control_app(backend: Backend) -> Starlette:
    async def status(request: Request) -> Response:
        return JSONResponse(backend.status())

    async def peers(request: Request) -> Response:
        return JSONResponse({"peers": await backend.peers()})

    async def models(request: Request) -> Response:
        return JSONResponse({"models": await backend.models()})

    async def route(request: Request) -> Response:
        model = request.query_params.get("model", "")
        if not model:
            raise MeshError("usage", "name a model: /route?model=...")
        return JSONResponse(await backend.route(model))

    async def receipts(request: Request) -> Response:
        since = request.query_params.get("since", "0")
        if not since.isdecimal() or len(since) > 12:
            raise MeshError("usage", "since is a number of seconds since 1970")
        return JSONResponse({"receipts": await backend.receipts(request.query_params.get("peer"), int(since))})

    async def receipt(request: Request) -> Response:
        return JSONResponse(await backend.receipt(request.path_params["name"]))

    async def audit(request: Request) -> Response:
        name = (await _body(request)).get("receipt")
        if type(name) is not str:
            raise MeshError("usage", "receipt is the beginning of an id")
        return JSONResponse({"findings": await backend.audit(name)})

    async def balances(request: Request) -> Response:
        return JSONResponse({"balances": await backend.balances(request.query_params.get("peer"))})

    async def invite(request: Request) -> Response:
        expires_s = (await _body(request)).get("expires_s", INVITE_S)
        if type(expires_s) not in (int, float) or not 1 <= expires_s <= 10 * 365 * 86400:
            raise MeshError("usage", "an invite lasts from a second to ten years")
        return JSONResponse({"invite": await backend.invite(float(expires_s))})

    async def rotate(request: Request) -> Response:
        overlap_s = (await _body(request)).get("overlap_s", OVERLAP_S)
        if type(overlap_s) not in (int, float) or not 0 <= overlap_s <= 366 * 86400:
            raise MeshError("usage", "two secrets overlap for at most a year")
        return JSONResponse(backend.rotate(float(overlap_s)))

    async def denied(request: Request) -> Response:
        return JSONResponse({"denied": backend.denied()})

    async def deny(request: Request) -> Response:
        match await _body(request):
            case {"peer": str(peer), "deny": True}:
                backend.deny(peer)
            case {"peer": str(peer), "deny": False}:
                backend.allow(peer)
            case _:
                raise MeshError("usage", 'say {"peer": ..., "deny": true or false}')
        return JSONResponse({"denied": backend.denied()})

    async def connect(request: Request) -> Response:
        addresses = (await _body(request)).get("addresses")
        if not isinstance(addresses, list) or not addresses or any(type(a) is not str for a in addresses):
            raise MeshError("usage", "addresses are a list of multiaddrs")
        await backend.connect(addresses)
        return JSONResponse({"connected": True})

    async def stop(request: Request) -> Response:
        async def then() -> None:
            backend.stop()

        return JSONResponse({"stopping": True}, background=BackgroundTask(then))

    async def run(request: Request) -> Response:
        return _Events(backend, RunRequest.from_json(await _body(request)))

    def get(path: str, handler: _Handler) -> Route:
        return Route(path, _answering(handler), methods=["GET"])

    def post(path: str, handler: _Handler) -> Route:
        return Route(path, _answering(handler), methods=["POST"])

    return Starlette(
        routes=[
            get("/status", status),
            get("/peers", peers),
            get("/models", models),
            get("/route", route),
            get("/receipts", receipts),
            get("/receipts/{name}", receipt),
            get("/balances", balances),
            post("/audit", audit),
            post("/invite", invite),
            post("/rotate", rotate),
            get("/denied", denied),
            post("/denied", deny),
            post("/connect", connect),
            post("/stop", stop),
            post("/run", run),
        ],
        exception_handlers={HTTPException: _unknown_path},
    )


_Handler = Callable[[Request], Awaitable[Response]]


def _answering(handler: _Handler) -> _Handler:
    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except Exception as error:
            return error_response(as_mesh_error(error))

    return answer


async def _unknown_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = error_json(MeshError("usage", f"{request.method} {request.url.path[:80]} is nothing a node answers"))
    return JSONResponse(said, error.status_code)


async def _body(request: Request) -> dict[str, Any]:
    raw = bytearray()
    with trio.move_on_after(BODY_S) as scope:
        async for chunk in request.stream():
            raw += chunk
            if len(raw) > MAX_BODY:
                raise MeshError("usage", f"a request has at most {MAX_BODY} bytes")
    if scope.cancelled_caught:
        raise MeshError("deadline", "the request did not arrive in time")
    try:
        value = json.loads(raw or b"{}")
    except (ValueError, RecursionError) as error:
        raise MeshError("usage", "the request is no JSON") from error
    if not isinstance(value, dict):
        raise MeshError("usage", "the request is no JSON object")
    return value


class _Events(Response):
    """The events of one run as lines; the run ends when its client goes."""

    def __init__(self, backend: Backend, request: RunRequest) -> None:
        super().__init__(media_type="application/x-ndjson")
        del self.headers["content-length"]  # the base class has taken the empty body for the answer
        self.backend = backend
        self.request = request
        self.text = ""
        self.begun = False
        self.sending = trio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._until_gone, receive, nursery.cancel_scope)
            nursery.start_soon(self._signs_of_life, send)
            await self._answer(scope, receive, send)
            nursery.cancel_scope.cancel()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self.backend.run(self.request) as events:
                async for event in events:
                    self.text += event.get("text", "") if event["event"] == "token" else ""
                    await self._line(send, json.dumps(event))
        except Exception as error:
            fault = as_mesh_error(error)
            if not self.begun:  # an HTTP status can still say so
                await error_response(fault)(scope, receive, send)
                return
            await self._line(send, json.dumps({"event": "error"} | error_json(fault) | {"text": self.text}))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _line(self, send: Send, line: str) -> None:
        async with self.sending:
            if not self.begun:
                self.begun = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": line.encode() + b"\n", "more_body": True})

    async def _until_gone(self, receive: Receive, scope: trio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    async def _signs_of_life(self, send: Send) -> None:
        while True:
            await trio.sleep(ALIVE_S)
            if self.begun:
                await self._line(send, "")


def as_mesh_error(error: BaseException) -> MeshError:
    """What can be told of any fault; what nobody foresaw goes to the log with its traceback."""
    cause = root_cause(error)
    if isinstance(cause, MeshError):
        return cause
    log.error("unforeseen fault", exc_info=error)
    return MeshError("internal", f"{type(cause).__name__} in the node")


def error_json(error: MeshError) -> dict[str, Any]:
    return {"error": {"code": error.code, "message": error.message, "hint": error.hint}}


def error_response(error: MeshError) -> Response:
    status = 504 if error.code == "deadline" else STATUS_OF_EXIT.get(error.exit_status, 500)
    return JSONResponse(error_json(error), status)
