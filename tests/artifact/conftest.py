"""Sound files for the tests of artifacts, from fixtures/make_fixtures.py."""

import time
from pathlib import Path

import pytest

from fixtures.make_fixtures import Tiny, model_bytes

OLD_NS = 3_600_000_000_000  # an hour: how far the tests' clock is ahead, so that fresh files count as settled


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    return Tiny(n_layer=2)


@pytest.fixture(scope="session")
def tiny_bytes(tiny: Tiny) -> bytes:
    return model_bytes(tiny)


@pytest.fixture
def tiny_file(tmp_path: Path, tiny_bytes: bytes) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_bytes)
    return path


@pytest.fixture
def now_ns() -> int:
    return time.time_ns() + OLD_NS
