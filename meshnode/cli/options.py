"""The options that commands share, and what their values mean."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ..config import Home
from ..errors import MeshError
from ..ids import Layers, parse_layers

F = TypeVar("F", bound=Callable[..., Any])
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def common(function: F) -> F:
    """--home and --json, which every command takes."""
    function = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(function)
    return click.option(
        "--home", metavar="DIR", help="The node's folder; else MESHNODE_HOME, else the XDG data folder."
    )(function)


def home_of(option: str | None) -> Home:
    return Home.resolve(option)


def layers_option(text: str | None) -> tuple[Layers, ...] | None:
    """`0-10,10-20` in the order given; None for `all` or nothing."""
    if text is None or text.strip() == "all":
        return None
    return tuple(parse_layers(part) for part in text.split(","))


def duration(text: str) -> float:
    """`90`, `90s`, `15m`, `12h`, `7d` -> seconds."""
    match = re.fullmatch(r"(\d{1,9})([smhd]?)", text.strip())
    if not match or int(match[1]) == 0:
        raise MeshError("usage", f"{text!r} is no duration", hint="write it like 30m, 12h or 7d")
    return float(int(match[1]) * _SECONDS[match[2]])


def listen_address(text: str) -> str:
    """A multiaddr, `HOST:PORT`, or `PORT` on all addresses -> a multiaddr."""
    if text.startswith("/"):
        return checked_multiaddr(text)
    host, _, port = text.rpartition(":")
    host = host.strip("[]") or "0.0.0.0"  # noqa: S104 - a node is there to be reached
    if not port.isdigit() or int(port) > 65535:
        raise MeshError(
            "usage", f"{text!r} is no address to listen on", hint="write PORT, HOST:PORT or /ip4/.../tcp/..."
        )
    kind = "ip6" if ":" in host else "ip4" if re.fullmatch(r"[\d.]+", host) else "dns"
    return checked_multiaddr(f"/{kind}/{host}/tcp/{port}")


def checked_multiaddr(text: str) -> str:
    """Itself; MeshError usage when it is none."""
    from multiaddr import Multiaddr  # late: it costs a tenth of a second that most commands need not spend

    try:
        return str(Multiaddr(text))
    except Exception as error:  # the library raises many kinds
        raise MeshError("usage", f"{text[:200]!r} is no multiaddr", hint="write /ip4/ADDRESS/tcp/PORT") from error


def is_path(model: str) -> bool:
    """Whether MODEL names a file: it has a slash or ends with .gguf. What lies in the folder does not matter."""
    return "/" in model or model.lower().endswith(".gguf")


def path_of(model: str) -> Path:
    return Path(model).expanduser()
