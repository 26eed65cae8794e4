"""Frames at every byte split, and the bytes that are none."""

import os

import pytest

from meshnode.errors import MeshError
from meshnode.wire.framing import FrameReader, encode_frame

FRAMES = [(b"h", b""), (b"header", b"payload"), (b"x" * 300, b"\0" * 5000)]
STREAM = b"".join(bytes(part) for frame in FRAMES for part in encode_frame(*frame))


def read_all(reader: FrameReader) -> list[tuple[bytes, bytes]]:
    found = []
    while (frame := reader.next()) is not None:
        found.append((frame[0], bytes(frame[1])))
    return found


def test_frames_survive_every_split() -> None:
    for cut in range(len(STREAM) + 1):
        reader = FrameReader()
        reader.feed(STREAM[:cut])
        first = read_all(reader)
        reader.feed(STREAM[cut:])
        assert first + read_all(reader) == FRAMES
        assert not reader.partial


def test_frames_survive_single_bytes() -> None:
    reader, found = FrameReader(), []
    for byte in STREAM[:400]:
        reader.feed(bytes([byte]))
        found += read_all(reader)
    assert found == FRAMES[:2]
    assert reader.partial


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff\xff\xff\xff\0\0\0\0",
        b"\0\0\0\1\xff\xff\xff\xff",
        b"\0\0\0\0\0\0\0\0",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 65536,
    ],
)
def test_what_is_no_frame_is_refused_before_anything_is_kept(raw: bytes) -> None:
    reader = FrameReader(max_header=1024, max_payload=4096)
    reader.feed(raw)
    with pytest.raises(MeshError) as refused:
        reader.next()
    assert refused.value.code == "bad_frame"
    assert not reader.partial
    reader.feed(STREAM)
    with pytest.raises(MeshError):  # framing is lost for good
        reader.next()


def test_bounds_are_inclusive() -> None:
    reader = FrameReader(max_header=6, max_payload=7)
    reader.feed(b"".join(map(bytes, encode_frame(b"header", b"payload"))))
    assert read_all(reader) == [(b"header", b"payload")]
    for header, payload in ((b"header+", b""), (b"h", b"payload+")):
        reader = FrameReader(max_header=6, max_payload=7)
        reader.feed(b"".join(map(bytes, encode_frame(header, payload))))
        with pytest.raises(MeshError):
            reader.next()


def test_an_activation_is_not_copied_when_it_is_framed() -> None:
    payload = os.urandom(4096)
    assert encode_frame(b"h", payload)[1] is payload
