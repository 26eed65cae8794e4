"""The processes of a lab: started, watched, and ended, by what stays theirs when a process id is used again."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from ..api.connect import Control, error_of
from ..config import Home
from ..errors import MeshError
from ..ids import Layers
from .plan import Plan

PROGRAM = (sys.executable, "-m", "meshnode")
NOT_FOR_LABS = ("MESHNODE_INVITE", "MESHNODE_HOME", "MESHNODE_SERVE_")  # what a person set for a node of their own
LISTEN = "/ip4/127.0.0.1/tcp/0"
HTTP = "127.0.0.1:0"
LEASE_TTL_S = 5.0  # a killed entry node is to be noticed while one watches
ASK_S, TELL_S = 5.0, 3.0  # a node's time to end when asked, and after SIGTERM, before it is killed
HEAR_S = 1.0  # for a node to hear that it is to end


@dataclass
class Member:
    """One process of a lab. started: in clock ticks since the machine's start; with the pid it names one process."""

    name: str
    home: Home
    pid: int
    started: int
    layers: Layers | None = None
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)  # when this very process started it

    @property
    def alive(self) -> bool:
        if self.process is not None and self.process.poll() is not None:
            return False
        return start_time(self.pid) == self.started

    def fault(self) -> MeshError:
        """Why it ended, in its own words."""
        for line in reversed(self.output_path.read_text(errors="replace").splitlines()):
            with contextlib.suppress(ValueError):
                said = json.loads(line)
                if isinstance(said, dict) and "error" in said:
                    error = error_of(said)
                    return MeshError(error.code, f"{self.name}: {error.message}", hint=error.hint)
        tail = self.errors_path.read_text(errors="replace").strip().splitlines()[-1:]
        return MeshError("internal", f"{self.name} ended: {tail[0] if tail else 'it said nothing'}")

    @property
    def output_path(self) -> Path:
        return self.home.path / "stdout"

    @property
    def errors_path(self) -> Path:
        return self.home.path / "stderr"


def spawn(folder: Path, name: str, plan: Plan, layers: Layers | None, invite: Path | None, passing: bool) -> Member:
    home = Home(folder / name).create()
    with contextlib.suppress(FileNotFoundError):
        home.mesh_path.unlink()  # of an earlier lab: what it remembers is gone
    command = [*PROGRAM, "serve", *([str(plan.model)] if layers else [])]
    command += ["--home", str(home.path), "--listen", LISTEN, "--http", HTTP, "--json"]
    command += ["--threads", str(plan.threads), "--numerics", plan.numerics, "--lease-ttl", str(LEASE_TTL_S)]
    command += ["--layers", str(layers)] if layers else []
    command += ["--join", str(invite)] if invite else []
    command += ["--lifeline"] if passing else []
    environ = {key: value for key, value in os.environ.items() if not key.startswith(NOT_FOR_LABS)}
    environ["MESHNODE_CONFIG"] = os.devnull  # a person's own node is set there
    member = Member(name, home, 0, 0, layers)
    with open(member.output_path, "wb") as output, open(member.errors_path, "wb") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if passing else subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=environ,
            start_new_session=True,  # a terminal's Ctrl-C is for the command that minds the lab
        )
    member.process, member.pid = process, process.pid
    member.started = start_time(process.pid) or 0
    return member


def end(members: Sequence[Member]) -> None:
    """Asks every node to end, then tells, then kills those that are left. Nothing but these very processes."""
    with contextlib.ExitStack() as handles:
        living: dict[int, Member] = {}  # by a handle that stays theirs when the number is used again
        for member in members:
            with contextlib.suppress(ProcessLookupError):
                handle = os.pidfd_open(member.pid)
                handles.callback(os.close, handle)
                if member.alive:
                    living[handle] = member
        if living:
            with ThreadPoolExecutor(len(living)) as pool:
                asked = list(pool.map(_ask_to_end, living.values()))
            for handle, heard in zip(living, asked, strict=True):
                if not heard:  # it has no ears yet, or no more
                    _signal(handle, signal.SIGTERM)
        for patience, then in ((ASK_S, signal.SIGTERM), (TELL_S, signal.SIGKILL), (TELL_S, 0)):
            _wait(living, patience)
            for handle in living if then else ():
                _signal(handle, then)
    for member in members:
        if member.process is not None:
            if member.process.stdin is not None:
                member.process.stdin.close()
            member.process.wait()


def _ask_to_end(member: Member) -> bool:
    """Whether it heard."""
    with contextlib.suppress(MeshError), Control(member.home, patience_s=HEAR_S) as node:
        node.stop()
        return True
    return False


def _signal(handle: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, number)


def _wait(living: dict[int, Member], within_s: float) -> None:
    """Until all have ended, or the time has; drops those that have."""
    ends = time.monotonic() + within_s
    waiting = select.poll()
    for handle in living:
        waiting.register(handle, select.POLLIN)
    while living and (left := ends - time.monotonic()) > 0:
        for handle, _ in waiting.poll(left * 1000):
            waiting.unregister(handle)
            del living[handle]


def start_time(pid: int) -> int | None:
    """When a living process was started, in clock ticks since the machine's start; None when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *rest = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return None if state in "ZX" else int(rest[18])
