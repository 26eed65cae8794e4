"""A file that crashes its worker is not tried again and again."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from meshnode.config import Home
from meshnode.errors import MeshError
from meshnode.ids import ArtifactId
from meshnode.mesh import Mesh
from meshnode.node import ServeModel, open_node
from meshnode.node.quarantine import Quarantine, program_key

from .conftest import CONFIG

ONE, OTHER = ArtifactId("sha256:" + "1" * 64), ArtifactId("sha256:" + "2" * 64)


def test_it_is_kept_by_artifact_and_program(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.json"
    Quarantine(path).add(ONE, "a", "the worker was ended by SIGABRT")
    again = Quarantine(path)
    with pytest.raises(MeshError, match="SIGABRT") as refused:
        again.check(ONE, "a")
    assert (refused.value.code, "--retry-crashed" in refused.value.hint) == ("quarantined", True)
    again.check(OTHER, "a")
    again.check(ONE, "b")
    again.lift(ONE, "a")
    Quarantine(path).check(ONE, "a")


@pytest.mark.parametrize("content", ["", "{", "[1]", "\0"])
def test_a_damaged_file_counts_as_empty(tmp_path: Path, content: str) -> None:
    path = tmp_path / "quarantine.json"
    path.write_text(content)
    Quarantine(path).check(ONE, "a")


def test_programs_differ_by_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    assert program_key(tmp_path / "a") != program_key(tmp_path / "b")
    with pytest.raises(MeshError, match="cannot be started"):
        program_key(tmp_path / "none")


async def serve(home: Path, model: Path, worker: Path, retry: bool = False, after: Callable[[int], None] = id) -> None:
    """Returns once the model is served; after(the worker's process id) is called then."""
    config = dataclasses.replace(CONFIG, retry_crashed=retry)
    mesh, models = Mesh("m", None), [ServeModel(model)]
    with trio.fail_after(10):
        async with open_node(Home(home), config, mesh=mesh, models=models, worker=worker) as node:
            while node.status()["state"] != "ready":
                await trio.sleep(0.01)
            first = node.status()["holdings"][0]["worker"]
            after(first)
            while after is not id and node.status()["holdings"][0]["worker"] in (first, None):
                await trio.sleep(0.01)


@pytest.mark.parametrize("when", ["load", "step"])
async def test_what_crashes_a_worker_is_refused_until_it_is_lifted(
    tmp_path: Path, toy: Path, fake_worker: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("MESHNODE_FAKE_ABORT", when)
    with pytest.raises(MeshError, match="SIGABRT") as crashed:
        await serve(home, toy, fake_worker)
    assert crashed.value.code == "worker_died"
    monkeypatch.delenv("MESHNODE_FAKE_ABORT")
    with pytest.raises(MeshError, match="SIGABRT on loading layers 0-6") as refused:
        await serve(home, toy, fake_worker)
    assert refused.value.code == "quarantined"
    assert str(tmp_path) not in refused.value.message
    await serve(home, toy, fake_worker, retry=True)
    await serve(home, toy, fake_worker)


async def test_what_has_served_is_not_to_blame_for_a_later_crash(tmp_path: Path, toy: Path, fake_worker: Path) -> None:
    await serve(tmp_path / "home", toy, fake_worker, after=lambda pid: os.kill(pid, signal.SIGSEGV))
    await serve(tmp_path / "home", toy, fake_worker)
