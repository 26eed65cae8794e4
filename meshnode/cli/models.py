"""meshnode models"""

from __future__ import annotations

import click

from ..api.connect import Control
from . import show
from .options import common, home_of


@click.command("models")
@common
def command(home: str | None, as_json: bool) -> None:
    """List the models known in the mesh, and which layers are missing."""
    with Control(home_of(home)) as node:
        models = node.models()
    if as_json:
        show.as_json({"models": models})
        return
    rows = [
        (
            model["name"],
            model["artifact"],
            model["n_layer"],
            "complete" if not model["missing"] else "missing " + show.ranges(model["missing"]),
            show.count(len({holder["peer"] for holder in model["holders"]}), "holder"),
            "here" if model["local"] else "",
        )
        for model in models
    ]
    nothing = "No model is known in the mesh. Hold one: meshnode serve MODEL.gguf"
    show.table(("name", "identity", "layers", "covered", "held by", ""), rows, nothing=nothing)
