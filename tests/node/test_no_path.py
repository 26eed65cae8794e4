"""No part of a path leaves the node: not with an answer, and not with any of the faults that a file can have."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import make_fixtures
from meshnode.errors import MeshError
from meshnode.wire import cbor
from tests.artifact.changes import flip

from .conftest import TestMesh, open_mesh

PLANTED = ("plantedfolder", "plantedfile", "plantedprojector")
NAMELESS = make_fixtures.Tiny(n_layer=6, seed=7, name="")  # whose file's name is all the name it has


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A set of three shards under planted names, with a projector beside it."""
    monkeypatch.setenv("MESHNODE_FAKE_SHAPE", "6 64 320")
    folder = tmp_path / f'{PLANTED[0]} "é\n'
    folder.mkdir()
    paths = [folder / f"{PLANTED[1]}-{n + 1:05d}-of-00003.gguf" for n in range(3)]
    for path, body in zip(paths, make_fixtures.shard_bytes(NAMELESS, 3), strict=True):
        path.write_bytes(body)
    projector = [m for m in make_fixtures.metadata(NAMELESS) if not m.key.startswith("llama.")]
    projector[0] = projector[0]._replace(value="clip")
    (folder / f"mmproj-{PLANTED[2]}.gguf").write_bytes(make_fixtures.encode(projector, []))
    return paths


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> list[bytes]:
    """Every message and statement of every node, as bytes. The log is at the level of a node's log file."""
    caplog.set_level(logging.WARNING)
    caplog.set_level(logging.INFO, logger="meshnode")
    kept: list[bytes] = []
    real = cbor.dumps

    def dumps(value: Any) -> bytes:
        kept.append(real(value))
        return kept[-1]

    monkeypatch.setattr(cbor, "dumps", dumps)
    return kept


async def shown(mesh: TestMesh, model: str) -> str:
    """What the control API answers, at every node."""
    seen: list[Any] = []
    for node in [*mesh.nodes, mesh.entry]:
        seen += [node.status() | {"home": None}, await node.peers(), await node.models()]
        try:
            seen.append(await node.route(model))
        except MeshError as error:
            seen.append([error.code, error.message, error.hint])
    return json.dumps(seen, ensure_ascii=False)


def crash(node: Any) -> None:
    if (pid := node.status()["holdings"][0]["worker"]) is not None:
        os.kill(pid, signal.SIGKILL)


FAULTS: dict[str, Callable[[list[Path]], Any]] = {
    "nothing": lambda paths: None,
    "missing": lambda paths: paths[0].unlink(),
    "a shard missing": lambda paths: paths[1].unlink(),
    "changed": lambda paths: flip(paths[2]),
    "a directory instead": lambda paths: (paths[1].unlink(), paths[1].mkdir()),
    "the folder gone": lambda paths: shutil.rmtree(paths[0].parent),
    "unreadable": lambda paths: None,  # below
    "bad model": lambda paths: os.environ.__setitem__("MESHNODE_FAKE_SHAPE", "0 0 0"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_no_part_of_a_path_is_said_to_anyone(
    files: list[Path],
    fake_worker: Path,
    said: list[bytes],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    async with open_mesh(files[1], fake_worker, "0-3", "3-6") as mesh:
        model, [head, _] = await mesh.ready(), mesh.nodes
        await mesh.ask(model, max_tokens=3)
        seen = [await shown(mesh, model)]
        FAULTS[fault](files)
        if fault == "unreadable":

            def fail(path: Any) -> Any:
                raise MeshError("unreadable", f"{path} cannot be opened")

            monkeypatch.setattr("meshnode.artifact.identity.open_file", fail)
        for act in (lambda: None, head._announce_now.set, lambda: crash(head)):
            act()
            try:
                seen.append(json.dumps(await mesh.ask(model, max_tokens=3)))
            except MeshError as error:
                seen.append(str([error.code, error.message, error.hint]))
            seen.append(await shown(mesh, model))
    assert len(said) > 20
    seen += [record.getMessage() + (record.exc_text or "") for record in caplog.records]
    for planted in PLANTED:
        assert not [message for message in said if planted.encode() in message]
        assert not [text for text in seen if planted in text]
