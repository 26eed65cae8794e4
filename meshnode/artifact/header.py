"""Read the header of a GGUF file that may be hostile: bounded in time and memory whatever the bytes say.

read_header(fd, size) -> Header    metadata, tensor table and layout, or bad_gguf naming the exact fault

No length is believed before it is held against what is left of the file and against a limit of ours; nothing is
read twice; no tensor data is read. All of it stays under 2 s and 64 MiB on a slow core.
"""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import dataclass
from typing import NamedTuple

from .cursor import MAX_TEXTS, Cursor, Tokens, bad, quote
from .ggml import TENSOR_TYPES, TensorType

MAX_KEYS = 4096
MAX_KEY = 1024  # bytes of a key
MAX_TEXT = 1 << 20  # bytes of one text; chat templates reach 30 KiB
MAX_TENSORS = 1 << 15
MAX_TENSOR_NAME = 63  # bytes; the engine's
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 16
MIN_ALIGNMENT = 32  # the engine maps tensors in place and its buffers are aligned so
KEPT_ELEMENTS = 1024  # values of longer arrays are not kept: twice the most layers there can be
MAX_TRAILING = 1 << 20  # bytes after the last tensor: padding and junk are hashed too, so they are bounded
MAX_HOLE = 64 << 20  # bytes never written inside the file; file systems that compress make small holes of zeros
MAX_EXTENTS = 10_000  # looked at for holes: a few ms

TOKENS, TOKEN_TYPES, ALIGNMENT = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "general.alignment"

_STRING, _ARRAY = 8, 9
_SCALARS = {  # number in the file: (name, layout)
    0: ("u8", "<B"), 1: ("i8", "<b"), 2: ("u16", "<H"), 3: ("i16", "<h"), 4: ("u32", "<I"), 5: ("i32", "<i"),
    6: ("f32", "<f"), 7: ("bool", "<B"), 10: ("u64", "<Q"), 11: ("i64", "<q"), 12: ("f64", "<d"),
}  # fmt: skip
_LAYOUTS = dict(_SCALARS.values())


@dataclass(frozen=True, slots=True)
class Array:
    """An array's element type ("u32", "str" ...), its length, and its bytes where they were kept."""

    type: str
    count: int
    raw: bytes | None

    def values(self) -> tuple[int | float, ...]:
        """The numbers, none when they were not kept."""
        layout = _LAYOUTS.get(self.type)
        return () if self.raw is None or layout is None else tuple(v for (v,) in struct.iter_unpack(layout, self.raw))


class Value(NamedTuple):
    """One metadata value. type: "u32", "f32", "bool", "str", "arr" ..."""

    type: str
    value: int | float | bool | str | Array


class Tensor(NamedTuple):
    """dims: ne[0] (a row's elements) first; offset: bytes from the start of the file."""

    name: str
    dims: tuple[int, ...]
    type: TensorType
    offset: int
    nbytes: int


class Header(NamedTuple):
    """A file whose structure is sound: every tensor lies within it, in order, overlapping nothing."""

    version: int
    metadata: dict[str, Value]
    tokens: Tokens | None
    tensors: dict[str, Tensor]
    data_start: int  # offset of the first tensor
    data_end: int  # one past the last tensor's last byte
    size: int


def read_header(fd: int, size: int) -> Header:
    """Read and check the structure of the GGUF file open at fd, whose size is given in bytes.

    Errors: bad_gguf, naming the fault and the key or tensor that has it, never a path; unreadable (the disk).
    """
    cursor = Cursor(fd, size)
    magic = cursor.take(4, "magic")
    if magic != b"GGUF":
        raise bad(f"not a GGUF file: it begins with {magic!r}")
    version: int = cursor.scalar("<I", "version")
    if version & 0xFFFF == 0 and version:
        raise bad("big-endian GGUF files are not supported")
    if version not in (2, 3):
        raise bad(f"GGUF version {version} is not supported (2 and 3 are)")
    n_tensors = cursor.count("<Q", MAX_TENSORS, "number of tensors")
    n_keys = cursor.count("<Q", MAX_KEYS, "number of metadata keys")
    metadata, tokens = _read_metadata(cursor, n_keys)
    alignment = _alignment(metadata)
    tensors = [_read_tensor(cursor, i) for i in range(n_tensors)]
    start = -(-cursor.position // alignment) * alignment if tensors else cursor.position
    placed, end = _place(tensors, start, alignment, size)
    if size - end > MAX_TRAILING:
        raise bad(f"{size - end} bytes lie after the last tensor (at most {MAX_TRAILING} may)")
    _check_holes(fd, end)
    return Header(version, metadata, tokens, placed, start, end, size)


def _read_metadata(cursor: Cursor, count: int) -> tuple[dict[str, Value], Tokens | None]:
    metadata: dict[str, Value] = {}
    tokens = None
    for i in range(count):
        key = cursor.name(MAX_KEY, f"key {i}")
        if not key:
            raise bad(f"key {i} is empty")
        if key in metadata:
            raise bad(f"key {quote(key)} stands there twice")
        what = f"value of {quote(key)}"
        kind = cursor.scalar("<I", f"type of {quote(key)}")
        if kind in _SCALARS:
            name, layout = _SCALARS[kind]
            number = cursor.scalar(layout, what)
            metadata[key] = Value(name, bool(number) if name == "bool" else number)
        elif kind == _STRING:
            metadata[key] = Value("str", cursor.text(MAX_TEXT, what))
        elif kind == _ARRAY:
            element = cursor.scalar("<I", f"element type of {quote(key)}")
            length = cursor.scalar("<Q", f"length of {quote(key)}")
            if element == _STRING:
                seen = cursor.string_array(length, what, tokens=key == TOKENS)
                tokens = seen if key == TOKENS else tokens
                metadata[key] = Value("arr", Array("str", length, None))
            elif element in _SCALARS:
                metadata[key] = Value("arr", _read_numbers(cursor, key, element, length))
            else:
                raise bad(f"the {what} is an array of type {element}, which arrays may not hold")
        else:
            raise bad(f"the {what} has the unknown type {kind}")
    return metadata, tokens


def _read_numbers(cursor: Cursor, key: str, element: int, length: int) -> Array:
    name, layout = _SCALARS[element]
    nbytes, what = struct.calcsize(layout) * length, f"value of {quote(key)}"
    if length > KEPT_ELEMENTS and key != TOKEN_TYPES:
        cursor.skip(nbytes, what)
        return Array(name, length, None)
    cursor.need(nbytes, what)
    if nbytes > MAX_TEXTS - cursor.kept:
        raise bad(f"the {what} is longer than any vocabulary")
    cursor.kept += nbytes
    return Array(name, length, cursor.take(nbytes, what))


def _alignment(metadata: dict[str, Value]) -> int:
    kind, value = metadata.get(ALIGNMENT, Value("u32", MIN_ALIGNMENT))
    if kind != "u32" or not isinstance(value, int):
        raise bad(f"{ALIGNMENT} has the type {kind}, not u32")
    if not MIN_ALIGNMENT <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise bad(f"{ALIGNMENT} is {value}, no power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}")
    return value


def _read_tensor(cursor: Cursor, index: int) -> Tensor:
    """A row of the tensor table; its offset is still relative to the data's start."""
    name = cursor.name(MAX_TENSOR_NAME, f"name of tensor {index}")
    what = f"table entry of tensor {quote(name)}"
    n_dims = cursor.scalar("<I", what)
    if not 1 <= n_dims <= MAX_DIMS:
        raise bad(f"tensor {quote(name)} has {n_dims} dimensions (1 to {MAX_DIMS} are possible)")
    dims = struct.unpack(f"<{n_dims}q", cursor.take(8 * n_dims, what))
    elements = 1
    for dim in dims:
        elements *= dim
        if dim < 1 or elements >= 1 << 62:
            raise bad(f"tensor {quote(name)} has the impossible shape {list(dims)}")
    number = cursor.scalar("<I", what)
    if number not in TENSOR_TYPES:
        raise bad(f"tensor {quote(name)} has the unknown type {number}")
    kind = TENSOR_TYPES[number]
    if dims[0] % kind.block:
        raise bad(f"rows of tensor {quote(name)} have {dims[0]} elements, no multiple of {kind.name}'s {kind.block}")
    return Tensor(name, dims, kind, cursor.scalar("<Q", what), elements // kind.block * kind.bytes)


def _place(tensors: list[Tensor], start: int, alignment: int, size: int) -> tuple[dict[str, Tensor], int]:
    """Tensors by name at offsets in the file; they must lie one after the other, as the engine demands."""
    placed: dict[str, Tensor] = {}
    expected, end = 0, start
    for tensor in tensors:
        who = f"tensor {quote(tensor.name)}"
        if tensor.name in placed:
            raise bad(f"{who} stands there twice")
        if tensor.offset % alignment:
            raise bad(f"{who} lies at offset {tensor.offset}, no multiple of the alignment {alignment}")
        if start + tensor.offset + tensor.nbytes > size:
            raise bad(f"{who} reaches {start + tensor.offset + tensor.nbytes - size} bytes beyond the end of the file")
        if tensor.offset != expected:
            fault = "overlaps the one before it" if tensor.offset < expected else "leaves a gap before it"
            raise bad(f"{who} {fault}: offset {tensor.offset} instead of {expected}")
        end = start + tensor.offset + tensor.nbytes
        expected = -(-(tensor.offset + tensor.nbytes) // alignment) * alignment
        placed[tensor.name] = tensor._replace(offset=start + tensor.offset)
    return placed, end


def _check_holes(fd: int, end: int) -> None:
    """Long stretches that were never written are a download never finished, or a trap for whoever hashes them."""
    at = unwritten = 0
    try:
        for _ in range(MAX_EXTENTS):
            hole = os.lseek(fd, at, os.SEEK_HOLE)
            if hole >= end:
                return
            try:
                at = min(os.lseek(fd, hole, os.SEEK_DATA), end)
            except OSError as error:  # ENXIO: nothing but a hole up to the end
                if error.errno != errno.ENXIO:
                    raise
                at = end
            unwritten += at - hole
            if unwritten > MAX_HOLE:
                raise bad(f"{unwritten} bytes up to offset {at} were never written: the file is incomplete")
            if at >= end:
                return
    except OSError:
        return  # a file system that cannot say
    finally:
        os.lseek(fd, 0, os.SEEK_SET)
