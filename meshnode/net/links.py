"""Messages between members: requests with one answer each, and one long-lived stream a pair and direction for the rest.

A link is named by its ends, whoever dialled the connection below it. What is sent to oneself takes the same way through
encoding and decoding, over a memory channel instead of a stream.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio

from ..errors import MeshError
from ..ids import PeerId
from ..wire import schema
from ..wire.accounts import LEDGER_REQUESTS
from ..wire.audits import AUDIT_REQUESTS
from ..wire.messages import ON_LINKS, REQUESTS, Failed, LinkMessage, Refusal, code_here
from .network import Network
from .stream import PeerStream

log = logging.getLogger(__name__)

LINK_ITEMS = 4096  # 64 pushes of 11 fields each have a fifth of it
REQUEST_PROTOCOL = "/meshnode/request/1"
LINK_PROTOCOL = "/meshnode/link/1"

OnRequest = Callable[[PeerId, Any], Awaitable[Any]]
OnMessage = Callable[[PeerId, Any, memoryview], Awaitable[None]]  # Any: one kind of LinkMessage
OnLost = Callable[[PeerId], None]
M = TypeVar("M")


class Refused(MeshError):
    """A peer's refusal, with what it tried before it refused."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(code_here(refusal.code), refusal.say)
        self.failed: tuple[Failed, ...] = refusal.failed
        self.attempts = refusal.attempts


class Links:
    """Typed messages over a Network.

    on_request(peer, message) answers a request or raises MeshError; on_message(peer, message, payload) takes what comes
    over links, in order for each peer, and must not wait long: it holds up that peer's other sessions.
    """

    def __init__(self, network: Network, nursery: trio.Nursery) -> None:
        self._network = network
        self._nursery = nursery
        self._out: dict[str, PeerStream] = {}
        self._dialling: dict[str, trio.Lock] = {}
        self._own_out, self._own_in = trio.open_memory_channel[tuple[bytes, bytes | memoryview]](math.inf)
        self._on_request: dict[type, OnRequest] = {}
        self._on_message: dict[type, list[OnMessage]] = {}
        self.on_lost: list[OnLost] = []

    @property
    def peer(self) -> PeerId:
        return PeerId(self._network.peer)

    def answer(self, kind: type, handler: OnRequest) -> None:
        self._on_request[kind] = handler

    def take(self, kind: type, handler: OnMessage) -> None:
        """Several handlers may take one kind: a node can be a hop and the entry node of one session."""
        self._on_message.setdefault(kind, []).append(handler)

    async def request(self, peer: PeerId, message: Any, expected: type[M], *, timeout: float) -> M:
        """The answer; MeshError deadline, unreachable or the peer's own (a Refused)."""
        raw = schema.encode(message)
        with trio.move_on_after(timeout):
            if peer == self.peer:
                answer = await self._serve(peer, raw)
            else:
                answer = await self._network.call(peer, REQUEST_PROTOCOL, raw, timeout=timeout)
            found: Any = schema.decode(answer, expected, Refusal)
            if isinstance(found, Refusal):
                raise Refused(found)
            return found  # type: ignore[no-any-return]
        raise MeshError("deadline", f"{peer} did not answer within {timeout:.1f} s")

    async def send(self, peer: PeerId, message: LinkMessage, payload: bytes | memoryview = b"") -> None:
        """Queues a message on the link to a peer; MeshError unreachable when there is none to be had."""
        header = schema.encode(message)
        if peer == self.peer:
            self._own_out.send_nowait((header, payload))
            return
        stream = await self._stream(peer)
        try:
            await stream.send(header, payload)
        except MeshError:
            if self._out.get(peer) is stream:
                del self._out[peer]
            raise

    async def connect(self, peer: PeerId, addresses: tuple[str, ...] = ()) -> None:
        """Makes sure that messages can be sent to a peer at once."""
        if peer != self.peer:
            await self._network.connect(peer, addresses)
            await self._stream(peer)

    async def _stream(self, peer: PeerId) -> PeerStream:
        async with self._dialling.setdefault(peer, trio.Lock()):
            if peer not in self._out:
                self._out[peer] = await self._network.open(peer, LINK_PROTOCOL)
            return self._out[peer]

    def start(self) -> None:
        self._network.serve(REQUEST_PROTOCOL, self._serve)
        self._network.handle(LINK_PROTOCOL, self._read)
        self._network.on_lost.append(self._lost)
        self._nursery.start_soon(self._read_own)

    async def _serve(self, peer: str, raw: bytes) -> bytes:
        try:
            message: Any = schema.decode(raw, *REQUESTS, *LEDGER_REQUESTS, *AUDIT_REQUESTS)
            handler = self._on_request.get(type(message))
            if handler is None:
                raise MeshError("bad_frame", f"{type(message).__name__} is not served here")
            answer = await handler(PeerId(peer), message)
        except Refused as refused:
            answer = Refusal(refused.code, refused.message, refused.failed, refused.attempts)
        except MeshError as error:
            answer = Refusal(error.code, error.message)
        try:
            return schema.encode(answer)
        except ValueError:  # a message that we must not send: what led to it is at fault, not the one who asks
            log.exception("an answer that cannot be sent")
            return schema.encode(Refusal("internal", "the answer does not fit a message"))

    async def _read(self, stream: PeerStream) -> None:
        while True:
            try:
                header, payload = await stream.receive()
            except MeshError as error:
                if error.code != "unreachable":
                    log.warning("link from %s: %s", stream.peer, error)
                    raise
                return
            await self._dispatch(stream.peer, header, memoryview(payload))

    async def _read_own(self) -> None:
        async for header, payload in self._own_in:
            try:
                await self._dispatch(self.peer, header, memoryview(payload))
            except MeshError as error:  # the same faults that would reset a peer's stream
                log.warning("link to oneself: %s", error)

    async def _dispatch(self, peer: str, header: bytes, payload: memoryview) -> None:
        message: Any = schema.decode(header, *ON_LINKS, max_items=LINK_ITEMS)
        for handler in self._on_message.get(type(message), ()):
            await handler(PeerId(peer), message, payload)

    def _lost(self, peer: str) -> None:
        self._out.pop(peer, None)
        for callback in self.on_lost:
            callback(PeerId(peer))
