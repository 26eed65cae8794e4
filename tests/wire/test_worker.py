"""Frames of node and worker against protocol/vectors/worker.json, which native/test_frames.cpp reads as well."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import worker_vectors
from meshnode.errors import MeshError
from meshnode.wire import worker as wire
from meshnode.wire import worker_messages as say

VECTORS: dict[str, Any] = json.loads(worker_vectors.VECTORS.read_text())
CLASSES: dict[str, type[say.Message]] = {
    "load": say.Load, "open": say.Open, "step": say.Step, "truncate": say.Truncate, "close": say.Close,
    "tokenize": say.Tokenize, "pieces": say.Pieces, "fork": say.Fork, "hello": say.Hello, "loaded": say.Loaded,
    "opened": say.Opened, "stepped": say.Stepped, "truncated": say.Truncated, "closed": say.Closed,
    "tokens": say.Tokens, "piece_list": say.PieceList, "describe_chat": say.DescribeChat, "chat_facts": say.ChatFacts,
    "forked": say.Forked, "error": say.Error,
}  # fmt: skip


def message_of(vector: dict[str, Any]) -> say.Message:
    """The message as the vectors write it: bytes in hex, tuples as lists."""
    m: dict[str, Any] = dict(vector["message"])
    for name, value in m.items():
        if name == "sampling":
            biases = tuple(map(tuple, value["logit_bias"]))
            m[name] = say.Sampling(**value | {"logit_bias": biases})
        elif name == "sampled" and value:
            top = tuple((token, logprob, bytes.fromhex(piece)) for token, logprob, piece in value["top"])
            piece = bytes.fromhex(value["piece"])
            m[name] = say.Sampled(value["token"], piece, value["is_end"], value["logprob"], top)
        elif name == "residual" and value is not None:
            m[name] = bytes.fromhex(value)
        elif name in ("pieces", "controls"):
            m[name] = tuple(map(bytes.fromhex, value))
        elif name == "files":
            m[name] = tuple(say.ModelFile(**file) for file in value)
        elif name in ("bos", "eos"):
            m[name] = bytes.fromhex(value)
        elif name == "segments":
            m[name] = tuple(map(tuple, value))
        elif isinstance(value, list):
            m[name] = tuple(value)
    return CLASSES[vector["kind"]](**m)


def read(data: bytes, split: int, bound: int = wire.UNLOADED_BOUND) -> list[tuple[int, int, bytes]]:
    """What a reader gives when data arrives in two pieces."""
    reader = wire.FrameReader(bound)
    frames = []
    for piece in (data[:split], data[split:]):
        while piece:
            space = reader.space()
            n = min(len(space), len(piece))
            space[:n] = piece[:n]
            frames += [(kind, number, bytes(body)) for kind, number, body in reader.received(n)]
            piece = piece[n:]
    return frames


def named(vectors: list[dict[str, Any]]) -> Any:
    return pytest.mark.parametrize("vector", vectors, ids=[v["name"] for v in vectors])


def test_the_vectors_are_current() -> None:
    assert worker_vectors.VECTORS.read_text() == worker_vectors.render()
    assert {v["kind"] for v in VECTORS["frames"]} == set(worker_vectors.KINDS)


@named(VECTORS["frames"])
def test_encodes(vector: dict[str, Any]) -> None:
    assert b"".join(wire.encode(message_of(vector), vector["id"])).hex() == vector["hex"]


@named(VECTORS["frames"])
def test_decodes_at_every_split(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["hex"])
    for split in range(len(data)):
        ((kind, number, body),) = read(data, split)
        assert number == vector["id"]
        assert wire.decode(kind, body) == message_of(vector)
        assert read(data[:split], split // 2) == []  # a frame that is cut is none
    two = read(data + data, len(data) + 3)
    assert len(two) == 2
    assert two[0] == two[1]


@named(VECTORS["frames"])
def test_a_body_that_is_cut_or_too_long_is_refused(vector: dict[str, Any]) -> None:
    ((kind, _, body),) = read(bytes.fromhex(vector["hex"]), 0)
    for wrong in [body[:size] for size in range(len(body))] + [body + b"\0"]:
        with pytest.raises(MeshError) as raised:
            wire.decode(kind, wrong)
        assert raised.value.code == "bad_frame"


@named(VECTORS["refused"])
def test_refuses(vector: dict[str, Any]) -> None:
    ((kind, _, body),) = read(bytes.fromhex(vector["hex"]), 1)
    with pytest.raises(MeshError) as raised:
        wire.decode(kind, body)
    assert raised.value.code == "bad_frame"


@named(VECTORS["lost"])
def test_framing_is_lost(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["hex"])
    for split in range(len(data)):
        with pytest.raises(MeshError) as raised:
            read(data, split, vector["bound"])
        assert raised.value.code == "bad_frame"


@pytest.mark.parametrize(
    "message",
    [
        say.Step(1, 0, (0, 1)),
        say.Step(1, 0, (0, 1), tokens=()),
        say.Step(1, 0, (0, 1), tokens=(1,), residual=bytes(4)),
        say.Step(1, 0, (1, 2), residual=b""),
        say.Step(1, 0, (1, 2), residual=bytes(5)),
        say.Step(1, 2**31, (0, 1), tokens=(1,)),
        say.Step(1, 0, (0, 1), tokens=(2**31,)),
        say.Step(-1, 0, (0, 1), tokens=(1,)),
        say.Open(2**64),
        say.Open(1, say.Sampling(temperature=float("nan"))),
        say.Open(1, say.Sampling(seed=-1)),
        say.Open(1, say.Sampling(top_k=2**32)),
        say.Open(1, say.Sampling(logprobs=21)),
        say.Open(1, say.Sampling(logit_bias=((1, 0.0), (1, 0.0)))),
        say.Open(1, say.Sampling(grammar="é" * 32769)),
        say.Stepped(1, sampled=say.Sampled(1, b"", False, 0.5)),
        say.Stepped(1, sampled=say.Sampled(1, b"", False, None, ((1, -0.5, b""),))),
        say.Tokenize(),
        say.Tokenize("a", segments=((True, "a"),)),
        say.Tokenize(None, True, segments=((True, "a"),)),
        say.Tokenize("\ud800"),
        say.Pieces((1,) * 4097),
        say.Truncate(1, -1),
    ],
    ids=str,
)
def test_what_does_not_fit_is_not_encoded(message: say.Message) -> None:
    with pytest.raises(MeshError) as raised:
        wire.encode(message, 1)
    assert raised.value.code == "bad_frame"


def test_a_residual_is_not_copied_and_may_have_rows() -> None:
    data = memoryview(bytes(range(48))).cast("f", (3, 4))
    start, rows = wire.encode(say.Step(1, 0, (1, 2), residual=data), 1)
    assert bytes(rows) == bytes(range(48))
    assert start[-4:] == bytes([12, 0, 0, 0])
    original = bytes(64)
    assert wire.encode(say.Step(1, 0, (1, 2), residual=original), 1)[1] is original


def test_a_frame_longer_than_the_buffer_grows_it_once() -> None:
    bound = wire.reply_bound(8192, 2048, 256)
    stepped = say.Stepped(1, bytes(256 * 8192 * 4))
    data = b"".join(wire.encode(stepped, 7))
    ((kind, number, body),) = read(data, 100, bound)
    assert (number, wire.decode(kind, body)) == (7, stepped)


def test_bounds() -> None:
    assert wire.request_bound(576, 2048, 256) == (1 << 20) + (64 << 10)
    assert wire.request_bound(8192, 2048, 256) == 256 * 8192 * 4 + (64 << 10)
    assert wire.request_bound(576, 1 << 20, 256) == (4 << 20) + (64 << 10)
    assert wire.request_bound(1 << 20, 1, 1 << 16) == 1 << 30


@given(st.sampled_from(VECTORS["frames"]), st.data())
def test_any_bytes_give_a_message_or_bad_frame(vector: dict[str, Any], data: st.DataObject) -> None:
    body = bytearray.fromhex(vector["hex"])[wire.HEADER.size :]
    for _ in range(3):
        if body:
            body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    kind = worker_vectors.KINDS[vector["kind"]]
    try:
        message = wire.decode(kind, body)
    except MeshError:
        return
    # What is taken can be said again, in the very same bytes.
    assert b"".join(wire.encode(message, 1))[wire.HEADER.size :] == body


def test_messages_keep_nothing_of_the_buffer() -> None:
    for vector in VECTORS["frames"]:
        body = bytearray.fromhex(vector["hex"])[wire.HEADER.size :]
        message = wire.decode(worker_vectors.KINDS[vector["kind"]], body)
        before = repr(dataclasses.astuple(message))
        body[:] = bytes(len(body))
        assert repr(dataclasses.astuple(message)) == before
