"""A model's chat template, rendered where it can be killed (render.py): metered, whatever the template does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio

from ..errors import MeshError
from ..wire.worker_messages import ChatFacts

SECONDS = 2  # of rendering; the longest prompts take some 10 ms
MOST_OUTPUT = 1 << 20  # bytes of a rendered chat
START_S = 20.0  # for Python to start on a busy machine
AT_ONCE = 4  # renderings; others wait
MOST_REPLY = 8 * MOST_OUTPUT  # bytes: JSON takes six for a character at the most
PROGRAM = Path(__file__).with_name("render.py")
ROLE = re.compile(r"[a-z][a-z_]{0,31}")  # it stands among the template's own text, so it must not hold a control token

Segment = tuple[bool, str]  # whether the text is the template's own


class ChatTemplate:
    """Renders chats. Every method may be called by many tasks at once."""

    def __init__(self, facts: ChatFacts) -> None:
        self._setup = {
            "source": facts.source,
            "bos": facts.bos.decode(errors="replace"),
            "eos": facts.eos.decode(errors="replace"),
            "controls": [control.decode(errors="replace") for control in facts.controls],
            "most": MOST_OUTPUT,
        }
        self._limit = trio.CapacityLimiter(AT_ONCE)
        self._idle: list[trio.Process] = []  # one at most

    async def segments(self, messages: Sequence[tuple[str, str]]) -> list[Segment]:
        """(role, content) pairs as the template writes them, up to where the answer begins.

        Raises MeshError: bad_prompt (a role that is no word), template_failed.
        """
        for role, _ in messages:
            if not ROLE.fullmatch(role):
                raise MeshError("bad_prompt", "the role of a message must be a word of lower-case letters")
        async with self._limit:
            process = self._idle.pop() if self._idle else await self._start()
            try:
                reply = await _ask(process, {"messages": list(messages)}, SECONDS)
            except BaseException:
                await _end(process)
                raise
            if self._idle:
                await _end(process)
            else:
                self._idle.append(process)
        return [(own, text) for own, text in reply]

    async def _start(self) -> trio.Process:
        start = partial(
            trio.lowlevel.open_process, env={}, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        process: trio.Process = await start([sys.executable, "-I", str(PROGRAM), str(SECONDS)])
        try:
            await _ask(process, self._setup, START_S)
        except BaseException:
            await _end(process)
            raise
        return process

    async def _close(self) -> None:
        while self._idle:
            await _end(self._idle.pop())


@asynccontextmanager
async def open_template(facts: ChatFacts) -> AsyncIterator[ChatTemplate]:
    template = ChatTemplate(facts)
    try:
        yield template
    finally:
        await template._close()


async def _ask(process: trio.Process, request: dict[str, Any], seconds: float) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    answer = bytearray()
    with trio.move_on_after(seconds) as meter:
        try:
            await process.stdin.send_all(json.dumps(request).encode() + b"\n")
            while not answer.endswith(b"\n") and len(answer) < MOST_REPLY:
                more = await process.stdout.receive_some()
                if not more:
                    break
                answer += more
        except trio.BrokenResourceError:
            pass
    if meter.cancelled_caught:
        raise MeshError("template_failed", f"the model's chat template did not end within {seconds:g} s")
    try:
        reply = json.loads(answer)
    except ValueError:
        raise MeshError("template_failed", "the model's chat template ended the process that renders it") from None
    if "error" in reply:
        raise MeshError("template_failed", f"the model's chat template failed: {reply['error']}")
    return reply["segments"]


async def _end(process: trio.Process) -> None:
    process.kill()
    with trio.CancelScope(shield=True):
        await process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                await stream.aclose()
