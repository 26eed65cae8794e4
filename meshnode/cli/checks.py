"""What `meshnode doctor` looks at. Each check gives findings: a stable code, how it is, and the command that mends it.

The checks read and bind on this machine; nothing is written, no other machine is asked, no message holds a prompt.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import platform
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ..artifact.catalogue import Catalogue
from ..config import Home, cache_dir
from ..errors import MeshError
from ..worker import build, variants

GLIBC = (2, 36)
DISK_BYTES = 1 << 30  # of room: a worker's build takes half of it for a moment
WORKER_S = 10.0  # to say hello and end; it takes a few milliseconds
CONNECT_S = 2.0  # to an address of this machine
TIME_ERROR = 5  # of adjtimex(2): nobody keeps this clock right
RELEASED = 1_764_547_200  # 2025-12-01: a clock before it is wrong
PRIVATE_MODE = 0o077  # bits that nothing in a home may have


@dataclass(frozen=True)
class Finding:
    """state: ok | note (works, but) | fault; mend: a command or step, empty when there is nothing to mend."""

    code: str
    state: str
    message: str
    mend: str = ""

    def to_json(self) -> dict[str, str]:
        return {"code": self.code, "state": self.state, "message": self.message, "mend": self.mend}


def ok(code: str, message: str) -> Finding:
    return Finding(code, "ok", message)


def note(code: str, message: str, mend: str) -> Finding:
    return Finding(code, "note", message, mend)


def fault(code: str, message: str, mend: str) -> Finding:
    return Finding(code, "fault", message, mend)


def install() -> Iterator[Finding]:
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        yield note("platform_untried", f"{system} on {machine} is untried", "use Linux on x86-64")
    library, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "another C library").partition(" ")
    if library != "glibc" or tuple(map(int, version.split(".")[:2])) < GLIBC:
        yield note(
            "libc_old", f"{library} {version} is untried", f"use a system with glibc {GLIBC[0]}.{GLIBC[1]} or later"
        )
    missing = []
    for wanted in metadata.requires("meshnode") or ():
        name, _, pinned = wanted.partition("==")
        if ";" in wanted or not pinned:
            continue
        try:
            if metadata.version(name) != pinned:
                missing.append(f"{name} {metadata.version(name)} instead of {pinned}")
        except metadata.PackageNotFoundError:
            missing.append(f"{name} is missing")
    if missing:
        yield fault("packages_differ", "; ".join(missing), f"pip install --force-reinstall meshnode=={_version()}")
    else:
        yield ok("installed", f"meshnode {_version()} on Python {platform.python_version()}, its packages as pinned")


def worker(named: str | None) -> Iterator[Finding]:
    """named: what MESHNODE_WORKER says."""
    try:
        program = Path(named) if named else build.find_worker()
    except MeshError as error:
        yield fault(error.code, error.message, error.hint)
        return
    if program is None:
        yield note(
            "worker_not_built", "the worker is not built yet; the first `serve` does it, in minutes", "make worker"
        )
        return
    try:
        done = subprocess.run([program], stdin=subprocess.DEVNULL, capture_output=True, timeout=WORKER_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield fault("worker_broken", f"the worker does not start: {error}", "unset MESHNODE_WORKER, or `make worker`")
        return
    if done.returncode or not done.stdout:
        message = f"the worker ends with {done.returncode}: {done.stderr.decode(errors='replace').strip()[-200:]}"
        yield fault("worker_broken", message, "unset MESHNODE_WORKER, or `make worker`")
    else:
        yield ok("worker", f"{program} starts and says hello")


def isa() -> Iterator[Finding]:
    level = variants.fitting(variants.cpu_flags())
    if level is None:
        yield fault("isa_too_low", f"this CPU has less than {next(iter(variants.VARIANTS))}", "use a later CPU")
    elif level != list(variants.VARIANTS)[-1]:
        yield note("isa_slow", f"this CPU has {level} only: no AVX2, several times slower", "use a later CPU")
    else:
        yield ok("isa", f"this CPU has {level}")


def home(where: Home) -> Iterator[Finding]:
    try:
        status = where.path.stat()
    except FileNotFoundError:
        yield ok("home_new", f"{where.path} is made by the first `serve`")
        return
    except OSError as error:
        yield fault("home_unreadable", f"{where.path}: {error.strerror}", f"ls -ld {where.path.parent}")
        return
    if status.st_uid != os.geteuid():
        yield fault("home_of_another", f"{where.path} belongs to another user", f"chown -R {os.geteuid()} {where.path}")
        return
    private = (where.key_path, where.mesh_path, where.denied_path)
    exposed = [path for path in (where.path, *private) if path.exists() and path.stat().st_mode & PRIVATE_MODE]
    for path in exposed:
        yield fault("home_open", f"others can read {path}", f"chmod go= {path}")
    try:
        where.known_mesh()
    except MeshError as error:
        yield fault("mesh_damaged", error.message, error.hint)
    if not exposed:
        yield ok("home", f"{where.path} is its owner's alone")


def disk(where: Home) -> Iterator[Finding]:
    for what, folder in (("home", where.path), ("cache", cache_dir())):
        there = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(there).free
        if free < DISK_BYTES:
            yield fault("disk_low", f"the {what} has {free / 1e6:.0f} MB of room", f"df -h {there}")
        else:
            yield ok("disk", f"the {what} has {free / 1e9:.1f} GB of room")


def clock(now: float | None = None) -> Iterator[Finding]:
    """Invites and secrets end by the clock."""
    now = time.time() if now is None else now
    if now < RELEASED:
        yield fault(
            "clock_wrong", f"the clock says {time.strftime('%Y-%m-%d', time.gmtime(now))}", "timedatectl set-ntp true"
        )
        return
    space = ctypes.create_string_buffer(512)  # struct timex, of which nothing is set: it is only asked
    if ctypes.CDLL(None, use_errno=True).adjtimex(space) == TIME_ERROR:
        yield note("clock_free", "nobody keeps the clock right, as far as the kernel knows", "timedatectl set-ntp true")
    else:
        yield ok("clock", "the clock is kept right")


def port(listen: Sequence[str]) -> Iterator[Finding]:
    """listen: multiaddrs, each bound for a moment."""
    for address in listen:
        if (parts := _parts(address)) is None:
            continue  # a name, or another transport: only the node can tell
        host, number = parts
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            with socket.socket(family) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind((host, number))
        except OSError as error:
            yield fault("port_in_use", f"{address} cannot be bound: {error.strerror}", f"ss -ltnp 'sport = :{number}'")
        else:
            yield ok("port", f"{address} can be bound")


def models(paths: Sequence[str]) -> Iterator[Finding]:
    catalogue = Catalogue()
    for path in paths:
        try:
            found = catalogue.describe(Path(path).expanduser(), now_ns=time.time_ns())
        except MeshError as error:
            yield fault(error.code, f"{path}: {error.message}", error.hint)
        else:
            yield ok("model", f"{path}: {found.name}, {found.n_layer} layers, can be served")


def running(
    status: dict[str, Any], peers: Sequence[dict[str, Any]], known: Sequence[dict[str, Any]]
) -> Iterator[Finding]:
    """What the node of the home says of itself: its status, peers and models."""
    yield ok("node", f"the node runs, {status['state']}")
    heard = [address for address in status["addresses"] if not _connects(address)]
    for address in heard:
        yield fault("not_listening", f"nothing answers at {address}", "meshnode stop && meshnode serve")
    if status["addresses"] and not any(_public(address) for address in status["addresses"]):
        message = "no address of this node is public: peers beyond its networks reach it only through others"
        yield note("not_public", message, "meshnode serve --listen PORT, and forward that port to this machine")
    elif not heard:
        yield ok("addresses", "its addresses answer")
    if not peers:
        yield note("alone", "no peer is connected", "meshnode invite, or meshnode serve --join INVITE")
    else:
        yield ok("peers", f"{len(peers)} connected")
    held = {h["artifact"] for h in status["holdings"] if h["state"] == "ready"}
    if lost := held - {model["artifact"] for model in known}:
        yield fault(
            "not_announced", f"the DHT does not know of {', '.join(sorted(lost))}", "meshnode models, in a minute"
        )
    elif peers:
        yield ok("dht", f"the DHT knows {len(known)} model{'' if len(known) == 1 else 's'}")
    for holding in status["holdings"]:
        if said := holding.get("error"):
            yield fault(said["code"], f"{holding['name']}: {said['message']}", said.get("hint") or "see the node's log")
    for model in known:
        if model["missing"]:
            missing = ", ".join(f"{a}-{b}" for a, b in model["missing"])
            yield note(
                "layers_missing", f"nobody holds {missing} of {model['name']}", f"meshnode route {model['name']}"
            )


def _version() -> str:
    return metadata.version("meshnode")


def _parts(multiaddr: str) -> tuple[str, int] | None:
    words = multiaddr.split("/")
    if len(words) >= 5 and words[1] in ("ip4", "ip6") and words[3] == "tcp":
        return words[2], int(words[4])
    return None


def _public(multiaddr: str) -> bool:
    parts = _parts(multiaddr)
    return parts is not None and ipaddress.ip_address(parts[0]).is_global


def _connects(multiaddr: str) -> bool:
    parts = _parts(multiaddr)
    if parts is None or "/p2p-circuit" in multiaddr:
        return True  # that is another's to answer
    try:
        with socket.create_connection(parts, timeout=CONNECT_S):
            return True
    except OSError:
        return False
