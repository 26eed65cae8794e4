"""The payload of pushes: a bundle of named tensors, one today, each with dtype, shape, codec and digest."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from ..errors import MeshError
from .messages import Push, Pushes, Tensor

ABSURD = 1e8  # Gemma's residuals reach 98,407; below this a norm's sum of squares stays finite in f32 at any width


def tokens_payload(ids: Sequence[int]) -> bytes:
    """[n] int32, little-endian."""
    return np.asarray(ids, dtype="<i4").tobytes()


def describe(payload: bytes | memoryview, *, n_embd: int | None) -> Tensor:
    """The tensor that a payload holds: rows [n, n_embd] of f32, or [n] ids when n_embd is None."""
    sha = hashlib.sha256(payload).digest()
    if n_embd is None:
        return Tensor("tokens", "i32", (len(payload) // 4,), "raw", sha)
    return Tensor("residual", "f32", (len(payload) // (4 * n_embd), n_embd), "raw", sha)


def split(message: Pushes, payload: memoryview, *, n_embd: int) -> list[tuple[Push, memoryview]]:
    """Each push with its rows of the payload.

    Raises MeshError bad_frame when shape, size or digest do not fit. The values are for check_rows().
    """
    tensor = message.bundle[0]
    rows = sum(push.count for push in message.pushes)
    head = {push.begin == 0 for push in message.pushes}
    if len(head) != 1:
        raise MeshError("bad_frame", "a frame that mixes tokens and activations")
    wanted = ("tokens", "i32", (rows,)) if head.pop() else ("residual", "f32", (rows, n_embd))
    if (tensor.name, tensor.dtype, tensor.shape) != wanted:
        raise MeshError("bad_frame", f"a tensor {tensor.name} {tensor.dtype} {tensor.shape} where {wanted} was due")
    width = 4 if tensor.name == "tokens" else 4 * n_embd
    if len(payload) != rows * width:
        raise MeshError("bad_frame", f"a payload of {len(payload)} bytes where {rows * width} were due")
    if hashlib.sha256(payload).digest() != tensor.sha256:
        raise MeshError("bad_frame", "a payload that does not have its digest")
    parts, at = [], 0
    for push in message.pushes:
        parts.append((push, payload[at : at + push.count * width]))
        at += push.count * width
    return parts


def check_rows(rows: memoryview) -> None:
    """Raises MeshError bad_activation for residuals that are not finite, or absurd: before the engine sees them."""
    # the largest magnitude is NaN or infinite when any is, so one pass serves all three faults
    largest = float(np.abs(np.frombuffer(rows, dtype="<f4")).max())
    if not largest < ABSURD:
        raise MeshError("bad_activation", f"activations with a largest magnitude of {largest:g}")


def read_tokens(rows: memoryview) -> list[int]:
    return np.frombuffer(rows, dtype="<i4").tolist()  # type: ignore[no-any-return]
