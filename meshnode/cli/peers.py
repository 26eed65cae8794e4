"""meshnode peers, peers deny PEER, peers allow PEER"""

from __future__ import annotations

import click

from ..api.connect import Control
from . import show
from .options import common, home_of


@click.group("peers", context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@common
@click.pass_context
def command(context: click.Context, home: str | None, as_json: bool) -> None:
    """List the peers that the node is connected to, and those that it denies."""
    context.obj = (home, as_json)
    if context.invoked_subcommand is not None:
        return
    with Control(home_of(home)) as node:
        peers, denied = node.peers(), node.denied()
    if as_json:
        show.as_json({"peers": peers, "denied": denied})
        return
    rows = [
        (
            p["peer"],
            p["address"],
            p["direction"],
            _unit(p.get("rtt_ms"), "ms"),
            _unit(p.get("bandwidth_mb_s"), "MB/s"),
            f"{p.get('since_s') or 0:.0f} s",
        )
        for p in peers
    ]
    nothing = "No peer is connected. Invite one: meshnode invite"
    show.table(("peer", "address", "dialled", "round trip", "bandwidth", "since"), rows, nothing=nothing)
    for peer in denied:
        show.note(f"denied {peer}")


@command.command("deny")
@click.argument("peer")
@common
@click.pass_obj
def deny(group: tuple[str | None, bool], peer: str, home: str | None, as_json: bool) -> None:
    """Have nothing to do with PEER: no connection, no route over it. Its connections are closed at once.

    Other nodes decide for themselves. `meshnode invite --rotate` then keeps the mesh's next secret from it.
    """
    _decide(group, peer, home, as_json, deny=True)


@command.command("allow")
@click.argument("peer")
@common
@click.pass_obj
def allow(group: tuple[str | None, bool], peer: str, home: str | None, as_json: bool) -> None:
    """Take PEER off the list of the denied."""
    _decide(group, peer, home, as_json, deny=False)


def _decide(group: tuple[str | None, bool], peer: str, home: str | None, as_json: bool, *, deny: bool) -> None:
    with Control(home_of(home if home is not None else group[0])) as node:
        denied = node.deny(peer, deny=deny)
    if as_json or group[1]:
        show.as_json({"denied": denied})
    else:
        show.note(f"{peer} is {'denied' if deny else 'allowed'}")


def _unit(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.1f} {unit}"
