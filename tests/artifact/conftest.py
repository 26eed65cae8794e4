"""Sound files for the tests of artifacts, from fixtures/make_fixtures.py."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.make_fixtures import Tiny, model_bytes
from meshnode.artifact.files import _in_memory

OLD_NS = 3_600_000_000_000  # an hour: how far the tests' clock is ahead, so that fresh files count as settled


@pytest.fixture
def tmp_path(tmp_path: Path, pytestconfig: pytest.Config) -> Iterator[Path]:
    """A folder on a disk: many machines keep /tmp in memory, where no stamp is trusted and every file is read again."""
    if not in_memory(tmp_path):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix=".artifact-", dir=pytestconfig.rootpath) as folder:
        if in_memory(Path(folder)):
            pytest.skip("neither /tmp nor the checkout lies on a disk")
        yield Path(folder)


def in_memory(folder: Path) -> bool:
    with tempfile.TemporaryFile(dir=folder) as file:
        return _in_memory(file.fileno())


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
