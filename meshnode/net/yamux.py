"""Yamux with limits that the peer has to keep, and without waits that a cancelled or frozen task could leave behind.

Faults of the stock muxer (libp2p 0.8.1) cured here and in yamux_stream.py, each by a test in tests/net/test_yamux.py:
- a peer may send past its receive window, without end: here that ends the connection;
- a cancelled write leaves half a frame behind and breaks every stream: here a frame that has begun is finished, or
  the connection is closed, FRAME_WRITE_LIMIT later at the earliest;
- close() and reset() write, so that in a cancelled task they do nothing and the stream leaks: here they only queue;
- a frozen peer is never noticed: here the connection is closed after DEAD_AFTER without a byte;
- a peer may open any number of streams: here up to MAX_STREAMS, and a few small ones before it is trusted;
- data that arrived just before the connection ended is thrown away: here it can still be read;
- every read() sends a WINDOW_UPDATE, a write without credit polls and gives up after 5 s.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import trio
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.stream_muxer.exceptions import MuxedStreamError
from libp2p.stream_muxer.yamux.yamux import (
    FLAG_ACK,
    FLAG_FIN,
    FLAG_RST,
    FLAG_SYN,
    GO_AWAY_NORMAL,
    TYPE_DATA,
    TYPE_GO_AWAY,
    TYPE_PING,
    TYPE_WINDOW_UPDATE,
    Yamux,
)

from .measure import NeighbourMeasure
from .yamux_stream import HEADER, MeshYamuxStream

log = logging.getLogger(__name__)

MAX_STREAMS = 256  # that a peer may have open towards us: what Yamux itself lets one side open
WINDOW_BUDGET = 64 << 20  # bytes of window beyond each stream's 256 KiB, a connection: bounds what is left unread
PENDING_STREAMS = 8  # before membership: hello and identify need two
PENDING_BYTES = 64 << 10  # before membership, in all: hello is under 1 KiB
CONTROL_LIMIT = 4096 * HEADER.size  # replies waiting to be written: a peer that asks for more does not read them
FRAME_WRITE_LIMIT = 10.0  # s for one frame of 64 KiB: 50 kbit/s
CLOSE_GRACE = 60.0  # s that a stream we closed waits for the peer to close its half
PING_INTERVAL = 2.0  # s
DEAD_AFTER = 7.0  # s without a byte; with the interval, a frozen peer is noticed in under 10 s


class Violation(Exception):
    """The peer broke the protocol, or a limit; its connection ends."""


class MeshYamux(Yamux):  # type: ignore[misc]
    """A muxed connection. `trusted` is set once the peer is a member; until then it has very little room."""

    def __init__(self, secured_conn: Any, peer_id: Any, is_initiator: bool | None = None, on_close: Any = None) -> None:
        super().__init__(secured_conn, peer_id, is_initiator, on_close)
        # Holds every stream that a peer may open, so that the loop which reads the connection never waits here.
        self.new_stream_send_channel, self.new_stream_receive_channel = trio.open_memory_channel(MAX_STREAMS)
        self.trusted = False
        self.window_budget = WINDOW_BUDGET
        self.measure = NeighbourMeasure()  # replaced by the peer's own once it is known
        self.last_heard = trio.current_time()
        self._writing_since = math.inf  # when the frame that is being written began
        self._ping_id: int = 0
        self._ping_sent_time: float = 0.0
        self._pending_bytes = 0
        self._inbound = 0
        self._last_inbound = 0
        self._control = bytearray()
        self._control_ready = trio.Event()
        self._header = bytearray()
        self._body = 0  # bytes of the current DATA frame that have yet to come
        self._flags = 0
        self._receiver: MeshYamuxStream | None = None  # of the current DATA frame; None: a stream that is gone

    # -- what goes out

    def queue(self, frame: bytes) -> None:
        """Sends a frame without a body, soon and in order; never waits."""
        if self.event_shutting_down.is_set():
            return
        self._control += frame
        self._control_ready.set()

    async def _write_control(self) -> None:
        while True:
            await self._control_ready.wait()
            self._control_ready = trio.Event()
            try:
                await self._write_frame(b"")
            except Exception as error:  # the reading loop is what ends a connection
                log.debug("connection to %s cannot be written: %s", self.peer_id, error)
                return

    async def _write_frame(self, data: bytes) -> None:
        """Writes a frame, and before it whatever is queued: what opens a stream is never overtaken by its data."""
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            self._write_lock.acquire_nowait()  # mostly: a turn of the scheduler less for every frame
        except trio.WouldBlock:
            await self._write_lock.acquire()
        try:
            if self.event_shutting_down.is_set():
                raise ConnectionClosedError("the connection is closed", transport="tcp")
            if self._control:
                data = bytes(self._control) + data
                self._control.clear()
            if data:
                self._writing_since = trio.current_time()
                with trio.CancelScope(shield=True):  # ends when the loop that pings closes the socket, at the latest
                    await self.secured_conn.write(data)
        finally:
            self._writing_since = math.inf
            self._write_lock.release()

    async def open_stream(self) -> MeshYamuxStream:
        await self.stream_backlog_semaphore.acquire()
        if self.event_shutting_down.is_set():
            self.stream_backlog_semaphore.release()
            raise MuxedStreamError("connection is shutting down")
        stream = MeshYamuxStream(self.next_stream_id, self, True)
        self.next_stream_id += 2
        stream._owns_backlog_slot = True
        self._enter(stream)
        self.queue(HEADER.pack(0, TYPE_WINDOW_UPDATE, FLAG_SYN, stream.stream_id, 0))
        return stream

    async def close(self, error_code: int = GO_AWAY_NORMAL) -> None:
        if not self.event_shutting_down.is_set():
            with trio.move_on_after(0.2):
                try:
                    await self._write_frame(HEADER.pack(0, TYPE_GO_AWAY, 0, 0, error_code))
                except Exception as error:  # it is being closed anyway
                    log.debug("no goodbye to %s: %s", self.peer_id, error)
        await self._cleanup_on_error()

    async def _cleanup_on_error(self) -> None:
        """Ends the connection at once; may be called from any task, any number of times."""
        self.event_shutting_down.set()
        self.new_stream_send_channel.close()
        for stream in list(self.streams.values()):
            stream.sever()
        self.streams.clear()
        self.stream_buffers.clear()
        self.stream_events.clear()
        with trio.CancelScope(shield=True):
            try:
                await self.secured_conn.close()
            except Exception as error:  # a socket that is gone already
                log.debug("closing the connection to %s: %s", self.peer_id, error)
        self.event_closed.set()

    # -- streams

    def _enter(self, stream: MeshYamuxStream) -> None:
        self.streams[stream.stream_id] = stream
        self.stream_buffers[stream.stream_id] = stream.buffer
        self.stream_events[stream.stream_id] = stream.readable  # stock methods look for an entry

    def finish(self, stream: MeshYamuxStream) -> None:
        """Drops what is kept for a stream once both halves are closed and its data is read."""
        known = self.streams.get(stream.stream_id) is stream
        self._finalize_stream_locked(stream, fully_closed=stream.closed and known)
        if known and stream.stream_id not in self.streams:
            self.window_budget += stream.extra
            self._inbound -= not stream.is_initiator

    def _sweep_stale_streams(self, now: float | None = None) -> int:
        """Resets what we closed long ago and the peer never did, or nobody read."""
        late = (trio.current_time() if now is None else now) - CLOSE_GRACE
        stale = [s for s in self.streams.values() if s.send_closed and s._closed_at < late]
        for stream in stale:
            stream.reset_now()
        return len(stale)

    # -- what comes in

    async def handle_incoming(self) -> None:
        try:
            if self._nursery is not None:
                self._nursery.start_soon(self._write_control)
            while not self.event_shutting_down.is_set():
                data = await self.secured_conn.read(None)
                self.last_heard = trio.current_time()
                self._take(memoryview(data))
        except Violation as error:
            log.warning("closing the connection to %s: %s", self.peer_id, error)
        except Exception as error:  # whatever the layers below raise, the connection is over
            log.debug("connection to %s ended: %r", self.peer_id, error)
        finally:
            await self._cleanup_on_error()

    def _take(self, data: memoryview) -> None:
        while data:
            if self._body:
                part, data = data[: self._body], data[self._body :]
                self._body -= len(part)
                if self._receiver is not None and not self._receiver.recv_closed:
                    self._receiver.buffer += part
                    self._receiver.readable.set()
            else:
                missing = HEADER.size - len(self._header)
                self._header += data[:missing]
                data = data[missing:]
                if len(self._header) < HEADER.size:
                    return
                fields = HEADER.unpack(self._header)
                self._header.clear()
                self._frame(*fields)
            if not self._body and self._receiver is not None:
                self._end(self._receiver, self._flags)
                self._receiver = None

    def _frame(self, version: int, kind: int, flags: int, stream_id: int, length: int) -> None:
        if version != 0:
            raise Violation(f"Yamux version {version}")
        if kind in (TYPE_DATA, TYPE_WINDOW_UPDATE):
            stream = self._accept(stream_id) if flags & FLAG_SYN else self.streams.get(stream_id)
            if kind == TYPE_DATA:
                self._announce(stream, length, flags)
            elif stream is not None:
                stream.send_window = min(stream.send_window + length, (1 << 32) - 1)
                stream.taken(length)
                self._end(stream, flags)
        elif kind == TYPE_PING:
            if flags & FLAG_SYN:
                self.queue(HEADER.pack(0, TYPE_PING, FLAG_ACK, 0, length))
                if len(self._control) > CONTROL_LIMIT:
                    raise Violation("asks without reading the answers")
            elif length == self._ping_id:
                self.measure.trip(trio.current_time() - self._ping_sent_time)
        elif kind == TYPE_GO_AWAY:
            raise ConnectionClosedError("the peer closed the connection", close_code=length)
        else:
            raise Violation(f"Yamux frame of type {kind}")

    def _announce(self, stream: MeshYamuxStream | None, length: int, flags: int) -> None:
        self._body, self._flags, self._receiver = length, flags, stream
        if stream is None:
            return  # reset by us while this was under way
        if length > stream.recv_window:
            raise Violation(f"{length} bytes where the window is {stream.recv_window}")
        stream.recv_window -= length
        if not self.trusted:
            self._pending_bytes += length
            if self._pending_bytes > PENDING_BYTES:
                raise Violation(f"more than {PENDING_BYTES} bytes before it is a member")

    def _end(self, stream: MeshYamuxStream, flags: int) -> None:
        """Applies the flags that count after a frame's body."""
        if flags & FLAG_RST:
            stream.abort()
        elif flags & FLAG_FIN:
            stream.recv_closed = True
            stream.closed = stream.send_closed
            stream.wake()
            self.finish(stream)

    def _accept(self, stream_id: int) -> MeshYamuxStream | None:
        if stream_id % 2 == self.next_stream_id % 2 or stream_id <= self._last_inbound:
            raise Violation(f"opens stream {stream_id}, which is not its next one")
        self._last_inbound = stream_id
        if self._inbound >= (MAX_STREAMS if self.trusted else PENDING_STREAMS):
            self.queue(HEADER.pack(0, TYPE_WINDOW_UPDATE, FLAG_RST, stream_id, 0))
            if len(self._control) > CONTROL_LIMIT:
                raise Violation("opens streams without reading the answers")
            return None
        stream = MeshYamuxStream(stream_id, self, False)
        self._inbound += 1
        self._enter(stream)
        self.queue(HEADER.pack(0, TYPE_WINDOW_UPDATE, FLAG_ACK, stream_id, 0))
        try:
            self.new_stream_send_channel.send_nowait(stream)
        except (trio.WouldBlock, trio.BrokenResourceError):  # more opened and reset than anyone has looked at
            stream.reset_now()
            return None
        return stream

    # -- life

    async def _measure_rtt_loop(self) -> None:
        """Pings, and ends the connection when nothing at all comes back, or nothing more is taken."""
        while True:
            self._ping_id = (self._ping_id + 1) % (1 << 32)
            self._ping_sent_time = before = trio.current_time()
            self.queue(HEADER.pack(0, TYPE_PING, FLAG_SYN, 0, self._ping_id))
            await trio.sleep(PING_INTERVAL)
            now = trio.current_time()
            if now - before > 2 * PING_INTERVAL:  # it was we who stood still: what came meanwhile is still to be read
                self.last_heard = now
            elif now - self.last_heard > DEAD_AFTER or now - self._writing_since > FRAME_WRITE_LIMIT:
                log.info("closing the connection to %s, which says or takes nothing", self.peer_id)
                await self._cleanup_on_error()
                return

    def rtt(self) -> float:
        """Seconds, smoothed; NaN before the first answer."""
        return self.measure.rtt
