"""A lab coming up, found again, and taken down.

A lab that is up is written down in lab.json: its processes by id and time of start, so that a number that was given
to somebody else's process since is never taken for ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs

from ..api.connect import Control
from ..config import Home, given, write_private
from ..errors import MeshError
from ..ids import Layers
from .plan import Plan, count_of
from .process import ASK_S, Member, end, spawn, start_time

ENTRY = "entry"
LOOK_S = 0.05  # between two looks at what is starting
SPEAK_S = 60.0  # for a process to have its control socket: it imports for 2 s on an idle core
SETTLE_S = 30.0  # from when every node is ready until the entry node knows a whole route
INVITE_S = 24 * 3600.0  # of the lab's own invite, which stays in its folder
Say = Callable[[str], None]


@dataclass
class Lab:
    """artifact: the identity of its model, empty until every node is ready."""

    folder: Path
    plan: Plan
    artifact: str = ""
    members: list[Member] = field(default_factory=list)

    @property
    def entry(self) -> Member:
        return next(member for member in self.members if member.name == ENTRY)

    def status(self) -> list[dict[str, Any]]:
        """Each node's name, pid, peer, home, holdings and sessions; peer is None of one that does not answer."""
        with ThreadPoolExecutor(len(self.members)) as pool:
            return list(pool.map(_status_of, self.members))

    def down(self) -> None:
        end(self.members)
        with contextlib.suppress(FileNotFoundError):
            _record(self.folder).unlink()

    def write_down(self) -> None:
        value = {
            "model": str(self.plan.model),
            "n_layer": self.plan.n_layer,
            "layers": [[part.begin, part.end] for part in self.plan.layers],
            "threads": self.plan.threads,
            "numerics": self.plan.numerics,
            "artifact": self.artifact,
            "members": [
                {
                    "name": member.name,
                    "home": str(member.home.path),
                    "pid": member.pid,
                    "started": member.started,
                    "layers": [member.layers.begin, member.layers.end] if member.layers else None,
                }
                for member in self.members
            ],
        }
        write_private(_record(self.folder), json.dumps(value, indent=1) + "\n")


def folder_of(option: str | None, environ: Mapping[str, str] = os.environ) -> Path:
    """--home, else MESHNODE_LAB, else the XDG state folder. MeshError usage when --home is empty, bad_home."""
    named = given(option) or environ.get("MESHNODE_LAB") or platformdirs.user_state_path("meshnode") / "lab"
    return Home(Path(named).expanduser().absolute()).fitting().path


def find(folder: Path) -> Lab | None:
    """The lab of which any node still runs in this folder. MeshError bad_home when lab.json is damaged."""
    try:
        said = json.loads(_record(folder).read_text())
        ranges = tuple(Layers(*pair) for pair in said["layers"])
        plan = Plan(Path(said["model"]), said["n_layer"], ranges, said["threads"], said["numerics"])
        lab = Lab(folder, plan, said["artifact"])
        for m in said["members"]:
            layers = Layers(*m["layers"]) if m["layers"] else None
            lab.members.append(Member(m["name"], Home(Path(m["home"])), m["pid"], m["started"], layers))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, OSError, MeshError) as error:
        hint = "remove it once no node of the lab runs"
        raise MeshError("bad_home", f"{_record(folder)} is damaged", hint=hint) from error
    return lab if any(member.alive for member in lab.members) else None


@contextlib.contextmanager
def busy(folder: Path) -> Iterator[None]:
    """Holds the folder while a lab is brought up or taken down in it. MeshError home_in_use."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(Home(folder).lock())
        except MeshError as error:
            if error.code != "home_in_use":
                raise
            message = f"another command is at work on the lab in {folder}"
            raise MeshError("home_in_use", message, hint="wait until it has ended") from error
        yield


@contextlib.contextmanager
def passing(folder: Path, plan: Plan, say: Say) -> Iterator[Lab]:
    """A lab for the length of a block, in a folder that is removed afterwards. Its nodes end with this process."""
    own = Home(_passing(folder) / f"{os.getpid()}-{start_time(os.getpid())}-{secrets.token_hex(3)}").create().path
    try:
        lab = up(own, plan, say, passing=True)
        try:
            yield lab
        finally:
            lab.down()
    finally:
        shutil.rmtree(own, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Removes what passing labs left behind whose process was killed: keys of nodes, and an invite."""
    with contextlib.suppress(OSError):
        for left in list(_passing(folder).iterdir()):
            pid, _, rest = left.name.partition("-")
            started = rest.partition("-")[0]
            if not pid.isdigit() or not started.isdigit() or start_time(int(pid)) == int(started):
                continue
            if all(Home(home).holder() is None for home in left.iterdir()):  # its nodes may be ending yet
                shutil.rmtree(left, ignore_errors=True)


def up(folder: Path, plan: Plan, say: Say, *, passing: bool = False) -> Lab:
    """Brings a lab up and waits until its entry node knows a whole route.

    say: told what happens, a line each. passing: the nodes end when this process does, however that is.
    MeshError of the first child that ends, or that no route was found.
    """
    lab = Lab(Home(folder).create().path, plan)
    invite = folder / "invite"

    def begin(name: str, layers: Layers | None, join: Path | None) -> None:
        lab.members.append(spawn(folder, name, plan, layers, join, passing))
        lab.write_down()  # at once: what is written down can be taken down

    try:
        nodes, threads = count_of(len(plan.layers), "node"), count_of(plan.threads, "thread")
        say(f"starting {nodes} and an entry node, {threads} a worker")
        begin("node-1", plan.layers[0], None)
        write_private(invite, _invite_of(lab.members[0], lab.members) + "\n")
        for number, layers in enumerate(plan.layers[1:], start=2):
            begin(f"node-{number}", layers, invite)
        begin(ENTRY, None, invite)
        lab.artifact = _wait_until_ready(lab.members, say)
        _wait_for_route(lab)
        lab.write_down()
    except BaseException:  # Ctrl-C too leaves nothing behind
        lab.down()
        raise
    return lab


def _invite_of(first: Member, members: Sequence[Member]) -> str:
    ends = time.monotonic() + SPEAK_S
    while True:
        check(members)
        try:
            with Control(first.home) as node:
                return node.invite(INVITE_S)
        except MeshError as error:
            if error.code != "no_node" or time.monotonic() > ends:
                raise
        time.sleep(LOOK_S)


def _wait_until_ready(members: Sequence[Member], say: Say) -> str:
    """Until every node holds what it is to hold, however long; a child that fails ends it. The artifact."""
    ends = time.monotonic() + SPEAK_S
    states = dict.fromkeys((member.name for member in members), "starting")
    artifact, spoken = "", ""
    while True:
        check(members)
        for member in members:
            if states[member.name] == "ready":
                continue
            try:
                with Control(member.home) as node:
                    status = node.status()
            except MeshError as error:
                if error.code != "no_node" or time.monotonic() > ends:
                    raise
                continue
            artifact = next((h["artifact"] for h in status["holdings"] if h["artifact"]), artifact)
            unready = [holding["state"] for holding in status["holdings"] if holding["state"] != "ready"]
            states[member.name] = unready[0] if unready else status["state"]
        said = ", ".join(f"{list(states.values()).count(s)} {s}" for s in dict.fromkeys(states.values()))
        if said != spoken:
            say(said)
            spoken = said
        if set(states.values()) == {"ready"}:
            return artifact
        time.sleep(LOOK_S)


def _wait_for_route(lab: Lab) -> None:
    ends = time.monotonic() + SETTLE_S
    with Control(lab.entry.home) as node:
        while True:
            check(lab.members)
            try:
                found = node.route(lab.artifact)
                if found["complete"]:
                    return
                fault = MeshError("no_route", f"the entry node does not find the layers {found['missing']}")
            except MeshError as error:
                fault = error
            if time.monotonic() > ends:
                raise fault
            time.sleep(LOOK_S)


def check(members: Sequence[Member]) -> None:
    """Raises what a child that has ended said, at once: a time-out would hide it."""
    for member in members:
        if not member.alive:
            raise member.fault()


def _status_of(member: Member) -> dict[str, Any]:
    said: dict[str, Any] = {
        "name": member.name,
        "pid": member.pid,
        "alive": member.alive,
        "peer": None,
        "home": str(member.home.path),
        "api": [],
        "holdings": [],
        "sessions": [],
    }
    if not member.alive:
        return said
    try:
        with Control(member.home, patience_s=ASK_S) as node:
            status = node.status()
    except MeshError as error:
        return said | {"error": {"code": error.code, "message": error.message, "hint": error.hint}}
    return said | {key: status[key] for key in ("peer", "state", "addresses", "api", "holdings", "sessions")}


def _passing(folder: Path) -> Path:
    return folder / "passing"


def _record(folder: Path) -> Path:
    return folder / "lab.json"
