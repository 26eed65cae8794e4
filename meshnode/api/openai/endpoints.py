"""/v1/chat/completions and /v1/completions: a request's answers, one after the other, whole or as a stream."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import trio
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ...errors import root_cause
from ..control import Event, as_mesh_error
from ..meter import Meter
from . import fault as faults
from .answer import Choice, Said, Shape, Usage
from .asked import Asked
from .fault import Fault
from .line import Line
from .stops import Stops

ALIVE_S = 5.0  # between comments of a stream without news, so that nobody on the way takes it for dead
ROUTE_HEADER = "x-meshnode-route"
Emit = Callable[[str], Awaitable[None]]


class Answering(Response):
    """Answers one request; the work ends when its client goes."""

    def __init__(self, line: Line, meter: Meter, asked: Asked) -> None:
        super().__init__()
        self._line = line
        self._meter = meter
        self._asked = asked
        self._shape = Shape(asked)
        self._usage = Usage()
        self._route = ""
        self._notes: list[Event] = []
        self._begun = False
        self._sending = trio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_until_gone, receive, nursery.cancel_scope)
            if self._asked.stream:
                nursery.start_soon(self._signs_of_life)
            try:
                choices = [await self._choice(number) for number in range(len(self._asked.choices))]
            except Exception as error:
                await self._fail(error, scope, receive)
            else:
                await self._finish(choices, scope, receive)
            nursery.cancel_scope.cancel()

    async def _finish(self, choices: list[Choice], scope: Scope, receive: Receive) -> None:
        self._meter.answered("ok")
        if not self._asked.stream:
            whole = self._shape.whole(choices, self._usage, self._notes)
            await JSONResponse(whole, headers={ROUTE_HEADER: self._route})(scope, receive, self._send)
            return
        if self._asked.include_usage:
            await self._emit(self._shape.usage(self._usage))
        await self._emit("data: [DONE]\n\n")
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _fail(self, error: Exception, scope: Scope, receive: Receive) -> None:
        cause = root_cause(error)
        fault = cause if isinstance(cause, Fault) else faults.of(as_mesh_error(error))
        self._meter.answered(fault.code or "error")
        if not self._begun:  # an HTTP status can still say so
            await fault.response()(scope, receive, self._send)
            return
        await self._emit(f"data: {fault.response().body.decode()}\n\n")  # type: ignore[union-attr]
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _choice(self, number: int) -> Choice:
        """Makes one answer, and emits it while it is made if it is to be streamed."""
        asked = self._asked
        choice = Choice(number, asked.echo[number] if asked.echo else "")
        stops, waiting = Stops(asked.stop), list[Said]()
        heard = 0  # characters that came, shown or not
        begun = first = last = trio.current_time()
        made = prompt = 0

        async def show(text: str) -> None:
            """Text, and what is told of the tokens that it is of."""
            ready = [said for said in waiting if said.begin < stops.shown or (stops.shown == heard and not stops.found)]
            del waiting[: len(ready)]
            choice.text += text
            choice.tokens += ready
            if asked.stream and (text or ready):
                await self._emit(self._shape.part(number, text, ready))

        request = asked.choices[number]
        async with self._line.run(request) as events, aclosing(events):  # type: ignore[type-var]
            async for event in events:
                kind = event["event"]
                if kind == "token":
                    last = trio.current_time()
                    first = last if made == 0 else first
                    if asked.prefill_only:
                        break
                    made += 1
                    if "logprobs" in event:
                        told = event["logprobs"] | {"id": event["id"], "asked": request.logprobs or 0}
                        waiting.append(Said(heard, event["text"], told))
                    heard += len(event["text"])
                    await show(stops.feed(event["text"]))
                    if stops.found:
                        break
                elif kind == "route":
                    begun, prompt = trio.current_time(), event.get("prompt_tokens", 0)
                    await self._begin(number, event)
                elif kind == "done":
                    choice.finish = event["result"]["finish_reason"]
                    text = event["result"]["text"]
                    if len(text) > heard and not stops.found:  # what only the end of the answer completed
                        await show(stops.feed(text[heard:]))
                else:  # of a route that was mended, say: whoever reads it may want to know
                    self._notes.append(event)
                    if asked.stream:
                        await self._emit(f": {json.dumps(event)}\n\n")
        if not stops.found:
            await show(stops.rest())
        choice.finish = "stop" if stops.found else choice.finish or "length"
        self._usage.completion += made
        self._usage.prompt += prompt if number % self._a_prompt == 0 else 0
        self._meter.made(prompt, made, max(0.0, first - begun), last - first)
        if asked.stream:
            await self._emit(self._shape.last(number, choice.finish))
        return choice

    @property
    def _a_prompt(self) -> int:
        """Choices of one prompt."""
        choices = self._asked.choices
        same = [c for c in choices if (c.prompt, c.tokens, c.messages) == _prompt_of(choices[0])]
        return max(1, len(same))

    async def _begin(self, number: int, event: Event) -> None:
        if not self._route:
            hops = (f"{hop['peer']}:{hop['effective'][0]}-{hop['effective'][1]}" for hop in event["route"])
            self._route = ",".join(hops)
        if not self._asked.stream:
            return
        if not self._begun:
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (ROUTE_HEADER.encode(), self._route.encode()),
            ]
            async with self._sending:
                self._begun = True
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        if self._asked.is_chat:
            await self._emit(self._shape.first(number))
        elif self._asked.echo:
            await self._emit(self._shape.part(number, self._asked.echo[number], []))

    async def _emit(self, text: str) -> None:
        async with self._sending:
            await self._send({"type": "http.response.body", "body": text.encode(), "more_body": True})

    async def _signs_of_life(self) -> None:
        while True:
            await trio.sleep(ALIVE_S)
            if self._begun:
                await self._emit(": alive\n\n")


async def _until_gone(receive: Receive, scope: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def _prompt_of(choice: Any) -> tuple[Any, Any, Any]:
    return choice.prompt, choice.tokens, choice.messages
