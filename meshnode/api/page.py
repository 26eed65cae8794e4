"""What a page about the mesh is made of: one JSON document, and the places of its files."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ..errors import MeshError
from .control import Backend, error_json

PUBLIC = frozenset[str]()  # paths of files, which need no key


def routes(backend: Backend) -> list[BaseRoute]:
    async def mesh(request: Request) -> Response:
        return JSONResponse(await view(backend))

    return [Route("/mesh", mesh, methods=["GET"])]


async def view(backend: Backend) -> dict[str, Any]:
    """{node: what status says, peers, models, routes: {artifact: what route says, or {error}}}; no path in it."""
    node = {key: value for key, value in backend.status().items() if key not in ("home", "pid")}
    models = await backend.models()
    routes: dict[str, Any] = {}
    for model in models:
        try:
            routes[model["artifact"]] = await backend.route(model["artifact"])
        except MeshError as error:
            routes[model["artifact"]] = error_json(error)
    return {"node": node, "peers": await backend.peers(), "models": models, "routes": routes}
