"""Files for the tests of artifacts: sound ones from fixtures/make_fixtures.py, and the means to spoil them."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

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


def flip(path: Path, at: int = -8) -> None:
    """One bit, eight bytes before the end: a weight."""
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_END)
        byte = file.read(1)
        file.seek(at, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))


def _keep_mtime(path: Path) -> None:
    status = path.stat()
    flip(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _rename_over(path: Path) -> None:
    status, other = path.stat(), path.with_name("other")
    other.write_bytes(path.read_bytes())
    flip(other)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _swap_link(path: Path) -> None:
    """path is a link to a file; make it one to another file of the same size and date."""
    target = path.resolve()
    other = target.with_name("elsewhere.gguf")
    other.write_bytes(target.read_bytes())
    flip(other)
    status = target.stat()
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    link = path.with_name("link.new")
    link.symlink_to(other)
    link.replace(path)


def _through_map(path: Path) -> None:
    import mmap

    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        view[-8] ^= 1


CHANGES: dict[str, Callable[[Path], None]] = {
    "in place": flip,
    "in place, mtime kept": _keep_mtime,
    "renamed over": _rename_over,
    "grown": _append,
    "truncated": _truncate,
    "link swapped": _swap_link,
    "through a map": _through_map,
}
