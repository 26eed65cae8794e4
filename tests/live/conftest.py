"""The real thing: SmolLM2-135M, the built worker, and labs of separate processes started by the command line."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import fetch_model
from meshnode import lab as labs
from meshnode.cli.options import layers_option
from meshnode.worker.build import worker_path

log = logging.getLogger(__name__)

MESHNODE = (sys.executable, "-m", "meshnode")
COMMAND_S = 60.0


@pytest.fixture(scope="session")
def model() -> Path:
    return fetch_model.fetch("smollm2")


@pytest.fixture(scope="session")
def worker_binary() -> Path:
    """Our own build, unless MESHNODE_WORKER names another: one with sanitizers, say."""
    return Path(os.environ.get("MESHNODE_WORKER") or worker_path())


@dataclass
class Lab:
    """A lab that is up, and its command line."""

    folder: Path
    model: Path

    def run(self, prompt: str, *options: str) -> dict[str, Any]:
        return self.command("run", "--model", str(self.model), "--prompt", prompt, *options)

    def command(self, name: str, *options: str) -> dict[str, Any]:
        done = self.start(name, *options)
        out, err = done.communicate(timeout=COMMAND_S)
        document: dict[str, Any] = json.loads(out)
        assert (done.returncode == 0) == ("error" not in document), (done.returncode, out, err)
        return document

    def start(self, name: str, *options: str, json_output: bool = True) -> subprocess.Popen[str]:
        arguments = [*MESHNODE, "lab", name, *options, "--home", str(self.folder), *(["--json"] if json_output else [])]
        return subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def nodes(self) -> dict[str, dict[str, Any]]:
        return {node["name"]: node for node in self.command("status")["nodes"]}

    def sessions(self) -> dict[str, int]:
        return {name: len(node["sessions"]) for name, node in self.nodes().items()}


@contextmanager
def lab_of(folder: Path, model: Path, nodes: int | None = None, layers: str | None = None) -> Iterator[Lab]:
    """A lab with one thread a worker, whose processes end with this one, however that is."""
    plan = labs.plan(model, nodes, layers_option(layers), 1)
    with labs.passing(folder, plan, log.info) as lab:
        yield Lab(lab.folder, model)


@pytest.fixture(scope="session")
def thirds(model: Path, worker_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Three nodes of ten layers each and an entry node, for tests that leave it as they found it."""
    with lab_of(tmp_path_factory.mktemp("thirds"), model, layers="0-10,10-20,20-30") as lab:
        yield lab


def runs(pid: int) -> bool:
    """Whether a process is there, and no zombie that waits for its parent."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def mapped(pid: int, suffix: str) -> dict[str, int]:
    """Bytes of a process: mappings of files that end in `suffix` (size and resident), and anonymous ones."""
    found = {"size": 0, "resident": 0, "anonymous": 0}
    current = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            current = line
        elif words[0] == "Size:" and current.endswith(suffix):
            found["size"] += int(words[1]) * 1024
        elif words[0] == "Rss:" and current.endswith(suffix):
            found["resident"] += int(words[1]) * 1024
        elif words[0] == "Anonymous:":
            found["anonymous"] += int(words[1]) * 1024
    return found


def open_files(pid: int) -> list[str]:
    """What a process has open or mapped."""
    found = []
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(entry.path))
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return found + [line.split(maxsplit=5)[5] for line in maps if len(line.split(maxsplit=5)) == 6]
