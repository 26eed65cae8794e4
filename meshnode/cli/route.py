"""meshnode route MODEL"""

from __future__ import annotations

import sys
from typing import Any

import click

from ..api.connect import Control
from ..errors import MeshError
from . import endings, show
from .identify import identity_of
from .options import common, home_of


@click.command("route")
@click.argument("model")
@click.option("--explain", is_flag=True, help="Show every candidate of each hop: its cost, and why it is not taken.")
@common
def command(model: str, explain: bool, home: str | None, as_json: bool) -> None:
    """Show the route that MODEL would take, and why others cannot be in it.

    MODEL is a name, an identity, an unambiguous beginning of one, or the path of a GGUF file. Ends with the status of
    no_route when layers are missing.
    """
    where = home_of(home)
    with Control(where) as node:
        found = node.route(identity_of(model, where))
    missing = show.ranges(found["missing"])
    fault = MeshError(
        "no_route",
        f"no route covers the layers {missing}" if found["missing"] else "no route can be opened now",
        hint="each candidate above says why it is not used",
    )
    if as_json:
        show.as_json(found)
        if not found["complete"]:
            raise endings.Told(fault)
        return
    if found["complete"]:
        rows = [
            (number, hop["peer"], show.layers(hop["holding"]), show.layers(hop["effective"]))
            for number, hop in enumerate(found["hops"])
        ]
        show.table(("hop", "peer", "holds", "runs"), rows)
    if explain:
        _explain(found)
        if not found["complete"]:
            raise fault
        return
    taken = {hop["peer"] for hop in found["hops"]} if found["complete"] else set()  # one has no use for another layer
    unused = [c for c in found["candidates"] if not c["usable"] and c["peer"] not in taken]
    if sys.stdout.isatty() and unused:
        click.echo("\nNot used:" if found["complete"] else "Candidates that cannot be used:")
    if unused:
        reasons = [("-", c["peer"], show.layers(c["holding"]), c["reason"]) for c in unused]
        show.table(("", "peer", "holds", "reason"), reasons)
    if not found["complete"]:
        raise fault


def _explain(found: dict[str, Any]) -> None:
    """One table, the candidates of each hop together, the best of them first."""
    rows = []
    for layer in dict.fromkeys(c["layer"] for c in found["candidates"]):
        here = [c for c in found["candidates"] if c["layer"] == layer]
        here.sort(key=lambda c: (not c["taken"], not c["usable"], c["cost_ms"] or 0))
        for c in here:
            cost = "-" if c["cost_ms"] is None else f"{c['cost_ms']:.2f}"
            said = "taken" if c["taken"] else c["reason"]
            rows.append((layer, c["peer"], show.layers(c["holding"]), cost, said, c["next"] or ""))
    if sys.stdout.isatty():
        click.echo("\nCandidates, by the layer where a hop begins; costs in ms a token, from here to the tail:")
    show.table(("layer", "peer", "holds", "cost", "why", "next step"), rows)
