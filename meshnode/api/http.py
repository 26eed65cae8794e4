"""The HTTP API: OpenAI's endpoints, health, metrics and the page, in the node's own process.

GET  /v1/models /v1/models/{id} /health /health/live /health/ready /metrics /openapi.json /mesh
POST /v1/chat/completions /v1/completions /tokenize

Everything else, of OpenAI's too, is refused in OpenAI's shape. Loopback alone without a key.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import hypercorn
import trio
from hypercorn.config import Sockets
from hypercorn.trio.run import worker_serve
from hypercorn.utils import wrap_app
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from ..errors import MeshError, root_cause
from . import control, hangup, page
from .control import BODY_S, MAX_BODY, Backend, as_mesh_error
from .guard import OPEN_TO_ALL, Guard, is_loopback
from .meter import CONTENT_TYPE, Meter
from .openai import asked, document
from .openai import fault as faults
from .openai.endpoints import Answering
from .openai.fault import Fault
from .openai.line import Line

PORT = 8571  # of nobody else, as far as is known; where it is taken, any free one is used
DEFAULT = f"127.0.0.1:{PORT}"
MAX_DRAINED = 8 * MAX_BODY  # of a request that is too long: whoever is cut off while sending does not hear why
_Handler = Callable[[Request], Awaitable[Response]]


def listen(where: str, *, key: str | None) -> list[socket.socket]:
    """Listening sockets at HOST:PORT. MeshError usage, bad_config beyond the loopback without a key, port_in_use."""
    host, colon, port = where.rpartition(":")
    host = host.strip("[]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise MeshError("usage", f"{where[:80]!r} is no HOST:PORT", hint="--http 127.0.0.1:8571, or --http off")
    if key is None and not is_loopback(host):
        message = f"the HTTP API listens beyond this machine ({host[:60]}) only with an API key"
        raise MeshError("bad_config", message, hint="give --api-key-file FILE, or --http 127.0.0.1:PORT")
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        bound = socket.socket(kind, socket.SOCK_STREAM)
    except OSError as error:
        raise MeshError("bad_config", f"{host[:60]!r} is no address of this machine") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(128)
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        raise MeshError(
            "port_in_use", f"{where} cannot be listened on: {error.strerror}", hint="give another --http"
        ) from error
    return [bound]


def listen_somewhere(where: str | None, *, key: str | None) -> list[socket.socket]:
    """None: the usual port, or where another has it any free one. `off`: nowhere."""
    if where == "off":
        return []
    if where is not None:
        return listen(where, key=key)
    try:
        return listen(DEFAULT, key=key)
    except MeshError as error:
        if error.code != "port_in_use":
            raise
        return listen("127.0.0.1:0", key=key)


def url_of(bound: socket.socket) -> str:
    """http://HOST:PORT of a listening socket."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def serve_http(
    backend: Backend,
    bound: list[socket.socket],
    key: str | None,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,  # type: ignore[name-defined]  # libp2p brings old stubs
) -> None:
    """Serves on sockets of `listen` until it is cancelled, then closes them; started once it answers."""
    config = hypercorn.Config()
    config.errorlog = control.log
    config.include_server_header = False
    config.graceful_timeout = 0.5  # an answer under way is cancelled with the node
    config.keep_alive_timeout = 60
    try:
        async with trio.open_nursery() as nursery:
            for one in bound:
                nursery.start_soon(hangup.at_end, one)
            app = wrap_app(http_app(backend, key), MAX_BODY, "asgi")
            await nursery.start(partial(worker_serve, app, config, sockets=Sockets([], list(bound), [])))
            task_status.started()
    finally:
        for one in bound:
            one.close()


def http_app(backend: Backend, key: str | None) -> Guard:
    line, meter = Line(backend), Meter()

    async def chat(request: Request) -> Response:
        return Answering(line, meter, asked.chat(await _body(request)))

    async def completion(request: Request) -> Response:
        return Answering(line, meter, asked.completion(await _body(request)))

    async def tokenize(request: Request) -> Response:
        fields = asked.Fields(await _body(request))
        model = fields.must("model", asked.text)
        prompt = fields.take("prompt", asked.text, None)
        turns = fields.take("messages", asked.messages, asked.NOTHING)
        fields.done()
        tokens = await backend.tokenize(model, prompt, turns)
        return JSONResponse({"tokens": tokens, "count": len(tokens)})

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(model) for model in await backend.models()]})

    async def model(request: Request) -> Response:
        named = request.path_params["name"]
        for one in await backend.models():
            if named in (one["name"], one["artifact"]):
                return JSONResponse(_model(one))
        raise faults.of(MeshError("unknown_model", f"the model {named[:200]!r} is not offered by this mesh"))

    async def live(request: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(request: Request) -> Response:
        whole = [model["name"] for model in await backend.models() if not model["missing"]]
        said = {"live": True, "ready": bool(whole), "models": whole}
        return JSONResponse(said, 200 if whole else 503)

    async def metrics(request: Request) -> Response:
        status, models, peers = backend.status(), await backend.models(), await backend.peers()
        return PlainTextResponse(
            meter.text(
                {
                    "ready": (any(not model["missing"] for model in models), "1: a whole route exists."),
                    "models": (len(models), "Models that anybody in the mesh holds layers of."),
                    "peers": (len(peers), "Peers that are connected."),
                    "sessions": (len(status["sessions"]), "Sessions that this node is a hop or the entry node of."),
                    "answers_running": (line.running, "Answers that are being made."),
                    "answers_waiting": (line.waiting, "Requests that wait for a session."),
                },
                peers,
            ),
            media_type=CONTENT_TYPE,
        )

    async def openapi(request: Request) -> Response:
        return JSONResponse(document.openapi())

    routes = [
        Route("/v1/chat/completions", _answering(chat), methods=["POST"]),
        Route("/v1/completions", _answering(completion), methods=["POST"]),
        Route("/tokenize", _answering(tokenize), methods=["POST"]),
        Route("/v1/models", _answering(models), methods=["GET"]),
        Route("/v1/models/{name:path}", _answering(model), methods=["GET"]),
        Route("/health", _answering(ready), methods=["GET"]),
        Route("/health/ready", _answering(ready), methods=["GET"]),
        Route("/health/live", _answering(live), methods=["GET"]),
        Route("/metrics", _answering(metrics), methods=["GET"]),
        Route("/openapi.json", _answering(openapi), methods=["GET"]),
        *page.routes(backend),
    ]
    handlers: Any = {HTTPException: _not_offered, Exception: _unforeseen}
    return Guard(Starlette(routes=routes, exception_handlers=handlers), key, OPEN_TO_ALL | page.PUBLIC)


def _model(model: dict[str, Any]) -> dict[str, Any]:
    """As OpenAI lists one, and what a mesh knows of it."""
    own = {key: model[key] for key in ("artifact", "architecture", "n_layer", "missing")}
    return {"id": model["name"], "object": "model", "created": 0, "owned_by": "meshnode", "meshnode": own}


def _answering(handler: _Handler) -> _Handler:
    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except Exception as error:
            cause = root_cause(error)
            return (cause if isinstance(cause, Fault) else faults.of(as_mesh_error(error))).response()

    return answer


async def _not_offered(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:80]}"
    message = f"{what} takes another method" if error.status_code == 405 else f"{what} is not offered here"
    fault = Fault(message, code="unknown_url", status=error.status_code, hint="see /openapi.json for what is")
    answer = fault.response()
    answer.headers.update(error.headers or {})
    return answer


async def _unforeseen(request: Request, error: Exception) -> Response:
    return faults.of(as_mesh_error(error)).response()


async def _body(request: Request) -> Any:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Fault("the request's content-type is application/json", status=415, code="unsupported_media_type")
    raw, size = bytearray(), 0
    with trio.move_on_after(BODY_S) as scope:
        async for chunk in request.stream():
            size += len(chunk)
            if size <= MAX_BODY:
                raw += chunk
            elif size > MAX_DRAINED:
                break
    if size > MAX_BODY:
        raise Fault(f"a request has at most {MAX_BODY} bytes", status=413, code="request_too_large")
    if scope.cancelled_caught:
        raise Fault("the request did not arrive in time", status=408, code="deadline")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Fault("we could not parse the JSON body of your request", code="bad_json") from error
