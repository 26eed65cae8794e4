"""Frames to and from one peer over one libp2p stream.

Cures, beside those of yamux.py: a message is queued to one writer task, so that its sender may be cancelled without
cutting it in two; frames are bounded before they are kept, and each has an absolute deadline from its first byte on;
end, reset and loss of the connection are one error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.stream.net_stream import NetStream

from ..errors import MeshError
from ..wire.framing import MAX_HEADER, MAX_PAYLOAD, FrameReader, encode_frame
from .swarm import MeshConn
from .yamux_stream import MeshYamuxStream

log = logging.getLogger(__name__)

SEND_QUEUE = 4  # frames that wait behind the one being written; then send() waits
READ_SIZE = 256 << 10  # bytes
FRAME_LIMIT = 30.0  # s from a frame's first byte to its last: 16 MiB at 4.5 Mbit/s
LINGER = 5.0  # s that a closed stream waits for the peer to close its half


class PeerStream:
    """One stream to a peer whose key Noise has authenticated. One task may receive, any may send."""

    def __init__(
        self,
        stream: NetStream,
        start_soon: Callable[..., None],
        *,
        max_header: int = MAX_HEADER,
        max_payload: int = MAX_PAYLOAD,
    ) -> None:
        self._conn: MeshConn = stream.swarm_conn
        self._net_stream = stream
        self._muxed: MeshYamuxStream = stream.muxed_stream
        self._reader = FrameReader(max_header, max_payload)
        self._deadline = 0.0  # of the frame that has begun; 0: none has
        self._queue, self._frames = trio.open_memory_channel[list[bytes | memoryview]](SEND_QUEUE)
        self._flushed = trio.Event()
        self.peer: str = self._conn.peer
        self.protocol: str = str(stream.get_protocol())
        start_soon(self._write)

    def _broken(self, error: object) -> MeshError:
        return MeshError("unreachable", f"the stream {self.protocol} with {self.peer} has ended: {error}")

    async def send(self, header: bytes, payload: bytes | memoryview = b"") -> None:
        """Queues one frame; waits while SEND_QUEUE frames are ahead of it. The payload must not change afterwards.

        MeshError unreachable once the stream is broken. A frame that is queued is sent whole, whatever happens to the
        sender.
        """
        parts = encode_frame(header, payload)
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            try:
                self._queue.send_nowait(parts)  # mostly: a turn of the scheduler less for every frame
            except trio.WouldBlock:
                await self._queue.send(parts)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise self._broken("it was closed, or broke") from error

    async def _write(self) -> None:
        """The only task that writes. The muxer shields each of its frames, and ends what takes too long."""
        try:
            with self._frames:
                async for parts in self._frames:
                    await self._muxed.write(parts[0] if len(parts) == 1 else b"".join(parts))
            self._muxed.close_now()
            self._flushed.set()
            await self._linger()
        except (BaseLibp2pError, OSError, trio.ClosedResourceError) as error:
            log.debug("%s", self._broken(error))
        except Exception:
            log.exception("writing to %s failed", self.peer)
        finally:
            self._flushed.set()
            self._drop()

    async def _linger(self) -> None:
        """Waits for the peer's half to end; what still comes is thrown away."""
        with trio.move_on_after(LINGER):
            while True:
                await self._muxed.read(READ_SIZE)

    async def receive(self) -> tuple[bytes, memoryview]:
        """The next frame's header and payload. May be cancelled without loss.

        MeshError bad_frame for bytes that are no frame, or too slow: the stream is reset then; unreachable once it has
        ended, for whatever reason.
        """
        try:
            while True:
                frame = self._reader.next()
                if frame is not None:
                    self._deadline = 0.0
                    return frame
                await self._read_more()
        except MeshError as error:
            if error.code == "bad_frame":
                self._drop()
            raise

    async def _read_more(self) -> None:
        if not self._reader.partial:
            self._reader.feed(await self._read())
            return
        if not self._deadline:
            self._deadline = trio.current_time() + FRAME_LIMIT
        with trio.CancelScope(deadline=self._deadline):
            self._reader.feed(await self._read())
            return
        raise MeshError("bad_frame", f"a frame of {self.peer} did not arrive within {FRAME_LIMIT:.0f} s")

    async def _read(self) -> bytes:
        try:
            return await self._muxed.read(READ_SIZE)
        except (BaseLibp2pError, OSError) as error:
            raise self._broken(error) from error

    async def aclose(self) -> None:
        """Sends what is queued, then closes; returns once that is written, or cannot be."""
        self._queue.close()
        await self._flushed.wait()

    def finish_soon(self) -> None:
        """Closes without waiting."""
        self._queue.close()

    async def reset(self) -> None:
        """Ends both directions at once; what is queued is thrown away."""
        self.reset_now()
        await trio.lowlevel.checkpoint()

    def reset_now(self) -> None:
        self._queue.close()
        self._frames.close()
        self._drop()

    def _drop(self) -> None:
        self._muxed.reset_now()
        self._conn.remove_stream(self._net_stream)
