"""One stream of a connection: credit given back lazily, waits that are woken, and an end that never has to wait."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import trio
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamError, MuxedStreamReset
from libp2p.stream_muxer.yamux.yamux import (
    FLAG_FIN,
    FLAG_RST,
    MAX_WINDOW_SIZE,
    TYPE_DATA,
    TYPE_WINDOW_UPDATE,
    YamuxStream,
)

if TYPE_CHECKING:
    from .yamux import MeshYamux

HEADER = struct.Struct(">BBHII")  # version, type, flags, stream id, length
MAX_BODY = 65519 - HEADER.size  # header and body fill exactly one Noise message; 64 KiB would take two
CREDIT_LIMIT = 120.0  # s a stream waits for credit: a slow stage may compute for long while its input waits


class MeshYamuxStream(YamuxStream):  # type: ignore[misc]
    conn: MeshYamux

    def __init__(self, stream_id: int, conn: MeshYamux, is_initiator: bool) -> None:
        super().__init__(stream_id, conn, is_initiator)
        self.buffer = bytearray()  # of its own, so that it outlives the connection
        self.readable = trio.Event()
        self.writable = trio.Event()
        self._pending_recv_release: int = 0  # bytes read since credit was last given
        self._taken = 0  # bytes that the peer gave credit for during a write
        self._taken_at = 0.0
        self.extra = 0  # taken from the connection's window budget

    def wake(self) -> None:
        self.readable.set()
        self.writable.set()

    def sever(self) -> None:
        """The connection is gone: writes fail; what has arrived can be read, then reads fail."""
        self.closed = self.send_closed = self.recv_closed = True
        self.wake()

    async def write(self, data: bytes | memoryview) -> None:
        rest, began = memoryview(data), trio.current_time()
        self._taken = 0
        while True:
            if self.reset_received:
                raise MuxedStreamReset("stream was reset")
            if self.send_closed or self.closed:
                raise MuxedStreamError("stream is closed for sending")
            if not rest:
                self.conn.measure.sent(min(self._taken, len(data)), self._taken_at - began)
                return
            if self.send_window <= 0:
                await self._wait_for_credit()
                continue
            size = min(len(rest), self.send_window, MAX_BODY)
            self.send_window -= size
            await self.conn._write_frame(HEADER.pack(0, TYPE_DATA, 0, self.stream_id, size) + rest[:size])
            rest = rest[size:]

    def taken(self, credit: int) -> None:
        """The peer has read, and gives as much credit."""
        self._taken += credit
        self._taken_at = trio.current_time()
        self.writable.set()

    async def _wait_for_credit(self) -> None:
        self.writable = trio.Event()
        with trio.move_on_after(CREDIT_LIMIT) as limit:
            await self.writable.wait()
        if limit.cancelled_caught:
            raise MuxedStreamError(f"the peer gave no credit for {CREDIT_LIMIT:.0f} s")

    async def read(self, n: int | None = -1) -> bytes:
        """Up to n bytes (None or negative: all there are), at least one; waits for them."""
        while not self.buffer or self.reset_received:
            if self.reset_received:
                raise MuxedStreamReset("stream was reset")
            if self.recv_closed or self.closed:
                raise MuxedStreamEOF("stream is closed for receiving")
            self.readable = trio.Event()
            await self.readable.wait()
        if n is None or n < 0 or n >= len(self.buffer):
            data = bytes(self.buffer)
            self.buffer.clear()
        else:
            with memoryview(self.buffer) as view:
                data = bytes(view[:n])
            del self.buffer[:n]
        if self.closed:
            self.conn.finish(self)
        else:
            self._return_credit(len(data))
        return data

    def _return_credit(self, size: int) -> None:
        """Lazily, at half a window. The first time, the window grows to what the connection's budget has left."""
        self._pending_recv_release += size
        if self._pending_recv_release < self.target_recv_window // 2 or self.recv_closed:
            return
        grown = min(MAX_WINDOW_SIZE - self.target_recv_window, self.conn.window_budget)
        self.conn.window_budget -= grown
        self.extra += grown
        self.target_recv_window += grown
        increment = self._pending_recv_release + grown
        self._pending_recv_release = 0
        self.recv_window += increment
        self.conn.queue(HEADER.pack(0, TYPE_WINDOW_UPDATE, 0, self.stream_id, increment))

    async def close(self) -> None:
        """Closes the sending half. Everything written before goes out before it."""
        self.close_now()

    def close_now(self) -> None:
        if not self.send_closed:
            self.send_closed = True
            self._closed_at = trio.current_time()
            self.conn.queue(HEADER.pack(0, TYPE_WINDOW_UPDATE, FLAG_FIN, self.stream_id, 0))
        self.closed = self.recv_closed
        self.wake()
        self.conn.finish(self)

    async def reset(self) -> None:
        self.reset_now()

    def reset_now(self) -> None:
        if self.closed and (self.reset_received or not self.buffer):
            return
        if not (self.send_closed and self.recv_closed):
            self.conn.queue(HEADER.pack(0, TYPE_WINDOW_UPDATE, FLAG_RST, self.stream_id, 0))
        self.abort()

    def abort(self) -> None:
        self.closed = self.send_closed = self.recv_closed = self.reset_received = True
        self.buffer.clear()
        self.wake()
        self.conn.finish(self)
