"""Identity on real parts: sets of shards and copies elsewhere are one model, and one flipped bit is another."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import trio

import split_model
from meshnode.ids import parse_layers
from tests.node.conftest import TestMesh, open_mesh

from .conftest import mapped

pytestmark = pytest.mark.live

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
