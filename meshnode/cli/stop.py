"""meshnode stop"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time

import click

from ..api.connect import Control
from ..config import Home
from ..errors import MeshError
from . import show
from .options import common, home_of

PATIENCE_S = 8.0  # a node closes its sessions and its workers within half of it
EXIT_S = 2.0  # for its process to end after it; one that has more to do than to be a node may go on


@click.command("stop")
@common
def command(home: str | None, as_json: bool) -> None:
    """Stop the node of this home and wait until it has ended."""
    where = home_of(home)
    pid = where.holder()
    if pid is None:
        raise MeshError("no_node", f"no node runs on {where.path}", hint="there is nothing to stop")
    process = _handle(pid)
    try:
        with Control(where) as node:
            node.stop()
    except MeshError:
        if pid and where.holder() == pid:  # it has no ears yet, or no more; the lock says that this is the node
            os.kill(pid, signal.SIGTERM)
    if not _gone(where, PATIENCE_S):
        raise MeshError("deadline", f"the node does not end within {PATIENCE_S:.0f} s", hint=f"end it: kill -9 {pid}")
    if process is not None:
        select.select([process], [], [], EXIT_S)
        os.close(process)
    if as_json:
        show.as_json({"stopped": True, "pid": pid})
    else:
        show.note("stopped")


def _gone(home: Home, within_s: float) -> bool:
    ends = time.monotonic() + within_s
    while home.holder() is not None:
        if time.monotonic() > ends:
            return False
        time.sleep(0.05)
    return True


def _handle(pid: int) -> int | None:
    """A descriptor that can be read once the process has ended; None when there is no such process to be seen."""
    with contextlib.suppress(OSError):
        return os.pidfd_open(pid)
    return None
