"""One local file, opened once: the descriptor that is hashed and checked is the one the worker gets.

open_file(path) -> OpenFile    a regular file, opened without ever blocking
OpenFile.fd, .size, .stamp     the descriptor, and the file's stamp when it was opened
OpenFile.check_unchanged()     identity_changed once the file's stamp has moved
OpenFile.settled(now_ns)       whether an unmoved stamp will prove unmoved bytes from now on
FileStamp                      (device, inode, size, mtime_ns, ctime_ns)
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
from dataclasses import dataclass, field
from types import TracebackType

from ..errors import MeshError

PathLike = str | os.PathLike[str]

SETTLE_NS = 2_000_000_000  # ns after its ctime: two writes within a clock's grain (2 s on FAT) can leave one stamp

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What tells one state of a file from another without reading it. size in bytes, times in ns since the epoch."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileStamp:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@dataclass(slots=True)
class OpenFile:
    """A regular file that stays open; a context manager that closes it. path is for the local operator alone."""

    path: str
    fd: int
    stamp: FileStamp
    _closed: bool = field(default=False, repr=False)

    @property
    def size(self) -> int:
        """Bytes, when it was opened."""
        return self.stamp.size

    def check_unchanged(self) -> None:
        """Raise identity_changed when the open file's stamp is no longer the one it was opened with."""
        if FileStamp.of(os.fstat(self.fd)) != self.stamp:
            raise MeshError("identity_changed", f"{show(self.path)} was changed after it was opened")

    def settled(self, now_ns: int) -> bool:
        """Whether, from now on, an equal stamp means equal bytes. now_ns: the wall clock before the bytes are read.

        Not so while its last change is too young, while someone has it open for writing (pages that are already dirty
        change without a new ctime), and on memory file systems, where writing through a map leaves no trace.
        """
        return now_ns - self.stamp.ctime_ns >= SETTLE_NS and not _in_memory(self.fd) and not _open_for_writing(self.fd)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self.fd)

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def open_file(path: PathLike) -> OpenFile:
    """Open a non-empty regular file for reading.

    Errors: not_found (missing, a dangling link, a loop of links), not_a_file (a directory, FIFO, socket, device),
    unreadable (permissions, the disk), bad_gguf (empty).
    """
    name = os.fspath(path)
    try:
        # O_PATH opens no driver and waits for no writer, so that what it is can be asked before anything is touched
        handle = os.open(name, os.O_PATH | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise _open_error(name, error) from None
    try:
        _require_regular(name, os.fstat(handle).st_mode)
        try:
            fd = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        except OSError as error:
            raise _open_error(name, error) from None
    finally:
        os.close(handle)
    opened = OpenFile(name, fd, FileStamp.of(os.fstat(fd)))
    if opened.size == 0:
        opened.close()
        raise MeshError("bad_gguf", f"{show(name)} is empty")
    return opened


def show(path: str) -> str:
    """A path as it may stand in a message to the local operator: on one line, whatever its name holds."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "'" + "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text) + "'"


def _in_memory(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)  # only files in memory have seals
    except OSError:
        return False
    return True


def _open_for_writing(fd: int) -> bool:
    """Whether anyone can write through an open descriptor or a map; False where the kernel does not tell us."""
    try:
        # whoever breaks the lease has us signalled: with one that is ignored, not with the SIGIO that kills
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        return error.errno in (errno.EAGAIN, errno.EWOULDBLOCK)
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def _require_regular(name: str, mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    kind = next((text for test, text in _KINDS if test(mode)), "no regular file")
    raise MeshError("not_a_file", f"{show(name)} is {kind}")


def _open_error(name: str, error: Exception) -> MeshError:
    if not isinstance(error, OSError):  # a NUL in the name
        return MeshError("not_found", f"{show(name)} is no possible path")
    if error.errno == errno.ELOOP:
        return MeshError("not_found", f"{show(name)} is a loop of symbolic links")
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
        what = "is a symbolic link to nothing" if os.path.islink(name) else "does not exist"
        return MeshError("not_found", f"{show(name)} {what}")
    return MeshError("unreadable", f"{show(name)} cannot be opened: {os.strerror(error.errno or 0)}")
