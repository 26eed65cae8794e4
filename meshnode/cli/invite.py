"""meshnode invite"""

from __future__ import annotations

import sys

import click

from ..api.connect import Control
from ..config import write_private
from ..wire.invite import parse
from . import show
from .options import common, duration, home_of, path_of


@click.command("invite")
@click.option("--out", metavar="FILE", help="Write it to FILE, readable by you alone, instead of the terminal.")
@click.option("--expires", metavar="TIME", default="7d", show_default=True, help="How long it lets machines in.")
@common
def command(out: str | None, expires: str, home: str | None, as_json: bool) -> None:
    """Write an invite that lets another machine into this mesh.

    Whoever has the invite is in: pass it on as you would a password.
    """
    lasts = duration(expires)
    with Control(home_of(home)) as node:
        line = node.invite(lasts)
    if out is not None:
        write_private(path_of(out).absolute(), line + "\n")
    if as_json:
        invite = parse(line)
        said = {"mesh_id": invite.mesh_id, "addresses": list(invite.addresses), "expires": invite.expires}
        show.as_json(said | ({"file": out} if out is not None else {"invite": line}))
    elif out is None:
        click.echo(line)
    else:
        show.note(f"{out} lets a machine in: meshnode serve MODEL.gguf --join {out}")
    if out is None and sys.stdout.isatty() and not as_json:
        show.note("Whoever has this line is in. Save it to a file there, and: meshnode serve MODEL.gguf --join FILE")
