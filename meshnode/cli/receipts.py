"""meshnode receipts [list | show | export | verify]"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import click

from ..config import Home, write_private
from ..errors import MeshError
from ..ledger import views
from ..ledger.chain import VERIFIED
from ..ledger.store import Ledger, open_ledger
from . import show
from .endings import Told
from .options import common, duration, home_of, path_of

CHUNK = 256  # lines that a process takes at once
MAX_EXPORT = 1 << 30  # bytes that `verify` reads


@contextlib.contextmanager
def ledger_of(home: Home) -> Iterator[Ledger]:
    """The ledger of a home, whether a node runs there or not. MeshError not_found."""
    if not home.ledger_path.exists():
        hint = "a node that runs keeps one: meshnode serve"
        raise MeshError("not_found", f"there is no ledger in {home.path} yet", hint=hint)
    ledger = open_ledger(home.ledger_path)
    try:
        yield ledger
    finally:
        ledger.close()


@click.group("receipts", context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.option("--peer", metavar="PEER", help="Only sessions that this peer worked for, or asked for.")
@click.option("--since", metavar="DURATION", default="1d", show_default=True, help="How far back: 30m, 12h, 7d.")
@common
@click.pass_context
def command(context: click.Context, peer: str | None, since: str, home: str | None, as_json: bool) -> None:
    """List who computed what, as the receipts of this node's ledger say; show, export and verify them.

    A session is verified when nothing of it is missing and every two neighbours say the same, incomplete when
    something is missing, and disputed when somebody is at odds.
    """
    if context.invoked_subcommand is not None:
        return
    with ledger_of(home_of(home)) as ledger:
        found = views.receipts(ledger, peer=peer, since=int(time.time() - duration(since)))
    if as_json:
        return show.as_json({"receipts": found})
    rows = [
        (
            chain["id"][:12],
            _when(chain["ended"]),
            chain["verdict"],
            chain["artifact"].partition(":")[2][:12],
            " → ".join(f"{show.short(hop['peer'])} {show.layers(hop['layers'])}" for hop in chain["hops"]),
            max(hop["positions"] for hop in chain["hops"]),
        )
        for chain in found
    ]
    nothing = "No receipt is known. Ask something: meshnode run MODEL 'prompt'"
    show.table(("id", "ended", "verdict", "artifact", "route", "positions"), rows, nothing=nothing)
    return None


@command.command("show")
@click.argument("id_", metavar="ID")
@click.option(
    "--step", type=click.IntRange(0), metavar="POSITION", help="Open this one step of own receipts, with its proof."
)
@common
def show_(id_: str, step: int | None, home: str | None, as_json: bool) -> None:
    """Show one session: every hop and segment, what is missing, and who is at odds. ID is the beginning of one."""
    with ledger_of(home_of(home)) as ledger:
        if step is not None:
            return show.as_json({"steps": views.step(ledger, id_, step)})
        found = views.show(ledger, id_)
    if as_json:
        return show.as_json(found)
    for epoch in found["epochs"]:
        _show_epoch(found["id"], epoch)
    for finding in found["findings"]:
        where = f" at position {finding['position']}" if finding["verdict"] == "differs" else ""
        click.echo(f"audit     {show.short(finding['peer'])} {finding['verdict']}{where}, says {finding['auditor']}")
    return None


def _show_epoch(id_: str, epoch: dict[str, Any]) -> None:
    facts: list[tuple[str, Any]] = [
        ("session", f"{id_}, epoch {epoch['epoch']}"),
        ("artifact", epoch["artifact"]),
        ("asked by", epoch["entry"] or "unknown"),
        ("ended", _when(epoch["ended"])),
        ("verdict", epoch["verdict"]),
    ]
    facts += [("because", fault["say"]) for fault in epoch["faults"]]
    show.facts(facts)
    rows = [
        (s["hop"], s["peer"], s["segment"], s["positions"], s["steps"], f"{s['compute_ms']:.1f} ms", s["digest"][:12])
        for s in epoch["segments"]
    ]
    show.table(("hop", "peer", "segment", "positions", "steps", "compute", "receipt"), rows)


@command.command("export")
@click.argument("id_", metavar="[ID]", required=False)
@click.option("--out", required=True, metavar="FILE", help="Where to; - is stdout.")
@click.option("--since", metavar="DURATION", default="30d", show_default=True, help="How far back: 30m, 12h, 7d.")
@common
def export(id_: str | None, out: str, since: str, home: str | None, as_json: bool) -> None:
    """Write receipts to FILE, for anybody to verify; all of them, or of the session ID alone."""
    where = home_of(home)
    known = where.known_mesh()
    if known is None:
        raise MeshError("bad_home", f"{where.path} belongs to no mesh", hint="give the --home of a node")
    begin = int(time.time() - duration(since)) if id_ is None else 0
    with ledger_of(where) as ledger:
        lines = list(views.export(ledger, known.mesh.mesh_id, prefix=id_, since=begin))
    text = "".join(line + "\n" for line in lines)
    if out == "-":
        click.echo(text, nl=False)
        return
    try:
        write_private(path_of(out).absolute(), text)
    except MeshError as error:
        raise MeshError("bad_output", error.message, hint="give another --out") from error
    if as_json:
        show.as_json({"file": str(path_of(out).absolute()), "statements": len(lines) - 1})
    else:
        show.note(f"{out} holds {show.count(len(lines) - 1, 'statement')}: meshnode receipts verify {out}")


@command.command("verify")
@click.argument("file")
@common
def verify(file: str, home: str | None, as_json: bool) -> None:
    """Verify the receipts in FILE: no node, no ledger and no network is needed.

    The exit status is 0 only if every line is sound and every session is verified.
    """
    with _processes() as each:
        chains, refused = views.verify(_lines(file), each)
    if not chains and not refused:
        raise MeshError("bad_export", "the file holds no receipt")
    bad = [chain for chain in chains if chain.verdict != VERIFIED]
    if as_json:
        show.as_json(
            {
                "receipts": [views.chain_view(chain) for chain in chains],
                "refused": [{"line": n, "code": e.code, "message": e.message} for n, e in refused],
            }
        )
    else:
        for number, error in refused:
            click.echo(f"line {number}: {error.code}: {show.line(error.message)}")
        for chain in bad:
            click.echo(f"{chain.tag.hex()[:12]} epoch {chain.epoch}: {chain.verdict}")
            for fault in chain.faults:
                click.echo(f"  {show.line(fault.say)}")
        show.note(f"{show.count(len(chains) - len(bad), 'session')} verified of {len(chains)}")
    if bad or refused:
        raise Told(MeshError("unverified", "not every session is verified"))


@contextlib.contextmanager
def _processes() -> Iterator[Any]:
    """map() over as many processes as there are cores."""
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        yield map
        return
    with ProcessPoolExecutor(cores) as pool:
        yield partial(pool.map, chunksize=CHUNK)


def _lines(file: str) -> Iterator[str]:
    if file == "-":
        yield from _bounded(sys.stdin.buffer)
        return
    path: Path = path_of(file)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as opened:
            yield from _bounded(opened)
    except FileNotFoundError as error:
        raise MeshError("not_found", f"there is no file {show.line(file)}") from error
    except OSError as error:
        raise MeshError("unreadable", f"{show.line(file)} cannot be read: {error.strerror}") from error


def _bounded(source: Any) -> Iterator[str]:
    left = MAX_EXPORT
    while left > 0 and (line := source.readline(views.MAX_LINE + 1)):
        left -= len(line)
        if len(line) > views.MAX_LINE:
            raise MeshError("bad_export", "a line of the file is too long for a statement")
        yield line.decode(errors="replace")
    if left <= 0:
        raise MeshError("bad_export", f"the file has more than {MAX_EXPORT >> 20} MiB", hint="export less at once")


def _when(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
