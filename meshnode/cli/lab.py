"""meshnode lab up | run | status | down"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click

from .. import lab as labs
from ..api.connect import Control
from ..config import LIMITS, NUMERICS
from ..errors import MeshError
from . import show, simulate
from .answer import Answer
from .identify import identity_of
from .options import is_path, layers_option, path_of
from .run import NOT_YET, asking, prompt_of, request_of
from .serve import built_worker
from .status import holding_state

F = TypeVar("F", bound=Callable[..., Any])


@click.group("lab", context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """Try a whole private mesh on this machine: serving nodes and an entry node, each a process of its own.

    The entry node holds no weights; it finds the others by one address, as a stranger would.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def _common(function: F) -> F:
    function = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(function)
    return click.option(
        "--home", metavar="DIR", help="The lab's folder; else MESHNODE_LAB, else the XDG state folder."
    )(function)


def _shape(function: F) -> F:
    for option in reversed(
        (
            click.option("--nodes", type=int, help="Serving nodes; 3 if not given."),
            click.option("--layers", metavar="A-B,...", help="A range for each node; an even share if not given."),
            click.option(
                "--threads",
                type=click.IntRange(1, int(LIMITS["threads"][1])),
                help="Threads of each worker; the cores shared out if not given.",
            ),
            click.option("--numerics", type=click.Choice(NUMERICS), help=f"{NUMERICS[0]} if not given."),
        )
    ):
        function = option(function)
    return function


command.add_command(simulate.command)


@command.command("up")
@click.option("--model", required=True, metavar="MODEL.gguf")
@_shape
@_common
def up(
    model: str,
    nodes: int | None,
    layers: str | None,
    threads: int | None,
    numerics: str | None,
    home: str | None,
    as_json: bool,
) -> None:
    """Start a lab and leave it running; `lab down` ends it."""
    folder = _folder_of(home)
    plan = labs.plan(path_of(model), nodes, layers_option(layers), threads, numerics)
    with labs.busy(folder):
        if labs.find(folder) is not None:
            raise MeshError("home_in_use", f"a lab is up in {folder}", hint="end it with `meshnode lab down`")
        built_worker(os.environ.get("MESHNODE_WORKER"))
        lab = labs.up(folder, plan, _say(as_json))
    _show(lab, as_json)


@command.command("status")
@_common
def status(home: str | None, as_json: bool) -> None:
    """List the lab's nodes: process, peer, home, holdings and sessions of each."""
    _show(_found(home), as_json)


@command.command("down")
@_common
def down(home: str | None, as_json: bool) -> None:
    """End every node of the lab."""
    lab = _found(home)
    with labs.busy(lab.folder):
        lab.down()
    if as_json:
        show.as_json({"down": [member.name for member in lab.members]})
    else:
        show.note("the lab is down")


@command.command("run")
@click.option("--model", metavar="MODEL", help="A GGUF file, or a name; of a lab that is up its own if not given.")
@click.option("--prompt", metavar="TEXT", help="Raw text, or with --chat what a user says; else stdin.")
@click.option("--details", is_flag=True, help="Show route, receipts and speed even when not on a terminal.")
@asking
@_shape
@_common
def run(
    model: str | None,
    prompt: str | None,
    details: bool,
    nodes: int | None,
    layers: str | None,
    threads: int | None,
    numerics: str | None,
    home: str | None,
    as_json: bool,
    **ask: Any,
) -> None:
    """Ask a lab: the one that is up, else one that is brought up for this question and taken down again."""
    if model is None and labs.find(folder := _folder_of(home)) is None:
        raise _no_model(folder)
    text = prompt_of(prompt)
    request_of(NOT_YET if model is None or is_path(model) else model, text, **ask)  # refused before anything starts
    answer = Answer(as_json=as_json, footer=details)
    with _lab_for(model, nodes, layers, threads, numerics, home, as_json) as lab:
        is_its_model = model is None or (is_path(model) and path_of(model).resolve() == lab.plan.model.resolve())
        artifact = lab.artifact if model is None or is_its_model else identity_of(model, lab.entry.home)
        request = request_of(artifact, text, **ask)
        with Control(lab.entry.home) as node:
            answer.take_all(node.run(request))


@contextlib.contextmanager
def _lab_for(
    model: str | None,
    nodes: int | None,
    layers: str | None,
    threads: int | None,
    numerics: str | None,
    home: str | None,
    as_json: bool,
) -> Iterator[labs.Lab]:
    folder = _folder_of(home)
    lab = labs.find(folder)
    if lab is None:
        if model is None:
            raise _no_model(folder)
        plan = labs.plan(path_of(model), nodes, layers_option(layers), threads, numerics)
        built_worker(os.environ.get("MESHNODE_WORKER"))
        with labs.passing(folder, plan, _say(as_json)) as lab:
            yield lab
        return
    if not lab.artifact or not lab.entry.alive:
        raise MeshError("no_node", f"the lab in {folder} is not whole", hint="end it with `meshnode lab down`")
    ranges = layers_option(layers)
    if (nodes is not None and nodes != len(lab.plan.layers)) or (ranges is not None and ranges != lab.plan.layers):
        up_now = ",".join(map(str, lab.plan.layers))
        hint = "leave out --nodes and --layers, or end it with `meshnode lab down`"
        raise MeshError("bad_config", f"the lab that is up has the layers {up_now}", hint=hint)
    if numerics not in (None, lab.plan.numerics):
        hint = "leave out --numerics, or end it with `meshnode lab down`"
        raise MeshError("bad_config", f"the lab that is up computes with {lab.plan.numerics} numerics", hint=hint)
    yield lab


def _no_model(folder: Path) -> MeshError:
    hint = "give --model MODEL.gguf, or start a lab with `meshnode lab up`"
    return MeshError("usage", f"no lab is up in {folder}, and no model is named", hint=hint)


def _folder_of(home: str | None) -> Path:
    folder = labs.folder_of(home)
    labs.sweep(folder)
    return folder


def _found(home: str | None) -> labs.Lab:
    folder = _folder_of(home)
    lab = labs.find(folder)
    if lab is None:
        raise MeshError("no_node", f"no lab is up in {folder}", hint="start one with `meshnode lab up`")
    return lab


def _say(as_json: bool) -> Callable[[str], None]:
    return show.note if sys.stderr.isatty() and not as_json else lambda _: None


def _show(lab: labs.Lab, as_json: bool) -> None:
    nodes = lab.status()
    if as_json:
        show.as_json({"home": str(lab.folder), "artifact": lab.artifact or None, "nodes": nodes})
        return
    rows = [
        (
            node["name"],
            node["pid"] if node["alive"] else "ended",
            node["peer"] or "-",
            "; ".join(f"{show.layers(h['layers'])} {holding_state(h)}" for h in node["holdings"]) or "no weights",
            show.count(len(node["sessions"]), "session"),
            node["home"],
        )
        for node in nodes
    ]
    show.table(("name", "process", "peer", "holds", "sessions", "home"), rows)
