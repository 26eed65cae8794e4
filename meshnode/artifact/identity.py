"""Content identity: what an artifact is called wherever it lies.

open_artifact(path) -> OpenArtifact           context manager; .fd .stamp .size
identify(artifact, progress, cancelled) -> str  "sha256:<64 hex digits>"

The text of these rules is protocol/01-identity.md. An identity says nothing of names, paths or dates.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable

from ..errors import MeshError
from .files import FileStamp, OpenFile, PathLike, open_file, show

__all__ = ["FileStamp", "OpenArtifact", "identify", "open_artifact"]

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)
Cancelled = Callable[[], bool]

CHUNK = 1 << 20  # bytes hashed between two looks at `cancelled`: well under 10 ms, so that Ctrl-C feels immediate

OpenArtifact = OpenFile


def open_artifact(path: PathLike) -> OpenArtifact:
    """Open an artifact's file once, as a regular file; errors as in files.open_file."""
    return open_file(path)


def identify(artifact: OpenArtifact, progress: Progress | None = None, cancelled: Cancelled | None = None) -> str:
    """Hash the open artifact: "sha256:" and the hex digest of its bytes.

    Errors: identity_changed (it changed while it was read), cancelled, unreadable.
    """
    return f"sha256:{_digest(artifact, progress, cancelled).hex()}"


def _digest(file: OpenFile, progress: Progress | None, cancelled: Cancelled | None) -> bytes:
    sha, size, done = hashlib.sha256(), file.size, 0
    buffer = memoryview(bytearray(min(CHUNK, size)))
    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    while done < size:
        if cancelled is not None and cancelled():
            raise MeshError("cancelled", "identification was cancelled")
        try:
            count = os.preadv(file.fd, [buffer[: size - done]], done)
        except OSError as error:
            raise MeshError("unreadable", f"{show(file.path)} cannot be read: {error.strerror}") from None
        if count == 0:
            break  # shorter than it was: the stamp says so below
        sha.update(buffer[:count])
        done += count
        if progress is not None:
            progress(done, size)
    file.check_unchanged()
    return sha.digest()
