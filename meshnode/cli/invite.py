"""meshnode invite"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ..api.connect import Control
from ..config import write_private
from ..errors import MeshError
from ..mesh import OVERLAP_S
from ..wire.invite import FAMILY, parse
from . import show
from .options import common, duration, home_of, path_of


@click.command("invite")
@click.option("--out", metavar="FILE", help="Write it to FILE, readable by you alone, instead of the terminal.")
@click.option("--expires", metavar="TIME", default="7d", show_default=True, help="How long it lets machines in.")
@click.option("--rotate", is_flag=True, help="Give the mesh a new secret first; members get it from each other.")
@click.option(
    "--overlap", metavar="TIME", help="With --rotate: how long the secret before it, and its invites, count; 24h."
)
@common
def command(out: str | None, expires: str, rotate: bool, overlap: str | None, home: str | None, as_json: bool) -> None:
    """Write an invite that lets another machine into this mesh.

    Whoever has the invite is in: pass it on as you would a password. With --rotate no invite of before lets anybody in
    once the overlap is over, nor does the mesh know peers that `meshnode peers deny` has named.
    """
    lasts = duration(expires)
    if overlap is not None and not rotate:
        raise MeshError("usage", "--overlap needs --rotate", hint="an invite's own time is --expires")
    overlaps = OVERLAP_S if overlap is None else 0.0 if overlap.strip() in ("0", "0s") else duration(overlap)
    path = None if out is None else _writable(out)
    with Control(home_of(home)) as node:
        if rotate:
            node.rotate(overlaps)
        line = node.invite(lasts)
    if path is not None:
        try:
            write_private(path, line + "\n")
        except MeshError as error:
            raise MeshError("bad_output", f"--out: {error.message}", hint="give another --out") from error
    if as_json:
        invite = parse(line)
        said = {"mesh_id": invite.mesh_id, "addresses": list(invite.addresses), "expires": invite.expires}
        show.as_json(said | ({"file": out} if out is not None else {"invite": line}))
    elif out is None:
        click.echo(line)
    else:
        show.note(f"{out} lets a machine in for {expires}: meshnode serve MODEL.gguf --join {out}")
    if out is None and sys.stdout.isatty() and not as_json:
        show.note(
            f"Whoever has this line within {expires} is in. Save it to a file there, and: "
            "meshnode serve MODEL.gguf --join FILE"
        )


def _writable(out: str) -> Path:
    """Where the invite goes. MeshError usage when something else lies there: only an invite is replaced by one."""
    if not out.strip():
        raise MeshError("usage", "--out is empty", hint="name a file, or leave --out out")
    path = path_of(out).absolute()
    try:
        if path.is_file():
            with path.open("rb") as file:
                replaceable = file.read(len(FAMILY)) == FAMILY.encode()
        else:
            replaceable = not path.exists() and not path.is_symlink()
    except OSError as error:
        raise MeshError("bad_output", f"--out: {path} cannot be used: {error.strerror}") from error
    if not replaceable:
        raise MeshError("usage", f"{show.line(out)} exists and is no invite", hint="give --out a new name")
    return path
