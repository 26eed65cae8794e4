"""meshnode doctor [MODEL.gguf ...]"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence

import click

from ..api.connect import Control
from ..config import LISTEN, Home
from ..errors import MeshError
from . import checks, show
from .checks import Finding
from .endings import Told
from .options import common, home_of, listen_address

MARKS = {"ok": "ok", "note": "note", "fault": "FAULT"}


@click.command("doctor")
@click.argument("models", nargs=-1, metavar="[MODEL.gguf ...]")
@click.option("--listen", multiple=True, metavar="ADDR", help="What `serve` is to listen on; else any free port.")
@common
def command(models: tuple[str, ...], listen: tuple[str, ...], home: str | None, as_json: bool) -> None:
    """Look for what keeps this machine from serving, and tell the command that mends it.

    The installation, the worker, the CPU, the home, the disk, the clock and each MODEL.gguf; ports while no node runs,
    and while one does its addresses, peers, DHT and holdings. The exit status is 1 when there is a fault.
    """
    found = list(findings(home_of(home), models, [listen_address(text) for text in listen] or LISTEN))
    healthy = not any(finding.state == "fault" for finding in found)
    if as_json:
        show.as_json({"healthy": healthy, "findings": [finding.to_json() for finding in found]})
    else:
        _show(found)
    if not healthy:
        raise Told(MeshError("unhealthy", "something has to be mended"))


def findings(home: Home, models: Sequence[str], listen: Sequence[str]) -> Iterator[Finding]:
    yield from checks.install()
    yield from checks.isa()
    yield from checks.worker(os.environ.get("MESHNODE_WORKER"))
    yield from checks.home(home)
    yield from checks.disk(home)
    yield from checks.clock()
    yield from checks.models(models)
    if home.holder() is None:
        yield checks.ok("no_node", "no node runs on this home")
        yield from checks.port(listen)
        return
    try:
        with Control(home) as node:
            yield from checks.running(node.status(), node.peers(), node.models())
    except MeshError as error:
        yield checks.fault(error.code, error.message, error.hint)


def _show(found: Sequence[Finding]) -> None:
    show.table(("", "code", "finding"), [(MARKS[f.state], f.code, f.message) for f in found])
    for finding in found:
        if finding.mend and sys.stdout.isatty():
            click.echo(f"\n{finding.code}: {show.line(finding.mend)}")
        elif finding.mend:
            click.echo(f"mend\t{finding.code}\t{show.line(finding.mend)}")
