"""What is accepted, the engine loads and decodes with: every known architecture, and files with one random change."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fixtures.make_fixtures import RECIPES, Tiny, model_bytes
from meshnode.artifact.identity import OpenArtifact, describe, open_artifact
from meshnode.artifact.shapes import FAMILIES
from meshnode.errors import MeshError
from meshnode.worker import LoadSpec, Sampling, Worker, open_worker
from tests.artifact.families import family_bytes

pytestmark = pytest.mark.live

SEED = int(os.environ.get("MESHNODE_SEED", "1"))
ROUNDS = int(os.environ.get("MESHNODE_ROUNDS", "1"))  # more in `make soak`
CHANGES = 250  # a round; a fifth of them is accepted


@asynccontextmanager
async def running(binary: Path, artifact: OpenArtifact) -> AsyncIterator[Worker]:
    spec = LoadSpec(artifact.files, n_sessions=1, n_ctx=16, max_step=8)
    async with open_worker(binary, spec) as worker:
        yield worker


async def decode_one(binary: Path, artifact: OpenArtifact) -> None:
    async with running(binary, artifact) as worker:
        await worker.open(1, Sampling(), [1])
        stepped = await worker.step(1, 0, worker.loaded.layers, tokens=[1], sample=True)
        assert stepped.sampled is not None


@pytest.mark.parametrize("architecture", FAMILIES)
async def test_every_architecture_of_the_table_is_as_the_engine_has_it(
    worker_binary: Path, tmp_path: Path, architecture: str
) -> None:
    path = tmp_path / "x.gguf"
    for kind in ({}, {"optional": True, "tied": False}):
        path.write_bytes(family_bytes(architecture, **kind))
        with open_artifact(path) as artifact:
            assert describe(artifact).architecture == architecture
            await decode_one(worker_binary, artifact)


def tiny_of(rng: random.Random) -> Tiny:
    kind, n_head = rng.choice(["F32", "F16", "Q8_0", "Q4_0"]), rng.choice([1, 2, 4])
    return Tiny(
        seed=rng.randrange(1000),
        n_layer=rng.randrange(1, 4),
        n_embd=n_head * (rng.choice([8, 32, 64]) if kind.startswith("F") else 32),
        n_ff=rng.choice([32, 64, 96]),
        n_head=n_head,
        n_kv=rng.choice([k for k in (1, 2, 4) if n_head % k == 0]),
        n_vocab=rng.randrange(259, 330),
        n_ctx=rng.choice([1, 100, 1 << 31]),
        type=kind,
        tied=rng.random() < 0.5,
    )


def changed(rng: random.Random, sound: bytes) -> tuple[bytes, bool]:
    """After one change, and whether that was to weights: mostly it is in the header, where it can do more."""
    body, header = bytearray(sound), sound.rindex(b"output_norm.weight") + 60
    at = rng.randrange(len(sound) if rng.random() < 0.05 else header)
    kind = rng.choice(["bit", "bit", "byte", "insert", "delete", "cut"])
    if kind == "bit":
        body[at] ^= 1 << rng.randrange(8)
    elif kind == "byte":
        body[at] = rng.choice([0, 1, 127, 128, 255])
    elif kind == "insert":
        body[at:at] = bytes(rng.choice([1, 4, 8, 32]))
    elif kind == "delete":
        del body[at : at + rng.choice([1, 4, 8, 32])]
    else:
        del body[at:]
    return bytes(body), at >= header


@pytest.mark.parametrize("turn", range(ROUNDS))
async def test_what_is_accepted_after_one_change_can_be_loaded_and_decoded_with(
    worker_binary: Path, tmp_path: Path, turn: int
) -> None:
    rng = random.Random(f"{SEED}/{turn}")
    sound = [model_bytes(recipe) for recipe, count, _ in RECIPES.values() if count == 1]
    sound += [model_bytes(tiny_of(rng)) for _ in range(10)]
    sound += [family_bytes(architecture, optional=True) for architecture in FAMILIES]
    path, accepted = tmp_path / "x.gguf", 0
    for body in sound:
        path.write_bytes(body)
        with open_artifact(path) as artifact:
            describe(artifact)
            await decode_one(worker_binary, artifact)
    for number in range(CHANGES):
        body, weights = changed(rng, rng.choice(sound))
        path.write_bytes(body)
        try:
            with open_artifact(path) as artifact:
                describe(artifact)
                accepted += 1
                await decode_one(worker_binary, artifact)
        except MeshError as error:
            # weights that make no number are found when they are computed with, and by their identity
            if error.code not in ("bad_gguf", "bad_shards", "unsupported_architecture", "bad_activation" * weights):
                raise AssertionError(f"change {number} of turn {turn}, seed {SEED}") from error
    assert accepted > CHANGES / 20
