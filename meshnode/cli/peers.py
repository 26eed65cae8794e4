"""meshnode peers"""

from __future__ import annotations

import click

from ..api.connect import Control
from . import show
from .options import common, home_of


@click.command("peers")
@common
def command(home: str | None, as_json: bool) -> None:
    """List the peers that the node is connected to."""
    with Control(home_of(home)) as node:
        peers = node.peers()
    if as_json:
        show.as_json({"peers": peers})
        return
    rows = [
        (p["peer"], p["address"], p["direction"], _milliseconds(p.get("rtt_ms")), f"{p.get('since_s') or 0:.0f} s")
        for p in peers
    ]
    nothing = "No peer is connected. Invite one: meshnode invite"
    show.table(("peer", "address", "dialled", "round trip", "since"), rows, nothing=nothing)


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"
