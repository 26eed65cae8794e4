"""Content identity: what an artifact is called wherever it lies.

open_artifact(path) -> OpenArtifact             the file, or the whole set when path is any shard of one
identify(artifact, progress, cancelled) -> str  "sha256:<64 hex digits>" or "shards:<64 hex digits>"
describe(artifact) -> Summary                   the checked header of the model in it
identity_of(parts) -> str                       from (size, digest) of each file, in order

The text of these rules is protocol/01-identity.md. An identity says nothing of names, paths or dates.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType

from ..errors import MeshError
from .files import FileStamp, OpenFile, PathLike, open_file, show
from .gguf import Summary, label, read_header, validate
from .header import Header
from .shards import merge, set_files, shard_name, split_count

__all__ = ["FileStamp", "OpenArtifact", "check", "describe", "digests", "identify", "identity_of", "open_artifact"]

Progress = Callable[[int, int], None]  # (bytes done, bytes in all); called from other threads, one call at a time
Cancelled = Callable[[], bool]
KnownSplit = Callable[[FileStamp], int | None]  # the number of files of the set whose shard has this stamp, if known

DOMAIN = b"meshnode/1/shards\0"  # no other hash in the system begins with it
CHUNK = 256 << 10  # bytes hashed between two looks at `cancelled`; stays in the cache of one core
HASHERS = 4  # shards hashed at once: more only make a disk seek


@dataclass(slots=True)
class OpenArtifact:
    """A model's files, each opened once and kept open; a context manager that closes them. For the operator's eyes."""

    files: tuple[OpenFile, ...]
    warnings: tuple[str, ...] = ()

    @property
    def fd(self) -> int:
        """The descriptor of the only file, or of the first shard."""
        return self.files[0].fd

    @property
    def fds(self) -> tuple[int, ...]:
        return tuple(file.fd for file in self.files)

    @property
    def stamp(self) -> FileStamp:
        """The stamp of the only file, or of the first shard."""
        return self.files[0].stamp

    @property
    def stamps(self) -> tuple[FileStamp, ...]:
        return tuple(file.stamp for file in self.files)

    @property
    def path(self) -> str:
        return self.files[0].path

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def stem(self) -> str:
        """The file's name without folder, suffix and number: a label for the local operator."""
        name = shard_name(self.path) if len(self.files) > 1 else None
        return label(name.prefix if name else re.sub(r"\.gguf\Z", "", self.path, flags=re.IGNORECASE))

    def check_unchanged(self) -> None:
        """Raise identity_changed when any of the open files is not as it was opened."""
        for file in self.files:
            file.check_unchanged()

    def close(self) -> None:
        for file in self.files:
            file.close()

    def __enter__(self) -> OpenArtifact:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def open_artifact(path: PathLike, known_split: KnownSplit | None = None) -> OpenArtifact:
    """Open a model's file, or every file of the set that it is a shard of; nothing is fetched for what is missing.

    Errors: as files.open_file, bad_gguf (a shard whose header cannot be read), bad_shards (one is missing or misnamed).
    """
    with ExitStack() as opened:
        entered = opened.enter_context(open_file(path))
        name = shard_name(entered.path)
        count = 1
        if name is not None and name.count > 1:
            count = (known_split(entered.stamp) if known_split else None) or _split_count(entered)
        if count == 1:
            opened.pop_all()
            return OpenArtifact((entered,))
        paths, warnings = set_files(entered.path, count)
        files = []
        for i, shard in enumerate(paths):
            if name is not None and i + 1 == name.number:
                files.append(entered)
                continue
            try:
                files.append(opened.enter_context(open_file(shard)))
            except MeshError as error:
                if error.code != "not_found":
                    raise
                raise MeshError("bad_shards", f"shard {i + 1} of {count} is missing: {error.message}") from None
        opened.pop_all()
        return OpenArtifact(tuple(files), warnings)


def check(artifact: OpenArtifact) -> Summary:
    """Check the headers of an open artifact; the name is "" where the bytes give none.

    Errors: as gguf.validate; bad_shards for a set that does not fit together; identity_changed.
    """
    files = artifact.files
    if len(files) == 1:
        header = read_header(files[0].fd, files[0].size)
    else:
        header = merge(map(_shard, files, range(1, len(files) + 1)), len(files))
    summary = validate(header)
    artifact.check_unchanged()
    return summary


def _shard(file: OpenFile, number: int) -> Header:
    try:
        return read_header(file.fd, file.size)
    except MeshError as error:
        raise MeshError(error.code, f"shard {number}: {error.message}", hint=error.hint) from None


def describe(artifact: OpenArtifact) -> Summary:
    """check(), with a name of its kind where the bytes give none: what the file is called stays with the operator."""
    return named(check(artifact))


def named(summary: Summary) -> Summary:
    """It, with a name of its kind where it has none."""
    return summary if summary.name else replace(summary, name=f"{summary.architecture} model")


def identify(artifact: OpenArtifact, progress: Progress | None = None, cancelled: Cancelled | None = None) -> str:
    """Hash the open artifact and name it.

    Errors: identity_changed (it changed while it was read), cancelled, unreadable.
    """
    parts = digests(artifact.files, progress, cancelled)
    return identity_of([(file.size, part) for file, part in zip(artifact.files, parts, strict=True)])


def identity_of(parts: Sequence[tuple[int, bytes]]) -> str:
    """The identity of files of these sizes and SHA-256 digests, in the order of the set."""
    if len(parts) == 1:
        return f"sha256:{parts[0][1].hex()}"
    sha = hashlib.sha256(DOMAIN + len(parts).to_bytes(4, "big"))
    for position, (size, digest) in enumerate(parts):
        sha.update(position.to_bytes(4, "big") + size.to_bytes(8, "big") + digest)
    return f"shards:{sha.hexdigest()}"


def digests(
    files: Sequence[OpenFile], progress: Progress | None = None, cancelled: Cancelled | None = None
) -> list[bytes]:
    """The SHA-256 of each file's bytes; several are read at once. Errors as identify."""
    total, lock, done = sum(file.size for file in files), threading.Lock(), 0

    def advance(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            if progress is not None:
                progress(done, total)

    if len(files) == 1:
        return [_digest(files[0], advance, cancelled)]
    failed = threading.Event()

    def stop() -> bool:
        return failed.is_set() or (cancelled is not None and cancelled())

    def one(file: OpenFile) -> bytes:
        try:
            return _digest(file, advance, stop)
        except BaseException:
            failed.set()  # the others need not finish
            raise

    with ThreadPoolExecutor(min(HASHERS, len(files)), "hash") as pool:
        results = [pool.submit(one, file) for file in files]
        try:
            wait(results)
        except BaseException:  # a Ctrl-C: the pool would wait for every file's end
            failed.set()
            raise
    faults = [fault for result in results if (fault := result.exception()) is not None]
    for fault in faults:
        if not (isinstance(fault, MeshError) and fault.code == "cancelled"):
            raise fault  # the cause, not those that stopped because of it
    return [result.result() for result in results]


def _digest(file: OpenFile, advance: Callable[[int], None], cancelled: Cancelled | None) -> bytes:
    sha, size, done = hashlib.sha256(), file.size, 0
    buffer = memoryview(bytearray(min(CHUNK, size)))
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
        advance(count)
    file.check_unchanged()
    return sha.digest()


def _split_count(file: OpenFile) -> int:
    return split_count(read_header(file.fd, file.size))
