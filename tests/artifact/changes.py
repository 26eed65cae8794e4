"""Ways in which a file changes under who identified it; a careless cache misses most of them."""

import mmap
import os
from collections.abc import Callable
from pathlib import Path


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
