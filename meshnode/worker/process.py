"""The worker as an operating system process: spawned, read, written, killed and reaped, never left behind.

trio's own open_process spawns in a helper thread that ends when idle, and a worker that asked to die with its parent
(PR_SET_PDEATHSIG means the parent *thread*) would die with that. So it is spawned in trio's thread, a few ms.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import trio

from ..errors import MeshError
from ..wire.worker_messages import Buffer

# Sockets, as a residual of a prompt chunk (0.3 MB and more) takes a third of a pipe's time. The kernel may grant less.
BUFFER_BYTES = 1 << 20
EXIT_FRAMING_LOST = 3
_ENVIRONMENT = {
    "GOMP_SPINCOUNT": "5000",  # the default lets idle stages spin: two stages on two cores fall to half their speed
    "GGML_NO_BACKTRACE": "1",  # an abort takes 10 ms, not 400
}


def environment() -> dict[str, str]:
    """The node's own, without what would override the number of threads that the worker is told."""
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | _ENVIRONMENT


class Process:
    """One running worker. Its pipes' ends on this side do not block; close() has to follow, also after it ended."""

    def __init__(self, binary: Path, fds: Sequence[int]) -> None:
        """Start binary, which inherits fds under their numbers. Raises MeshError worker_died when it cannot start."""
        with ExitStack() as theirs, ExitStack() as ours:

            def channel() -> tuple[int, int]:
                mine, other = socket.socketpair()
                for end in (mine, other):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
                mine.setblocking(False)
                ends = mine.detach(), other.detach()
                ours.callback(os.close, ends[0])
                theirs.callback(os.close, ends[1])
                return ends

            # A pair each: one that its peer closed with unread input in it would lose the last output.
            (self._in, stdin), (self._out, stdout), (self._log, stderr) = channel(), channel(), channel()
            try:
                self._popen = subprocess.Popen(
                    [binary.absolute()],
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    pass_fds=fds,
                    env=environment(),
                    cwd="/",
                    process_group=0,  # a Ctrl-C in the terminal is the node's to handle
                )
            except OSError as error:
                raise MeshError("worker_died", f"the worker cannot be started: {error.strerror}") from None
            try:
                self._pidfd = os.pidfd_open(self._popen.pid)
            except OSError as error:
                self._popen.kill()
                self._popen.wait()
                raise MeshError("worker_died", f"the worker cannot be watched: {error.strerror}") from None
            self._ends = ours.pop_all()
        self.pid = self._popen.pid

    async def read_into(self, space: memoryview) -> int:
        """Wait for output and read what there is, at most len(space) bytes; 0 at its end."""
        return await _read(self._out, space)

    async def read_log_into(self, space: memoryview) -> int:
        return await _read(self._log, space)

    async def write(self, parts: Sequence[Buffer]) -> None:
        """Write all parts, mostly in one call without a checkpoint. Raises BrokenPipeError when nobody reads them.

        Cancelled halfway it leaves half a frame: shield it.
        """
        left = list(parts)
        while left:
            try:
                sent = os.writev(self._in, left)
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._in)
                continue
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if sent:
                left[0] = memoryview(left[0])[sent:]

    def kill(self) -> None:
        """SIGKILL: a worker keeps nothing that an orderly end would save, and one that hangs heeds nothing else."""
        self._popen.kill()

    async def wait(self) -> int:
        """Its exit status, negative for a signal."""
        if self._popen.returncode is None:
            await trio.lowlevel.wait_readable(self._pidfd)
        return self._popen.wait()

    async def end(self) -> None:
        """Kill, reap and close, whatever is cancelled."""
        self.kill()
        with trio.CancelScope(shield=True):
            await self.wait()
        for fd in (self._in, self._out, self._log):
            trio.lowlevel.notify_closing(fd)
        self._ends.close()
        os.close(self._pidfd)
        self._in = self._out = self._log = -1


async def _read(fd: int, space: memoryview) -> int:
    while True:
        await trio.lowlevel.wait_readable(fd)
        try:
            return os.readv(fd, [space])
        except BlockingIOError:
            continue
        except ConnectionResetError:
            return 0


class WorkerCrashed(MeshError):
    """worker_died of a fault of its own: what it worked on may be to blame, unlike when it was killed."""


CRASHES = frozenset({signal.SIGABRT, signal.SIGSEGV, signal.SIGFPE, signal.SIGILL})  # a file cut short gives SIGBUS


def ended(status: int) -> MeshError:
    """The fault that an exit status stands for."""
    kind = WorkerCrashed if -status in CRASHES else MeshError
    return kind("worker_died", describe_exit(status))


def describe_exit(status: int) -> str:
    """For people and peers: which signal or status ended the worker."""
    if status < 0:
        try:
            return f"the worker was ended by {signal.Signals(-status).name}"
        except ValueError:
            return f"the worker was ended by signal {-status}"
    reason = ": it could not read its input" if status == EXIT_FRAMING_LOST else ""
    return f"the worker ended with status {status}{reason}"
