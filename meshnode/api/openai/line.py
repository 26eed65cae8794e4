"""Requests wait in line while every session of the mesh is taken, instead of being refused."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from ...errors import MeshError, root_cause
from ..control import Backend, Event
from ..requests import RunRequest

MOST_WAITING = 64  # each has a connection and a prompt of up to half a megabyte
PATIENCE_S = 60.0  # in line; clients of this kind of API give up after minutes
LOOK_S = 0.25  # sessions end also that other entry nodes opened


class Line:
    """First come, first served, a line a model: who is first asks the mesh until it has room."""

    def __init__(self, backend: Backend, patience_s: float = PATIENCE_S) -> None:
        self._backend = backend
        self._patience_s = patience_s
        self._turns: dict[str, trio.Lock] = {}
        self._ended = trio.Event()
        self.waiting = 0
        self.running = 0

    @asynccontextmanager
    async def run(self, request: RunRequest) -> AsyncIterator[AsyncIterator[Event]]:
        """The events of Backend.run, once there is room for it. MeshError busy when that takes too long."""
        if self.waiting >= MOST_WAITING:
            raise MeshError("busy", f"{self.waiting} requests wait already")
        opened = False
        try:
            async with contextlib.AsyncExitStack() as stack:
                events = await self._open(stack, request)
                opened = True
                self.running += 1
                yield events
        finally:
            if opened:
                self.running -= 1
                self._ended.set()
                self._ended = trio.Event()

    async def _open(self, stack: contextlib.AsyncExitStack, request: RunRequest) -> AsyncIterator[Event]:
        ends = trio.current_time() + self._patience_s
        turn = self._turns.setdefault(request.model, trio.Lock())
        self.waiting += 1
        try:
            async with turn:
                while True:
                    try:
                        return await stack.enter_async_context(self._backend.run(request))
                    except Exception as error:
                        fault = root_cause(error)
                        if not _is_full(fault) or trio.current_time() > ends:
                            raise
                    with trio.move_on_after(LOOK_S):
                        await self._ended.wait()
        finally:
            self.waiting -= 1
            if not turn.statistics().tasks_waiting and not turn.locked():
                self._turns.pop(request.model, None)


def _is_full(fault: BaseException) -> bool:
    """Some hop has no session free; of a route's hops each may be the one that lacks it."""
    return isinstance(fault, MeshError) and (
        fault.code == "busy" or (fault.code == "no_route" and "busy" in str(fault))
    )
