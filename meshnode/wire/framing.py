"""Frames: a header and a payload, each with its length before it. Pure: bytes in, frames out.

    u32 header length | u32 payload length | header | payload          (big-endian)

The header is one CBOR message; the payload is raw (activations, tokens) and mostly empty. Both lengths are checked
against their bounds before anything is kept for them.
"""

from __future__ import annotations

import struct

from ..errors import MeshError

PREFIX = struct.Struct(">II")
MAX_HEADER = 1 << 20  # 1 MiB: a route-open with a long prompt is the largest message
MAX_PAYLOAD = 16 << 20  # 256 positions of 16,384 channels in f32; a link lowers it to what its leases need


def encode_frame(header: bytes, payload: bytes | memoryview = b"") -> list[bytes | memoryview]:
    """The parts of one frame, in order; an activation is not copied."""
    start = PREFIX.pack(len(header), len(payload)) + header
    return [start, payload] if len(payload) else [start]


class FrameReader:
    """Cuts a stream of bytes into frames.

    feed() takes what arrived, next() gives (header, payload) or None while a frame is unfinished. A length beyond its
    bound, or an empty header, raises MeshError bad_frame, and the reader stays broken: framing is lost.
    """

    def __init__(self, max_header: int = MAX_HEADER, max_payload: int = MAX_PAYLOAD) -> None:
        self._limits = (max_header, max_payload)
        self._buffer = bytearray()
        self._fault: MeshError | None = None

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        self._buffer += data

    @property
    def partial(self) -> bool:
        """Whether a frame has begun and not ended: its deadline runs."""
        return bool(self._buffer)

    def next(self) -> tuple[bytes, memoryview] | None:
        if self._fault:
            raise self._fault
        if len(self._buffer) < PREFIX.size:
            return None
        header, payload = PREFIX.unpack_from(self._buffer)
        for what, length, limit in (("header", header, self._limits[0]), ("payload", payload, self._limits[1])):
            if length > limit:
                self._fail(f"a {what} of {length} bytes is over the limit of {limit}")
        if header == 0:
            self._fail("a frame has no header")
        end = PREFIX.size + header + payload
        if len(self._buffer) < end:
            return None
        frame = memoryview(bytes(memoryview(self._buffer)[PREFIX.size : end]))
        del self._buffer[:end]
        return bytes(frame[:header]), frame[header:]

    def _fail(self, message: str) -> None:
        self._buffer.clear()
        self._fault = MeshError("bad_frame", message)
        raise self._fault
