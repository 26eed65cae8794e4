"""Payloads: what fits its pushes goes on, everything else is refused before the engine sees it."""

import dataclasses
import hashlib

import numpy as np
import pytest

from meshnode.errors import MeshError
from meshnode.wire import activation
from meshnode.wire.messages import Push, Pushes

N_EMBD = 8


def push(count: int, begin: int = 3) -> Push:
    return Push(b"l" * 8, b"s" * 16, 1, 0, 0, count, begin, 0)


def residual(rows: int, value: float = 1.0) -> bytes:
    return np.full((rows, N_EMBD), value, dtype="<f4").tobytes()


def test_rows_go_to_their_pushes() -> None:
    payload = np.arange(5 * N_EMBD, dtype="<f4").tobytes()
    frame = Pushes((push(2), push(3)), (activation.describe(payload, n_embd=N_EMBD),))
    parts = activation.split(frame, memoryview(payload), n_embd=N_EMBD)
    assert [bytes(rows) for _, rows in parts] == [payload[: 2 * 4 * N_EMBD], payload[2 * 4 * N_EMBD :]]


def test_tokens_survive() -> None:
    payload = activation.tokens_payload([1, 49151, 0])
    frame = Pushes((push(3, begin=0),), (activation.describe(payload, n_embd=None),))
    [(_, rows)] = activation.split(frame, memoryview(payload), n_embd=N_EMBD)
    assert activation.read_tokens(rows) == [1, 49151, 0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e8, -3e38])
def test_values_that_cannot_be_right_are_refused(value: float) -> None:
    array = np.full((3, N_EMBD), 98_407, dtype="<f4")  # the largest that was seen
    array[2, 5] = value
    payload = array.tobytes()
    frame = Pushes((push(1), push(2)), (activation.describe(payload, n_embd=N_EMBD),))
    [(_, sound), (_, bad)] = activation.split(frame, memoryview(payload), n_embd=N_EMBD)
    activation.check_rows(sound)  # a push does not answer for its neighbour
    with pytest.raises(MeshError) as refused:
        activation.check_rows(bad)
    assert refused.value.code == "bad_activation"


def test_what_does_not_fit_is_refused() -> None:
    payload = residual(2)
    good = activation.describe(payload, n_embd=N_EMBD)
    cases = [
        (Pushes((push(3),), (good,)), payload),
        (Pushes((push(2),), (good,)), payload[:-4]),
        (Pushes((push(2),), (good,)), payload + b"\0\0\0\0"),
        (Pushes((push(2, begin=0),), (good,)), payload),
        (Pushes((push(1), push(1, begin=0)), (good,)), payload),
        (Pushes((push(2),), (dataclasses.replace(good, dtype="i32"),)), payload),
        (Pushes((push(2),), (dataclasses.replace(good, shape=(4, N_EMBD // 2)),)), payload),
        (Pushes((push(2),), (dataclasses.replace(good, sha256=hashlib.sha256(b"").digest()),)), payload),
        (Pushes((push(2),), (good,)), residual(2, 2.0)),
    ]
    for frame, data in cases:
        with pytest.raises(MeshError) as refused:
            activation.split(frame, memoryview(data), n_embd=N_EMBD)
        assert refused.value.code == "bad_frame"
