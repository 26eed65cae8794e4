"""meshnode serve [MODEL.gguf ...]"""

from __future__ import annotations

import logging
import logging.handlers
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import logs
from ..api.guard import read_key
from ..artifact.catalogue import Catalogue
from ..artifact.policy import Policy
from ..config import LIMITS, LISTEN, MAX_SESSIONS, NUMERICS, Home, NodeConfig
from ..errors import MeshError
from ..ids import Layers, PeerId
from ..keys import public_of
from ..mesh import KnownMesh
from . import progress, show
from .identify import known_files
from .joining import Joining, joining
from .options import common, home_of, layers_option, listen_address, path_of

if TYPE_CHECKING:
    from ..node import Node, ServeModel

LOOK_S = 0.1  # between two looks at how far the node has come
LOG_BYTES = 4 << 20  # of the log, and of each of its predecessors
LOG_FILES = 3


def _within(name: str) -> click.IntRange:
    low, high = LIMITS[name]
    return click.IntRange(int(low), int(high))


@click.command("serve")
@click.argument("models", nargs=-1, metavar="[MODEL.gguf ...]")
@click.option("--layers", metavar="A-B|all", help="Hold these layers of each model: from A up to, not including, B.")
@click.option("--join", metavar="FILE|MULTIADDR", help="An invite, or a member's address; else MESHNODE_INVITE.")
@click.option("--listen", multiple=True, metavar="ADDR", help="PORT, HOST:PORT or a multiaddr; else any free port.")
@click.option("--lan/--no-lan", default=True, help="Find members on this LAN by multicast DNS, and be found.")
@click.option("--threads", type=_within("threads"), default=0, help="Threads of each worker; one a core if not given.")
@click.option(
    "--sessions", type=_within("max_sessions"), default=MAX_SESSIONS, show_default=True, help="Sessions served at once."
)
@click.option("--context", type=_within("context"), help="Positions a session; 2048 or the model's own if not given.")
@click.option("--numerics", type=click.Choice(NUMERICS), default=NUMERICS[0], show_default=True)
@click.option(
    "--source",
    type=click.Choice([p.value for p in Policy]),
    default=Policy.LOCAL_REQUIRED.value,
    show_default=True,
    help="Where a model's bytes may come from.",
)
@click.option("--http", metavar="HOST:PORT|off", help="The HTTP API; 127.0.0.1:8571, or a free port, if not given.")
@click.option("--api-key-file", metavar="FILE", help="Ask for this key; needed to serve the API beyond this machine.")
@click.option(
    "--audits/--no-audits",
    default=None,
    help="Whether others may be shown what it takes to do this node's requests again; in a private mesh they may.",
)
@click.option("--trust", metavar="PEER", multiple=True, help="Its audits count here, and who served it comes first.")
@click.option("--receipts/--no-receipts", default=True, help="Whether to sign and keep receipts of what is computed.")
@click.option("--retry-crashed", is_flag=True, help="Load also a model that crashed a worker before.")
@click.option(
    "--log-format", type=click.Choice(logs.FORMATS), default=logs.FORMATS[0], show_default=True, help="Of node.log."
)
@click.option("--lease-ttl", type=click.FloatRange(*LIMITS["lease_ttl_s"]), default=NodeConfig.lease_ttl_s, hidden=True)
@click.option(
    "--hop-timeout", type=click.FloatRange(*LIMITS["hop_timeout_s"]), default=NodeConfig.hop_timeout_s, hidden=True
)
@click.option("--worker", envvar="MESHNODE_WORKER", hidden=True, help="The worker program, instead of our own build.")
@click.option("--lifeline", is_flag=True, hidden=True, help="Stop when stdin ends.")
@common
def command(
    models: tuple[str, ...],
    layers: str | None,
    join: str | None,
    listen: tuple[str, ...],
    lan: bool,
    threads: int,
    sessions: int,
    context: int | None,
    numerics: str,
    audits: bool | None,
    trust: tuple[str, ...],
    receipts: bool,
    retry_crashed: bool,
    source: str,
    log_format: str,
    http: str | None,
    api_key_file: str | None,
    lease_ttl: float,
    hop_timeout: float,
    worker: str | None,
    lifeline: bool,
    home: str | None,
    as_json: bool,
) -> None:
    """Run a node until it is stopped: hold layers of each MODEL.gguf and answer requests.

    Without a model the node only asks others. Without --join it opens a new private mesh, or goes back to the one it
    was in; `meshnode invite` then lets other machines in.
    """
    where = home_of(home)
    config = NodeConfig(
        listen=tuple(map(listen_address, listen)) or LISTEN,
        lease_ttl_s=lease_ttl,
        hop_timeout_s=hop_timeout,
        max_sessions=sessions,
        context=context,
        threads=threads,
        lan=lan,
        numerics=numerics,
        retry_crashed=retry_crashed,
        audits=audits,
        trusted=tuple(map(_peer, trust)),
        receipts=receipts,
    )
    api_key = read_key(path_of(api_key_file)) if api_key_file is not None else None
    policy = Policy(source)
    policy.check_available()
    ranges = layers_option(layers)
    if ranges is not None and len(ranges) > 1:
        raise MeshError("bad_layers", "a node holds one range of a model", hint="give one A-B; run a node for each")
    if layers is not None and not models:
        raise MeshError("usage", "--layers needs a model", hint="meshnode serve MODEL.gguf --layers A-B")
    if where.holder() is not None:  # said before the time that all else takes; the lock itself is taken by the node
        with where.lock():
            pass
    joined = joining(join, where)
    held = ranges[0] if ranges else None
    _check(models, held, context, where)  # before a worker is built, which takes minutes

    import trio  # late, with all that it brings: what is refused above is refused at once

    where.create()
    _log_to(where, log_format)
    program = built_worker(worker) if models else None
    served = [(path_of(model), held, policy) for model in models]
    trio.run(_serve, where, config, joined, served, program, http, api_key, as_json, lifeline)


def _peer(name: str) -> str:
    try:
        public_of(PeerId(name))
    except MeshError as error:
        raise MeshError("usage", f"{name[:80]!r} is no peer", hint="`meshnode peers` lists them") from error
    return name


def _check(models: Sequence[str], held: Layers | None, context: int | None, home: Home) -> None:
    """MeshError when one of them cannot be served, naming which."""
    files: dict[tuple[int, int], str] = {}
    with known_files(home) as cache:
        catalogue = Catalogue(cache)
        for model in models:
            try:
                summary = catalogue.describe(path_of(model), now_ns=time.time_ns())
                if held is not None:
                    held.within(summary.n_layer)
                if context is not None and context > summary.n_ctx_train:
                    most = f"the model was trained for {summary.n_ctx_train} positions, fewer than {context}"
                    raise MeshError("usage", most, hint=f"give --context {summary.n_ctx_train}, or leave it out")
            except MeshError as error:
                if len(models) == 1 or model in error.message:
                    raise
                raise MeshError(error.code, f"{show.line(model)}: {error.message}", hint=error.hint) from error
            seen = path_of(model).stat()
            if first := files.get((seen.st_dev, seen.st_ino)):
                message = f"{show.line(first)} and {show.line(model)} are one file"
                raise MeshError("usage", message, hint="name it once; more --sessions use one load of it")
            files[seen.st_dev, seen.st_ino] = model


async def _serve(
    home: Home,
    config: NodeConfig,
    joined: Joining,
    models: Sequence[tuple[Path, Layers | None, Policy]],
    worker: Path | None,
    http: str | None,
    api_key: str | None,
    as_json: bool,
    lifeline: bool,
) -> None:
    import trio

    from ..node import ServeModel, open_node

    served: list[ServeModel] = [ServeModel(*model) for model in models]
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with open_node(
            home,
            config,
            mesh=joined.mesh,
            bootstrap=joined.addresses,
            models=served,
            worker=worker,
            http=http,
            api_key=api_key,
        ) as node:
            home.remember(KnownMesh(node.network.admission.mesh, joined.bootstrap, joined.peers))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_stop_on_signal, signals, node)
                if lifeline:
                    nursery.start_soon(_stop_on_eof, node)
                await _until_ready(node, as_json)
                if joined.addresses and node.status()["alone"] and not as_json:
                    show.note("no member of the mesh can be reached yet; it is tried again")
                await node.stopped.wait()
                nursery.cancel_scope.cancel()
    if not as_json:
        show.note("stopped")


async def _stop_on_signal(signals: Any, node: Node) -> None:
    async for _ in signals:
        node.stop()


async def _stop_on_eof(node: Node) -> None:
    """A node that another program started ends with it, however that one ends."""
    import trio

    async with trio.lowlevel.FdStream(sys.stdin.fileno()) as lifeline:
        while await lifeline.receive_some():
            pass
    node.stop()


async def _until_ready(node: Node, as_json: bool) -> None:
    """Shows the way to readiness; returns once the node is ready or stopped."""
    import trio

    status = node.status()
    if not as_json:
        click.echo(f"peer {status['peer']}")
        click.echo(f"mesh {status['mesh_id']}")
        for address in status["addresses"]:
            click.echo(f"address {address}")
        for url in status["api"]:
            click.echo(f"api {url}")
        sys.stdout.flush()
    with progress.bars() as bars:
        while (status := node.status())["state"] != "ready" and not node.stopped.is_set():
            for holding in status["holdings"]:
                part = holding.get("progress") if holding["state"] in ("hashing", "loading") else 1.0
                bars.show(f"{holding['state']} {holding['name']} {show.layers(holding['layers'])}", part)
            bars.keep({f"{h['state']} {h['name']} {show.layers(h['layers'])}" for h in status["holdings"]})
            with trio.move_on_after(LOOK_S):
                await node.stopped.wait()
    if node.stopped.is_set():
        return
    if as_json:
        show.as_json(status)
    else:
        for holding in status["holdings"]:
            of = f"{show.layers(holding['layers'])} of {holding['n_layer']}"
            click.echo(f"holding {show.line(holding['name'])} {of} {holding['artifact']}")
        click.echo("ready")
    sys.stdout.flush()


def built_worker(program: str | None = None) -> Path:
    """The worker program: the one given, else our own, built when this machine has none yet. That takes minutes."""
    if program is not None:
        path = Path(program).expanduser().absolute()
        if not os.access(path, os.X_OK) or not path.is_file():
            hint = "correct MESHNODE_WORKER, or unset it"
            raise MeshError("not_found", f"there is no worker program at {show.line(path)}", hint=hint)
        return path
    from ..worker.build import worker_path

    with progress.bars() as bars:

        def report(line: str) -> None:  # "engine: 40 %"
            name, _, part = line.partition(":")
            number = re.fullmatch(r"\s*(\d+) %", part)
            bars.show(f"building the worker: {name}", int(number[1]) / 100 if number else None)

        return worker_path(progress=report)


def _log_to(home: Home, kind: str) -> None:
    handler = logging.handlers.RotatingFileHandler(home.log_path, maxBytes=LOG_BYTES, backupCount=LOG_FILES, delay=True)
    handler.setFormatter(logs.formatter(kind))
    logging.getLogger().addHandler(handler)
    logging.getLogger("meshnode").setLevel(logging.INFO)
