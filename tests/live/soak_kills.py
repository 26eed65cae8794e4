"""Workers and nodes killed and frozen while they answer: make soak-kills KILLS=100 FREEZES=20

Every range has two holders, each a process with a home of its own. At a random moment, in prefill or in decode, what
serves one hop of the running answer is killed (its worker or its node) or stopped. The answer has to be the undisturbed
one, token by token; the last line is a JSON document.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fetch_model
from meshnode.api.requests import RunRequest
from meshnode.config import Home
from meshnode.errors import MeshError

from .conftest import runs
from .soak_receipts import Process, ready

RANGES = {3: ("0-10", "10-20", "20-30"), 4: ("0-8", "8-16", "16-23", "23-30")}
TTL_S, HOP_TIMEOUT_S = 5.0, 3.0
TOKENS = 40
HANG_S = 60.0
STORY = "The old lighthouse keeper counted the ships that passed in the night, and wrote a line about each of them. "
HARMS = ("kill worker", "kill node", "freeze worker", "freeze node")


@dataclass
class Mesh:
    """Nodes by peer id, and the one that asks."""

    entry: Process
    nodes: list[Process]
    artifact: str = ""
    prefill: float = 0.0  # positions a second of an undisturbed route
    by_peer: dict[str, Process] = field(default_factory=dict)

    def learn(self, process: Process) -> None:
        with process.ask() as node:
            self.by_peer[node.status()["peer"]] = process

    def complete(self) -> None:
        """Returns once every node is ready, and the entry node hears the offers of all."""
        ends = time.monotonic() + HANG_S
        while time.monotonic() < ends:
            with contextlib.suppress(MeshError), self.entry.ask() as node:
                for model in node.models():
                    if len(model["holders"]) == len(self.nodes):
                        self.artifact = model["artifact"]
                        return
            time.sleep(0.1)
        raise TimeoutError("the entry node does not hear of every holder")


@contextlib.contextmanager
def mesh(folder: Path, hops: int) -> Iterator[Mesh]:
    """Two holders a range and an entry node."""
    model, invite = str(fetch_model.fetch("smollm2")), folder / "invite"
    common = ["--threads", "1", "--lease-ttl", str(TTL_S), "--hop-timeout", str(HOP_TIMEOUT_S)]
    every: list[Process] = []
    try:
        for number, layers in enumerate((*RANGES[hops], *RANGES[hops], None)):
            holds = [model, "--layers", layers] if layers else []
            join = ["--join", str(invite)] if every else []
            every.append(Process(Home(folder / str(number)), [*holds, *common, *join]))
            every[-1].start()
            if number == 0:
                ready(every[0])
                with every[0].ask() as node:
                    invite.touch(mode=0o600)
                    invite.write_text(node.invite(3600) + "\n")
        made = Mesh(every[-1], every[:-1])
        with ThreadPoolExecutor(len(every)) as pool:
            list(pool.map(ready, every))
        for process in made.nodes:
            made.learn(process)
        made.complete()
        yield made
    finally:
        for process in every:
            if process.process is not None and process.process.poll() is None:
                process.process.send_signal(signal.SIGCONT)
            process.kill()


@dataclass(frozen=True)
class Question:
    prompt: str
    temperature: float
    seed: int

    def request(self, artifact: str) -> RunRequest:
        return RunRequest(artifact, prompt=self.prompt, max_tokens=TOKENS, temperature=self.temperature, seed=self.seed)


def questions(seed: int) -> list[Question]:
    drawn = random.Random(seed)
    return [Question(f"Night {drawn.randrange(1000)}. " + STORY * n, t, 7) for n in (4, 14) for t in (0.0, 0.8)]


@dataclass
class Turn:
    """What one disturbed answer came to. pause: seconds from the harm to the next token."""

    harm: str
    hop: int
    at: int
    result: dict[str, Any] | None = None
    error: str = ""
    pause: float = 0.0
    bound: float = 0.0


def worker_of(process: Process) -> int:
    with process.ask() as node:
        return int(node.status()["holdings"][0]["worker"])


def disturbed(mesh: Mesh, question: Question, harm: str, hop: int, at: int) -> tuple[Turn, list[int]]:
    """An answer that is disturbed after `at` tokens, 0: in prefill; and the processes that were stopped for it."""
    turn, stopped, came, harmed = Turn(harm, hop, at), list[int](), 0, 0.0
    workers = {peer: worker_of(process) for peer, process in mesh.by_peer.items()}

    def do(peer: str) -> None:
        nonlocal harmed
        process = mesh.by_peer[peer].process
        assert process is not None
        pid = workers[peer] if "worker" in harm else process.pid
        if at == 0:
            time.sleep(0.15)  # the prompt is on its way through the stages
        harmed = time.monotonic()
        os.kill(pid, signal.SIGKILL if "kill" in harm else signal.SIGSTOP)
        if "freeze" in harm:
            stopped.append(pid)

    peers: list[str] = []
    try:
        with mesh.entry.ask() as node:
            for event in node.run(question.request(mesh.artifact)):
                if event["event"] == "token":
                    came += 1
                    if harmed and not turn.pause:
                        turn.pause = time.monotonic() - harmed
                elif event["event"] == "route":
                    peers = [hop["peer"] for hop in event["route"]]
                elif event["event"] == "done":
                    turn.result = event["result"]
                if came == at and not harmed and peers:
                    do(peers[hop])
    except MeshError as error:
        turn.error = str(error)
    replayed = max((one["replayed"] for one in (turn.result or {}).get("recovered", ())), default=0)
    turn.bound = 1.0 + 1.2 * replayed / mesh.prefill + (HOP_TIMEOUT_S + 1.0 if "freeze" in harm else 0.0)
    return turn, stopped


def mend(mesh: Mesh, stopped: list[int]) -> None:
    """What was stopped wakes up; a node that was killed is started again."""
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    for process in mesh.nodes:
        assert process.process is not None
        if process.process.poll() is not None:
            process.start()
    for process in mesh.nodes:
        ready(process)
    mesh.complete()


def leaks(mesh: Mesh) -> dict[str, int]:
    """Sessions that are left after every lease must have ended."""
    ends, left = time.monotonic() + TTL_S + 1.0, {"": 1}
    while left and time.monotonic() < ends:
        left = {}
        for process in [*mesh.nodes, mesh.entry]:
            with process.ask() as node:
                if sessions := len(node.status()["sessions"]):
                    left[process.home.path.name] = sessions
        time.sleep(0.1)
    return left


def soak(folder: Path, hops: int, kills: int, freezes: int, seed: int, say: Any = None) -> dict[str, Any]:
    """The counts of all that must not be, and the longest pause over its bound."""
    drawn = random.Random(seed)
    plan = [HARMS[n % 2] for n in range(kills)] + [HARMS[2 + n % 2] for n in range(freezes)]
    drawn.shuffle(plan)
    asked = questions(seed)
    with mesh(folder, hops) as made:
        expected = {}
        for question in asked:
            with made.entry.ask() as node:
                expected[question] = [*node.run(question.request(made.artifact))][-1]["result"]
            made.prefill = max(made.prefill, expected[question]["timing"]["prefill_tok_s"])
        turns, wrong, hung, orphans, unlike = list[Turn](), 0, 0, 0, 0
        for number, harm in enumerate(plan):
            question = drawn.choice(asked)
            most = len(expected[question]["token_ids"]) - 1
            hop, at = drawn.randrange(hops), 0 if drawn.random() < 0.25 else drawn.randrange(1, most)
            before = [worker_of(process) for process in made.nodes]
            alarm = threading.Timer(HANG_S, made.entry.kill)  # what hangs is a fault, and must not hang this
            alarm.start()
            turn, stopped = disturbed(made, question, harm, hop, at)
            hung += not alarm.is_alive()
            alarm.cancel()
            turns.append(turn)
            if turn.result is None or turn.result["token_ids"] != expected[question]["token_ids"]:
                wrong += 1
            elif turn.result["recovered"] and turn.result["recovered"][0]["may_differ"]:
                unlike += 1
            if say is not None:
                took = f"{turn.pause:.2f} s of {turn.bound:.2f}"
                say(f"{number + 1}/{len(plan)} {harm} hop {hop} at {at}: {took} {turn.error}")
            mend(made, stopped)
            now = {worker_of(process) for process in made.nodes}
            orphans += sum(runs(pid) for pid in before if pid not in now)
        left = leaks(made)
    over = [turn for turn in turns if turn.pause > turn.bound]
    recovered = [turn for turn in turns if turn.result and turn.result["recovered"]]
    return {
        "hops": hops,
        "kills": kills,
        "freezes": freezes,
        "recovered": len(recovered),
        "wrong": wrong,
        "restarted": unlike,
        "hung": hung,
        "orphans": orphans,
        "sessions_left": sum(left.values()),
        "prefill_tok_s": round(made.prefill, 1),
        "pause_median_s": round(sorted(t.pause for t in turns)[len(turns) // 2], 3),
        "pause_max_of_bound": round(max(t.pause / t.bound for t in turns), 3),
        "over_bound": len(over),
        "errors": [turn.error for turn in turns if turn.error][:5],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--freezes", type=int, default=20)
    parser.add_argument("--hops", type=int, nargs="*", default=[3, 4])
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    found = []
    for hops in asked.hops:
        share = len(asked.hops)
        with tempfile.TemporaryDirectory() as folder:
            found.append(
                soak(Path(folder), hops, asked.kills // share, asked.freezes // share, asked.seed + hops,
                     lambda line: print(line, flush=True))
            )  # fmt: skip
    bad = sum(one[name] for one in found for name in ("wrong", "hung", "orphans", "sessions_left", "over_bound"))
    print(json.dumps({"soak_kills": found, "ok": bad == 0}))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
