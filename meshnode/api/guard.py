"""Who may use the HTTP API: whoever has the key; without a key, programs of this machine, but no page of another site.

A browser sends a page's requests to any address, the loopback's too. A page of another origin is told apart by its
Origin, or, where its host name was made to mean this machine, by the Host that the request is for.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import MeshError
from .openai.fault import Fault

KEY_BYTES = (16, 512)  # shorter ones can be tried out
OPEN_TO_ALL = frozenset(("/health", "/health/live", "/health/ready"))
_SAFE_SITES = (None, "same-origin", "none")  # of Sec-Fetch-Site; a browser says it of every request


def is_loopback(host: str) -> bool:
    """Whether a name or address, as a Host header or an option has it, can only be this machine's own."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_key(path: Path) -> str:
    """The key in a file. MeshError bad_config for one that is no key or that others may read."""
    try:
        with path.open("rb") as file:
            raw = file.read(KEY_BYTES[1] + 2).strip()
            mode = path.stat().st_mode
    except OSError as error:
        raise MeshError("bad_config", f"the API key's file cannot be read: {error.strerror}") from error
    if mode & 0o077:
        raise MeshError("bad_config", "the API key's file can be read by others", hint=f"chmod 600 {path}")
    if not KEY_BYTES[0] <= len(raw) <= KEY_BYTES[1] or not all(33 <= byte < 127 for byte in raw):
        message = f"an API key is {KEY_BYTES[0]} to {KEY_BYTES[1]} visible ASCII characters on a line"
        raise MeshError("bad_config", message, hint="openssl rand -hex 32 > FILE")
    return raw.decode()


class Guard:
    """An ASGI application in front of another."""

    def __init__(self, app: ASGIApp, key: str | None, public: frozenset[str] = OPEN_TO_ALL) -> None:
        self._app = app
        self._key = key.encode() if key is not None else None
        self._public = public  # paths that hold nothing of the mesh: the page's files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # of which there are none
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        fault = self.fault(scope["path"], Headers(scope=scope))
        if fault is not None:
            await fault.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def fault(self, path: str, headers: Mapping[str, str]) -> Fault | None:
        """Why a request is refused, if it is."""
        host = headers.get("host", "")
        if self._key is None and not is_loopback(_name_of(host)):
            return Fault("the request is for another host", code="wrong_host", status=403)
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return Fault("pages of other sites may not ask", code="wrong_origin", status=403)
        if site not in _SAFE_SITES and headers.get("sec-fetch-mode") != "navigate":
            return Fault("pages of other sites may not ask", code="wrong_origin", status=403)
        if self._key is None or path in self._public:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._key):
            return None
        said = "Incorrect API key provided" if given else "You didn't provide an API key: Authorization: Bearer KEY"
        return Fault(said, code="invalid_api_key", status=401)


def _name_of(host: str) -> str:
    """`[::1]:80` -> `::1`"""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
