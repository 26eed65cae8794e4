"""meshnode key show | export | import"""

from __future__ import annotations

import os
from pathlib import Path

import click

from ..config import Home, write_private
from ..errors import MeshError
from ..keys import EXPORT_FAMILY, NodeKey, export_line, import_line, load
from . import show
from .options import common, home_of, path_of

MAX_LINE = 256  # bytes of an exported key, and room for what an editor adds


@click.group("key", context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """Show, keep or move the key that a node is known by in every mesh."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@command.command("show")
@common
def show_(home: str | None, as_json: bool) -> None:
    """Tell which peer this home's key makes a node."""
    where = home_of(home)
    peer = _key_of(where).peer
    if as_json:
        show.as_json({"peer": peer, "home": str(where.path)})
    else:
        show.facts((("peer", peer), ("home", where.path)))


@command.command("export")
@click.argument("file")
@common
def export(file: str, home: str | None, as_json: bool) -> None:
    """Write the key to FILE, readable by you alone. Whoever has it can be this node: keep it like a password."""
    path = path_of(file).absolute()
    key = _key_of(home_of(home))
    if path.exists() or path.is_symlink():
        raise MeshError("usage", f"{show.line(file)} exists already", hint="give a new name")
    try:
        write_private(path, export_line(key) + "\n")
    except MeshError as error:
        raise MeshError("bad_output", error.message, hint="give another FILE") from error
    if as_json:
        show.as_json({"peer": key.peer, "file": str(path)})
    else:
        show.note(f"{file} holds the key of {key.peer}: meshnode key import {file}")


@command.command("import")
@click.argument("file")
@click.option("--replace", is_flag=True, help="Also when the home has another key, which is then lost.")
@common
def import_(file: str, replace: bool, home: str | None, as_json: bool) -> None:
    """Make this home's node the one whose key is in FILE. Two nodes that run with one key disturb each other."""
    where = home_of(home)
    key = _read(path_of(file), file)
    with where.lock():  # not under a node that runs
        if where.key_path.exists() and not replace and (old := load(where.key_path).peer) != key.peer:
            message = f"this home is already {old}"
            raise MeshError("bad_home", message, hint="give another --home, or --replace if that key is to be lost")
        write_private(where.key_path, key.seed)
    if as_json:
        show.as_json({"peer": key.peer, "home": str(where.path)})
    else:
        show.note(f"{where.path} is now {key.peer}")


def _key_of(home: Home) -> NodeKey:
    try:
        return load(home.key_path)
    except FileNotFoundError as error:
        hint = "`meshnode serve` makes one, `meshnode key import FILE` brings one"
        raise MeshError("bad_home", f"there is no key in {home.path} yet", hint=hint) from error


def _read(path: Path, named: str) -> NodeKey:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not hold us
        with open(descriptor, "rb") as file:
            line = file.read(MAX_LINE + 1)
    except FileNotFoundError as error:
        raise MeshError("not_found", f"there is no file {show.line(named)}") from error
    except OSError as error:
        raise MeshError("unreadable", f"{show.line(named)} cannot be read: {error.strerror}") from error
    try:
        return import_line(line.decode())
    except (UnicodeDecodeError, MeshError) as error:
        hint = f"name a file that `meshnode key export` wrote; it begins with {EXPORT_FAMILY}"
        raise MeshError("bad_key", f"{show.line(named)} holds no exported key", hint=hint) from error
