"""Receipts in bursts while nodes are killed and come back: make soak-receipts NODES=8 RECEIPTS=500

Every node is a process with a home of its own. Three hold the model, the rest hold nothing; all ask. Two of those that
hold nothing are killed in the middle, and started again when half of the rest is done. At the end every ledger has to
hold every receipt, and each session has to be verified in each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fetch_model
from meshnode.api.connect import Control
from meshnode.api.requests import RunRequest
from meshnode.config import Home
from meshnode.errors import MeshError
from meshnode.ledger import views
from meshnode.ledger.store import open_ledger

SERVE = (sys.executable, "-m", "meshnode", "serve", "--listen", "/ip4/127.0.0.1/tcp/0")
HOLDERS = ("0-10", "10-20", "20-30")
TOKENS = 4
A_SESSION = len(HOLDERS) + 1  # statements: a receipt a hop, and the countersignature
READY_S, EQUAL_S = 60.0, 60.0


@dataclass
class Process:
    home: Home
    arguments: list[str]
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.home.create()
        with open(self.home.path / "log", "ab") as log:
            self.process = subprocess.Popen(
                [*SERVE, *self.arguments, "--home", str(self.home.path)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()

    def ask(self) -> Control:
        return Control(self.home)


def ready(process: Process) -> None:
    ends = time.monotonic() + READY_S
    while time.monotonic() < ends:
        with contextlib.suppress(MeshError), process.ask() as node:
            if node.status()["state"] == "ready":
                return
        time.sleep(0.2)
    raise TimeoutError(f"{process.home.path.name} is not ready: {(process.home.path / 'log').read_text()[-2000:]}")


@contextlib.contextmanager
def nodes(folder: Path, count: int, *options: str) -> Iterator[list[Process]]:
    """The first three hold the model; the first has made the mesh, and invites the others. options: of `serve`."""
    model, invite = str(fetch_model.fetch("smollm2")), folder / "invite"
    first = Process(Home(folder / "0"), [model, "--layers", HOLDERS[0], "--threads", "1", *options])
    every = [first]
    try:
        first.start()
        ready(first)
        with first.ask() as node:
            invite.touch(mode=0o600)
            invite.write_text(node.invite(3600) + "\n")
        for number in range(1, count):
            holds = [model, "--layers", HOLDERS[number], "--threads", "1"] if number < len(HOLDERS) else []
            every.append(Process(Home(folder / str(number)), [*holds, "--join", str(invite), *options]))
            every[-1].start()
        for process in every:
            ready(process)
        whole(every)
        yield every
    finally:
        for process in every:
            process.kill()


def whole(every: Sequence[Process]) -> str:
    """The artifact, once everybody knows of a whole route."""
    ends = time.monotonic() + READY_S
    while time.monotonic() < ends:
        known = []
        for process in every:
            with contextlib.suppress(MeshError), process.ask() as node:
                known += [model for model in node.models() if not model["missing"]]
        if len(known) == len(every):
            return str(known[0]["artifact"])
        time.sleep(0.2)
    raise TimeoutError("not everybody knows of a whole route")


def ask(process: Process, artifact: str, prompt: str, tokens: int = TOKENS) -> dict[str, Any]:
    for _ in range(20):
        try:
            with process.ask() as node:
                done = [*node.run(RunRequest(artifact, prompt=prompt, max_tokens=tokens))][-1]
                result: dict[str, Any] = done["result"]
                return result
        except MeshError as error:
            if error.code != "busy":
                raise
            time.sleep(0.2)
    raise TimeoutError("always busy")


def held(process: Process) -> dict[str, str]:
    """Session -> verdict."""
    ledger = open_ledger(process.home.ledger_path)
    try:
        return {chain["id"]: chain["verdict"] for chain in views.receipts(ledger)}
    finally:
        ledger.close()


def run(count: int, receipts: int) -> dict[str, Any]:
    """Figures. AssertionError or TimeoutError when a receipt is missing anywhere."""
    sessions = -(-receipts // len(HOLDERS))
    with tempfile.TemporaryDirectory(prefix="meshnode-receipts-") as folder, nodes(Path(folder), count) as every:
        artifact = whole(every)
        away = every[-2:] if count >= len(HOLDERS) + 3 else every[-1:]
        there = [process for process in every if process not in away]
        began, done = time.monotonic(), 0
        with ThreadPoolExecutor(4) as pool:

            def burst(asked: int, by: Sequence[Process]) -> None:
                nonlocal done
                results = pool.map(lambda n: ask(by[n % len(by)], artifact, f"burst {done + n}"), range(asked))
                assert all(result["accepted"] and not result["receipts_error"] for result in results)
                done += asked

            burst(sessions // 4, every)
            for process in away:
                process.kill()
            burst(sessions // 2, there)
            for process in away:
                process.start()
            burst(sessions - done, there)
        asked_s, quiet = time.monotonic() - began, time.monotonic()
        for process in away:
            ready(process)
        while True:
            found = [held(process) for process in every]
            if all(len(known) == sessions and set(known.values()) == {"verified"} for known in found):
                break
            if time.monotonic() > quiet + EQUAL_S:
                raise AssertionError([(len(known), sorted(set(known.values()))) for known in found])
            time.sleep(0.5)
    return {
        "nodes": count,
        "sessions": sessions,
        "receipts": sessions * len(HOLDERS),
        "statements": sessions * A_SESSION,
        "restarted": len(away),
        "missing": 0,
        "asking_s": round(asked_s, 1),
        "equal_after_s": round(time.monotonic() - quiet, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--receipts", type=int, default=500)
    given = parser.parse_args()
    os.environ.pop("MESHNODE_HOME", None)
    print(json.dumps(run(given.nodes, given.receipts)))


if __name__ == "__main__":
    main()
