"""Identity on real parts: sets of shards and copies elsewhere are one model, and one flipped bit is another."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
import trio

import split_model
from meshnode.errors import MeshError
from meshnode.ids import parse_layers
from tests.artifact.changes import flip
from tests.node.conftest import TestMesh, settled  # noqa: F401
from tests.node.conftest import open_mesh as node_mesh

from .conftest import mapped

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("settled")]

PROMPT = "The capital of France is"
TOKENS = 12


@pytest.fixture(scope="module")
def shards(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Four shards, the first with metadata alone."""
    return split_model.split(model, tmp_path_factory.mktemp("set"), 4, metadata_first=True)


@pytest.fixture(scope="module")
def elsewhere(shards: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same set as a download cache keeps it: names that are links to files named otherwise."""
    root = tmp_path_factory.mktemp("el se'where é")
    (root / "blobs").mkdir()
    (root / "snapshot").mkdir()
    links = []
    for number, shard in enumerate(shards):
        shutil.copyfile(shard, root / "blobs" / f"{number:x}")
        links.append(root / "snapshot" / shard.name)
        links[-1].symlink_to(f"../blobs/{number:x}")
    return links


open_mesh = partial(node_mesh, within_s=60.0)


async def ids(mesh: TestMesh) -> list[int]:
    answer = await mesh.ask(await mesh.ready(), PROMPT, max_tokens=TOKENS)
    return list(answer["token_ids"])


@pytest.fixture(scope="module")
def expected(model: Path, worker_binary: Path) -> list[int]:
    """What one node with the single file says."""

    async def whole() -> list[int]:
        async with open_mesh(model, worker_binary, "0-30") as mesh:
            return await ids(mesh)

    return trio.run(whole)


async def test_two_copies_of_a_set_serve_one_route(
    shards: list[Path], elsewhere: list[Path], worker_binary: Path, expected: list[int]
) -> None:
    async with open_mesh(shards[0], worker_binary, "0-14") as mesh:
        await mesh.add(parse_layers("14-30"), model=elsewhere[2])  # entered at a shard within
        artifact = await mesh.ready()
        assert artifact.startswith("shards:")
        answer = await mesh.ask(artifact, PROMPT, max_tokens=TOKENS)
        assert answer["token_ids"] == expected
        assert [hop["effective"] for hop in answer["route"]] == [[0, 14], [14, 30]]
        for node, files in zip(mesh.nodes, (shards, elsewhere), strict=True):
            [holding] = node.status()["holdings"]
            size = sum(mapped(holding["worker"], str(file.resolve()))["size"] for file in files)
            assert 0 < size <= 1.1 * holding["tensor_bytes"], (size, holding)


async def test_a_set_of_one_is_a_file(model: Path, worker_binary: Path, tmp_path: Path, expected: list[int]) -> None:
    [only] = split_model.split(model, tmp_path, 1)
    async with open_mesh(only, worker_binary, "0-30") as mesh:
        assert (await mesh.ready()).startswith("sha256:")
        assert await ids(mesh) == expected


async def test_a_flipped_bit_is_never_chosen_and_refused_when_it_comes_later(
    model: Path, worker_binary: Path, tmp_path: Path, expected: list[int]
) -> None:
    copies = [tmp_path / name for name in ("it's a copy", "flipped", "spare")]
    for copy in copies:
        shutil.copyfile(model, copy)
    flip(copies[1])
    async with open_mesh(model, worker_binary, "0-14") as mesh:
        await mesh.add(parse_layers("14-30"), model=copies[0])
        flipped = await mesh.add(parse_layers("0-14"), model=copies[1])
        await mesh.ready()
        sound, other = ({h["artifact"] for h in node.status()["holdings"]} for node in (mesh.nodes[0], flipped))
        [artifact] = sound - other
        answer = await mesh.ask(artifact, PROMPT, max_tokens=TOKENS)
        assert answer["token_ids"] == expected
        assert [hop["peer"] for hop in answer["route"]] == [node.network.peer for node in mesh.nodes[:2]]
        flip(copies[0])
        with pytest.raises(MeshError):
            await mesh.ask(artifact, PROMPT, max_tokens=TOKENS)
        [holding] = mesh.nodes[1].status()["holdings"]
        assert holding["error"]["code"] == "identity_changed"
        await mesh.add(parse_layers("14-30"), model=copies[2])
        while mesh.nodes[-1].status()["state"] != "ready":
            await trio.sleep(0.02)
        answer = await mesh.ask(artifact, PROMPT, max_tokens=TOKENS)
        assert answer["token_ids"] == expected
        assert [hop["peer"] for hop in answer["route"]] == [mesh.nodes[n].network.peer for n in (0, -1)]
