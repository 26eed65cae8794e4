"""meshnode status"""

from __future__ import annotations

import sys
from typing import Any

import click

from ..api.connect import Control
from . import show
from .options import common, home_of


@click.command("status")
@common
def command(home: str | None, as_json: bool) -> None:
    """Show the node of this home: holdings, sessions, addresses."""
    with Control(home_of(home)) as node:
        status = node.status()
    if as_json:
        show.as_json(status)
        return
    show.facts(
        [("peer", status["peer"]), ("mesh", status["mesh_id"]), ("state", status["state"]), ("process", status["pid"])]
        + ([("secret", f"generation {status['generation']}")] if status.get("generation") else [])
        + [("address", address) for address in status["addresses"]]
        + [("api", url) for url in status["api"]]
        + ([("alone", "no peer is connected")] if status.get("alone") else [])
    )
    _section("Holdings", ("model", "layers", "of", "state"), [_holding(h) for h in status["holdings"]])
    sessions = [
        (
            s["session"],
            s["epoch"],
            show.layers(s["effective"]) if s.get("effective") else "-",  # an entry node computes none
            s.get("positions", "-"),
            s.get("role", "-"),
        )
        for s in status["sessions"]
    ]
    _section("Sessions", ("session", "epoch", "layers", "positions", "role"), sessions)


def _section(title: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    if not rows:
        return
    if sys.stdout.isatty():
        click.echo(f"\n{title}")
        show.table(columns, rows)
    else:
        show.table(columns, [(title.lower().removesuffix("s"), *row) for row in rows])


def _holding(holding: dict[str, Any]) -> tuple[Any, ...]:
    return (
        holding.get("name") or holding.get("artifact") or "-",
        show.layers(holding["layers"]) if holding.get("layers") else "all",
        holding.get("n_layer") or "-",
        holding_state(holding),
    )


def holding_state(holding: dict[str, Any]) -> str:
    """`ready`, `hashing 40 %`, `failed: bad_gguf: ...`"""
    state: str = holding["state"]
    if state == "failed":
        return f"failed: {error_text(holding.get('error'))}"
    part = holding.get("progress")
    return f"{state} {100 * part:.0f} %" if part is not None and state in ("hashing", "loading") else state


def error_text(error: Any) -> str:
    if isinstance(error, dict):
        return f"{error.get('code')}: {error.get('message')}"
    return str(error or "see the node's log")
