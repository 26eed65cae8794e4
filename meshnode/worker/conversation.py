"""A node's conversation with one worker: many tasks ask at once, each gets the reply to its own request."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TypeVar

import trio

from ..artifact.files import OpenFile
from ..errors import MeshError
from ..wire import worker as wire
from ..wire import worker_messages as say
from ..wire.worker_messages import Buffer, ChatFacts, Loaded, Sampling, Stepped
from .process import Process, ended

logger = logging.getLogger(__name__)

LOAD_TIMEOUT = 120.0  # s; a cold disk reads some 10 GB in it
STEP_TIMEOUT = 30.0  # s without any reply while one is owed: three times a slow machine's prompt chunk
LOG_LINES = 20  # kept of what the worker last logged
LOG_LINE_BYTES = 4096  # of a line, longer ones are cut
NUMERICS = {"invariant": wire.INVARIANT, "fast": wire.FAST}

_Reply = TypeVar("_Reply", bound=say.Reply)


@dataclass(frozen=True)
class LoadSpec:
    """What a worker is to load. files: the open model file, or all of its set in order, as they were identified.

    layers: the holding, half-open, None for every layer; n_ctx: positions of each of n_sessions; max_step: positions a
    step may carry; numerics: "invariant" or "fast".
    """

    files: Sequence[OpenFile]
    layers: tuple[int, int] | None = None
    n_sessions: int = 4
    n_ctx: int = 2048
    max_step: int = 256
    n_threads: int = 1
    numerics: str = "invariant"

    def message(self) -> say.Load:
        if self.numerics not in NUMERICS:
            raise MeshError("bad_config", f"numerics is {self.numerics!r}", hint=f"say {' or '.join(NUMERICS)}")
        return say.Load(
            tuple(_model_file(file) for file in self.files), self.layers or (0, -1),
            self.n_sessions, self.n_ctx, self.max_step, self.n_threads, NUMERICS[self.numerics],
        )  # fmt: skip


def _model_file(file: OpenFile) -> say.ModelFile:
    s = file.stamp
    return say.ModelFile(f"/proc/self/fd/{file.fd}", s.device, s.inode, s.size, s.mtime_ns, s.ctime_ns)


class _Call:
    """A request that waits for its reply; without a reply when it wakes, the worker is gone."""

    __slots__ = ("reply", "woken")

    def __init__(self) -> None:
        self.woken = trio.Event()
        self.reply: say.Message | None = None


class Worker:
    """A loaded worker. Every method may be called by many tasks at once, and raises MeshError.

    A call that is cancelled leaves the conversation in order, but what it asked for may have happened: close a handle
    whose open() or step() was cancelled. With the worker gone, every call raises its `fault`: worker_died or
    worker_hung. `log_tail` holds its last log lines, which may name paths: never send them to a peer.
    """

    loaded: Loaded

    def __init__(self, process: Process, step_timeout: float) -> None:
        self.pid = process.pid
        self.step_timeout = step_timeout
        self.engine = ""
        self.died = trio.Event()
        self.fault: MeshError | None = None
        self.log_tail: deque[str] = deque(maxlen=LOG_LINES)
        self._process = process
        self._greeted = trio.Event()
        self._sending = trio.Lock()
        self._reader = wire.FrameReader()
        self._request_bound = wire.UNLOADED_BOUND
        self._ids = count(1)
        self._newest = 0
        self._calls: dict[int, _Call] = {}
        self._progress = 0.0  # when a reply last came, or when the first request after none was made
        self._owing = trio.Event()

    async def open(self, handle: int, sampling: Sampling, prompt: Sequence[int] = (), start: int | None = None) -> None:
        """Take a free session under handle. prompt: the ids so far, which a tail samples from.

        start: position of the first generated token, where that is not the prompt's end. busy: none is free;
        bad_grammar.
        """
        start = len(prompt) if start is None else start
        await self._ask(say.Open(handle, sampling, start, tuple(prompt)), say.Opened)

    async def fork(
        self,
        handle: int,
        origin: int,
        keep: int,
        sampling: Sampling,
        prompt: Sequence[int] = (),
        start: int | None = None,
    ) -> None:
        """A session that begins as the first `keep` positions of `origin`, which stays as it is.

        prompt: its ids from position `keep` on; start: position of the first generated token, where that is not the
        prompt's end. busy; cache_miss: there are fewer positions.
        """
        start = keep + len(prompt) if start is None else start
        await self._ask(say.Fork(handle, origin, keep, sampling, start, tuple(prompt)), say.Forked)

    async def step(
        self,
        handle: int,
        first_pos: int,
        layers: tuple[int, int],
        *,
        tokens: Sequence[int] | None = None,
        residual: Buffer | None = None,
        sample: bool = False,
    ) -> Stepped:
        """Push positions first_pos, first_pos + 1, ... through layers, the effective range.

        tokens: ids at layer 0; residual: [n, n_embd] f32 little-endian elsewhere. The reply has the residual that
        leaves, or at the tail the token sampled after the last position if `sample` is set.
        """
        ids = None if tokens is None else tuple(tokens)
        return await self._ask(say.Step(handle, first_pos, layers, sample, ids, residual), Stepped)

    async def truncate(self, handle: int, keep: int) -> None:
        """Forget the positions from `keep` on. cache_miss: there are fewer."""
        await self._ask(say.Truncate(handle, keep), say.Truncated)

    async def close(self, handle: int) -> None:
        """Free the session once no computation uses it; its waiting steps end with cancelled. May be repeated."""
        await self._ask(say.Close(handle), say.Closed)

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """add_special: as a text begins; parse_special: text such as <|im_end|> becomes its control token."""
        return list((await self._ask(say.Tokenize(text, add_special, parse_special), say.Tokens)).ids)

    async def tokenize_segments(self, segments: Sequence[tuple[bool, str]]) -> list[int]:
        """A rendered chat: (the template's own, text) pairs. Only what is its own can be control tokens."""
        return list((await self._ask(say.Tokenize(segments=tuple(segments)), say.Tokens)).ids)

    async def chat_facts(self) -> ChatFacts:
        """What rendering the model's chat template takes."""
        return await self._ask(say.DescribeChat(), ChatFacts)

    async def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token; none for control tokens."""
        pieces: list[bytes] = []
        for start in range(0, len(ids), wire.MAX_PIECES):
            part = tuple(ids[start : start + wire.MAX_PIECES])
            pieces += (await self._ask(say.Pieces(part), say.PieceList)).pieces
        return pieces

    async def _ask(self, message: say.Request, expected: type[_Reply]) -> _Reply:
        self._newest = number = next(self._ids)
        parts = wire.encode(message, number)
        if sum(map(len, parts)) > wire.HEADER.size + self._request_bound:
            raise MeshError("bad_frame", f"a {type(message).__name__.lower()} too long for the worker")
        call = _Call()
        try:
            await self._send(parts, number, call)
            await call.woken.wait()
        finally:
            self._calls.pop(number, None)
        if call.reply is None:
            raise self._again()
        if isinstance(call.reply, say.Error):
            raise MeshError(call.reply.code, call.reply.message)
        if not isinstance(call.reply, expected):
            self._fail(MeshError("worker_died", "the worker answered a request with another's kind of reply"))
            raise self._again()
        return call.reply

    async def _send(self, parts: list[Buffer], number: int, call: _Call) -> None:
        """Whole or not at all: cancelled while another frame is being written, nothing is."""
        try:
            self._sending.acquire_nowait()
        except trio.WouldBlock:
            await self._sending.acquire()
        try:
            if self.fault:
                raise self._again()
            if not self._calls:
                self._progress = trio.current_time()
                self._owing.set()
            self._calls[number] = call
            with trio.CancelScope(shield=True):  # bounded: the watchdog kills a worker that does not read
                await self._process.write(parts)
        except (OSError, trio.ClosedResourceError):
            # It is gone, or is being ended: the reader learns how and wakes this call.
            return
        finally:
            self._sending.release()

    def _again(self) -> MeshError:
        """The fault as an error of its own for each caller, so that their tracebacks stay apart."""
        fault = self.fault or MeshError("internal", "a call ended without a reply")
        return type(fault)(fault.code, fault.message, hint=fault.hint)

    def _fail(self, fault: MeshError) -> None:
        """The first fault stands: kill the worker and wake whoever waits."""
        if self.fault is None:
            self.fault = fault
            self._process.kill()
        self._greeted.set()
        for call in self._calls.values():
            call.woken.set()

    def _take(self, kind: int, number: int, message: say.Message) -> None:
        if not self._greeted.is_set():
            if not isinstance(message, say.Hello) or number != 0:
                raise MeshError("bad_frame", "no hello came first")
            if message.version != wire.VERSION:
                fault = f"the worker speaks version {message.version}, this node {wire.VERSION}"
                return self._fail(MeshError("version_mismatch", fault, hint="build the worker of this version"))
            self.engine = message.engine
            return self._greeted.set()
        if not 0 < number <= self._newest or kind < 0x80:
            raise MeshError("bad_frame", "a reply to no request")
        self._progress = trio.current_time()
        call = self._calls.pop(number, None)
        if call is not None:  # else its caller was cancelled
            call.reply = message
            call.woken.set()
        return None

    async def _read(self) -> None:
        """Until the worker ends: hand out replies; then say how it ended."""
        try:
            while n := await self._process.read_into(self._reader.space()):
                for kind, number, body in self._reader.received(n):
                    self._take(kind, number, wire.decode(kind, body))
        except MeshError as error:
            self._fail(MeshError("worker_died", f"the worker sent what is no reply: {error.message}"))
        if self.fault is None:
            with trio.move_on_after(0.1):  # its exit follows the end of its output at once, unless it only closed it
                self._fail(ended(await self._process.wait()))
        self._fail(MeshError("worker_died", "the worker closed its output"))
        with trio.CancelScope(shield=True):
            await self._process.wait()
        logger.debug("worker %d: %s", self.pid, self.fault)
        self.died.set()

    async def _read_log(self) -> None:
        space, line = memoryview(bytearray(LOG_LINE_BYTES)), b""
        while n := await self._process.read_log_into(space):
            *lines, line = (line + space[:n]).split(b"\n")
            if len(line) > LOG_LINE_BYTES:
                lines, line = [*lines, line[:LOG_LINE_BYTES]], b""
            for each in lines:
                self._log(each)
        if line:
            self._log(line)

    def _log(self, line: bytes) -> None:
        text = line.decode(errors="replace")
        self.log_tail.append(text)
        logger.debug("worker %d: %s", self.pid, text)

    async def _watch(self) -> None:
        """Kill a worker that owes replies and gives none. Steps that wait behind others are not its fault."""
        while True:
            if not self._calls:
                self._owing = trio.Event()
                await self._owing.wait()
            left = self._progress + self.step_timeout - trio.current_time()
            if left > 0:
                await trio.sleep(left)
            elif self._calls:
                self._fail(MeshError("worker_hung", f"the worker gave no answer in {self.step_timeout:g} s"))
                return

    async def _load(self, spec: LoadSpec) -> None:
        await self._greeted.wait()
        self.loaded = loaded = await self._ask(spec.message(), Loaded)
        shape = (loaded.n_embd, loaded.n_ctx, loaded.max_step)
        self._request_bound = wire.request_bound(*shape)
        self._reader.max_body = wire.reply_bound(*shape)


@asynccontextmanager
async def open_worker(
    binary: Path, spec: LoadSpec, *, load_timeout: float = LOAD_TIMEOUT, step_timeout: float = STEP_TIMEOUT
) -> AsyncIterator[Worker]:
    """Run a worker that has loaded spec; at the end, also by error or cancel, it is killed and reaped.

    load_timeout: s until it has loaded; step_timeout: s that it may owe a reply without giving any. Raises MeshError:
    identity_changed, bad_model, bad_layers, unsupported_architecture, unproven_numerics, out_of_memory as the worker
    found; version_mismatch, worker_died, worker_hung. A worker that ends later does not cancel the body: see
    Worker.died.
    """
    spec.message()  # refused before anything is started
    process = Process(binary, [file.fd for file in spec.files])
    worker = Worker(process, step_timeout)
    failure: Exception | None = None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker._read)
            nursery.start_soon(worker._read_log)
            # What the body raises goes on as it is, not wrapped in this nursery's group.
            try:
                with trio.move_on_after(load_timeout) as loading:
                    await worker._load(spec)
                if loading.cancelled_caught:
                    raise MeshError("worker_hung", f"the worker did not load the model in {load_timeout:g} s")
                nursery.start_soon(worker._watch)
                yield worker
            except Exception as error:
                failure = error
            nursery.cancel_scope.cancel()
    finally:
        worker._fail(MeshError("cancelled", "the worker was stopped"))
        await process.end()
        worker.died.set()
    if failure is not None:
        raise failure
