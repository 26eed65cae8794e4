"""The other end of the control API: a running node, as the commands see it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Iterator
from types import TracebackType
from typing import Any

import httpx

from ..config import Home
from ..errors import MeshError
from .requests import RunRequest

ANSWER_S = 30.0  # the node bounds its own searches well under this
SILENCE_S = 60.0  # of a run: a route is found or given up well under this, and then come signs of life


class Control:
    """A connection to the node of a home; a context manager. MeshError no_node when none runs.

    What the node refuses is raised as the MeshError that it said.
    """

    def __init__(self, home: Home, *, patience_s: float = ANSWER_S) -> None:
        self._home = home
        self._patience_s = patience_s  # for all but a run
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> Control:
        path = self._closing.enter_context(self._home.connect_path())
        transport = httpx.HTTPTransport(uds=path)
        client = httpx.Client(transport=transport, base_url="http://node", trust_env=False)
        self._client = self._closing.enter_context(client)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._closing.close()

    def status(self) -> dict[str, Any]:
        return self._ask("GET", "/status")

    def peers(self) -> list[dict[str, Any]]:
        return self._ask("GET", "/peers")["peers"]  # type: ignore[no-any-return]

    def models(self) -> list[dict[str, Any]]:
        return self._ask("GET", "/models")["models"]  # type: ignore[no-any-return]

    def route(self, model: str) -> dict[str, Any]:
        return self._ask("GET", "/route", params={"model": model})

    def invite(self, expires_s: float) -> str:
        return self._ask("POST", "/invite", json={"expires_s": expires_s})["invite"]  # type: ignore[no-any-return]

    def rotate(self, overlap_s: float) -> dict[str, Any]:
        return self._ask("POST", "/rotate", json={"overlap_s": overlap_s})

    def denied(self) -> list[str]:
        return self._ask("GET", "/denied")["denied"]  # type: ignore[no-any-return]

    def deny(self, peer: str, *, deny: bool = True) -> list[str]:
        """Who is denied then."""
        return self._ask("POST", "/denied", json={"peer": peer, "deny": deny})["denied"]  # type: ignore[no-any-return]

    def connect(self, addresses: list[str]) -> None:
        self._ask("POST", "/connect", json={"addresses": addresses})

    def audit(self, name: str) -> list[dict[str, Any]]:
        return self._ask("POST", "/audit", json={"receipt": name})["findings"]  # type: ignore[no-any-return]

    def stop(self) -> None:
        self._ask("POST", "/stop")

    def run(self, request: RunRequest) -> Generator[dict[str, Any], None, None]:
        """The events up to and with `done`; an error event is raised. Closing the iterator cancels the run."""
        with self._talking(), self._client.stream("POST", "/run", json=request.to_json(), timeout=SILENCE_S) as answer:
            if answer.status_code != 200:
                raise _refusal(answer.read(), answer.status_code)
            for line in answer.iter_lines():
                if not line:
                    continue
                event = _json(line)
                if event.get("event") == "error":
                    raise error_of(event)
                yield event
                if event.get("event") == "done":
                    return
        raise MeshError("no_node", "the node ended before its answer did")

    def _ask(self, method: str, path: str, **rest: Any) -> dict[str, Any]:
        with self._talking():
            answer = self._client.request(method, path, timeout=self._patience_s, **rest)
        if answer.status_code != 200:
            raise _refusal(answer.content, answer.status_code)
        return _json(answer.content)

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            raise MeshError("no_node", f"no node runs on {self._home.path}") from error
        except httpx.TimeoutException as error:
            raise MeshError("deadline", "the node does not answer", hint="see its log, or stop it") from error
        except httpx.HTTPError as error:
            raise MeshError("no_node", "the node ended before its answer did", hint="see its log") from error


def error_of(value: Any) -> MeshError:
    """The MeshError in {"error": {"code", "message", "hint"}}."""
    try:
        said = value["error"]
        return MeshError(str(said["code"]), str(said["message"]), hint=str(said["hint"]))
    except (TypeError, KeyError):
        return MeshError("internal", "the node answered what no node answers")


def _refusal(raw: bytes, status: int) -> MeshError:
    try:
        return error_of(_json(raw))
    except MeshError:
        return MeshError("internal", f"the node answered with status {status} and no reason")


def _json(raw: bytes | str) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise MeshError("internal", "the node answered what is no JSON") from error
    if not isinstance(value, dict):
        raise MeshError("internal", "the node answered what is no JSON object")
    return value
