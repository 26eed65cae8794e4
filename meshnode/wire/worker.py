"""Frames between a node and its worker: bytes <-> frozen messages, as protocol/05-worker.md says. Pure.

    u32 body length | u16 kind | u16 reserved, 0 | u64 request id | body          (little-endian)

encode() gives the parts of one frame, FrameReader cuts a stream into (kind, request id, body), decode() gives the
message of a body. What does not fit raises MeshError bad_frame.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from ..errors import MeshError
from . import worker_messages as say
from .worker_messages import Buffer, Load, Message, ModelFile, Pieces, Sampled, Sampling, Step, Stepped, Tokenize

VERSION = 2
HEADER = struct.Struct("<IHHQ")
UNLOADED_BOUND = 64 << 10  # of a body before LOADED: a LOAD of the largest set fits
TEXT_BOUND = 1 << 20  # least bound of a body after it: a long text to tokenize
SLACK = 64 << 10  # fixed fields beside the largest array
BODY_CAP = 1 << 30  # whatever a model claims
MAX_FILES = 512  # of a set of shards
MAX_PIECES = 4096  # ids of one PIECES, so that its reply is bounded
KEEP_ALL = 0xFFFFFFFF  # the only value of a step's `keep` today
INVARIANT, FAST = 0, 1
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_GRAMMAR = 64 << 10  # bytes
NO_LOGPROBS = 255


def request_bound(n_embd: int, n_ctx: int, max_step: int) -> int:
    """Longest body of a request once a model is loaded, in bytes."""
    return min(max(TEXT_BOUND, 4 * max_step * n_embd, 4 * n_ctx) + SLACK, BODY_CAP)


def reply_bound(n_embd: int, n_ctx: int, max_step: int) -> int:
    """Longest body of a reply: a byte of text makes at most one token id of four bytes."""
    return 4 * request_bound(n_embd, n_ctx, max_step)


_CUT = "the body ends within a field"


class _Body:
    """Takes fields from a body in order."""

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.at = 0

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        start = self.at
        self.at = start + layout.size
        require(self.at <= len(self.view), _CUT)
        return layout.unpack_from(self.view, start)

    def raw(self, size: int) -> memoryview:
        end = self.at + size
        require(end <= len(self.view), _CUT)
        taken = self.view[self.at : end]
        self.at = end
        return taken

    def count(self, least: int) -> int:
        """Of items that take at least `least` bytes each: refused before anything is kept for them."""
        n: int = self.unpack(_U32)[0]
        require(n * least <= len(self.view) - self.at, "a count is larger than the body")
        return n


def require(holds: bool, fault: str) -> None:
    if not holds:
        raise MeshError("bad_frame", fault)


_U32 = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class _Codec:
    put: Callable[[Any], bytes]
    take: Callable[[_Body], Any]


def _fixed(code: str) -> _Codec:
    layout = struct.Struct("<" + code)
    return _Codec(layout.pack, lambda body: body.unpack(layout)[0])


def _take_flag(body: _Body) -> bool:
    byte = body.raw(1)[0]
    require(byte <= 1, "a flag is neither 0 nor 1")
    return bool(byte)


def _put_blob(data: bytes) -> bytes:
    return _U32.pack(len(data)) + data


def _take_blob(body: _Body) -> bytes:
    return bytes(body.raw(body.count(1)))


def _take_text(body: _Body) -> str:
    try:
        return _take_blob(body).decode()
    except UnicodeDecodeError:
        raise MeshError("bad_frame", "text is not UTF-8") from None


def _put_ids(ids: tuple[int, ...]) -> bytes:
    return struct.pack(f"<I{len(ids)}i", len(ids), *ids)


def _take_ids(body: _Body) -> tuple[int, ...]:
    n = body.count(4)
    return struct.unpack(f"<{n}i", body.raw(4 * n))


def _list_of(item: _Codec, least: int) -> _Codec:
    return _Codec(
        lambda items: b"".join((_U32.pack(len(items)), *map(item.put, items))),
        lambda body: tuple(item.take(body) for _ in range(body.count(least))),
    )


_LAYERS_STRUCT = struct.Struct("<ii")
U8, U32, I32, U64, I64, F64 = (_fixed(code) for code in "BIiQqd")
FLAG = _Codec(struct.Struct("<?").pack, _take_flag)
BLOB = _Codec(_put_blob, _take_blob)
TEXT = _Codec(lambda text: _put_blob(text.encode()), _take_text)
IDS = _Codec(_put_ids, _take_ids)
BLOBS = _list_of(BLOB, 4)
LAYERS = _Codec(lambda pair: _LAYERS_STRUCT.pack(*pair), lambda body: body.unpack(_LAYERS_STRUCT))
SEGMENTS = _list_of(
    _Codec(lambda pair: FLAG.put(pair[0]) + TEXT.put(pair[1]), lambda body: (_take_flag(body), _take_text(body))), 5
)

_STAMP = struct.Struct("<QQQqq")


def _put_file(file: ModelFile) -> bytes:
    return TEXT.put(file.path) + _STAMP.pack(file.device, file.inode, file.size, file.mtime_ns, file.ctime_ns)


FILES = _list_of(_Codec(_put_file, lambda body: ModelFile(_take_text(body), *body.unpack(_STAMP))), 4 + _STAMP.size)

_LARGEST = 1e6  # of a sampling parameter, as in native/sample.cpp: far beyond use, keeps every product finite


def check_sampling(s: Sampling) -> None:
    """Raise bad_frame unless the worker takes these parameters."""
    require(
        0 <= s.temperature <= _LARGEST
        and 0 < s.top_p <= 1
        and 0 <= s.min_p <= 1
        and 0 < s.repeat_penalty <= _LARGEST
        and abs(s.presence_penalty) <= _LARGEST
        and abs(s.frequency_penalty) <= _LARGEST
        and 0 < s.typical_p <= 1
        and (s.logprobs is None or 0 <= s.logprobs <= MAX_LOGPROBS)
        and len(s.logit_bias) <= MAX_BIASES
        and all(token >= 0 and abs(bias) <= _LARGEST for token, bias in s.logit_bias)
        and all(a < b for (a, _), (b, _) in pairwise(s.logit_bias))
        and len(s.grammar.encode(errors="replace")) <= MAX_GRAMMAR,
        "a sampling parameter is out of range",
    )


_SAMPLING = struct.Struct("<dIdddIddQdB")
_BIAS = struct.Struct("<id")
BIASES = _list_of(_Codec(lambda pair: _BIAS.pack(*pair), lambda body: body.unpack(_BIAS)), _BIAS.size)


def _put_sampling(s: Sampling) -> bytes:
    check_sampling(s)
    fixed = _SAMPLING.pack(
        s.temperature, s.top_k, s.top_p, s.min_p, s.repeat_penalty, s.repeat_last_n,
        s.presence_penalty, s.frequency_penalty, s.seed, s.typical_p,
        NO_LOGPROBS if s.logprobs is None else s.logprobs,
    )  # fmt: skip
    return fixed + BIASES.put(s.logit_bias) + TEXT.put(s.grammar)


def _take_sampling(body: _Body) -> Sampling:
    *fixed, logprobs = body.unpack(_SAMPLING)
    told = None if logprobs == NO_LOGPROBS else logprobs
    biases, grammar = BIASES.take(body), _take_text(body)
    sampling = replace(Sampling(*fixed), logprobs=told, logit_bias=biases, grammar=grammar)
    check_sampling(sampling)
    return sampling


SAMPLING = _Codec(_put_sampling, _take_sampling)
_STEP = struct.Struct("<QiiiI??HI")  # handle, first position, begin, end, keep, sample, input, 0, count
_STEP_BYTES = _STEP.size
_STEPPED = struct.Struct("<QB3s")  # compute_ns, output, 0
_SAMPLED = struct.Struct("<iBBH")  # token, is_end, whether log-probabilities follow, 0
_ZEROS = bytes(3)


def _put_logprob(value: float) -> bytes:
    require(-math.inf < value <= 0, "a log-probability is out of range")
    return F64.put(value)


def _take_logprob(body: _Body) -> float:
    value: float = F64.take(body)
    require(-math.inf < value <= 0, "a log-probability is out of range")
    return value


LIKELY = _list_of(
    _Codec(
        lambda item: I32.put(item[0]) + _put_logprob(item[1]) + _put_blob(item[2]),
        lambda body: (I32.take(body), _take_logprob(body), _take_blob(body)),
    ),
    16,
)


def _encode_step(m: Step) -> list[Buffer]:
    if m.residual is not None:
        data = m.residual if isinstance(m.residual, bytes) else memoryview(m.residual).cast("B")
        require(m.tokens is None and len(data) > 0 and len(data) % 4 == 0, "a residual is rows of f32, without tokens")
    else:
        require(bool(m.tokens), "a step carries tokens or a residual")
        data = struct.pack(f"<{len(m.tokens or ())}i", *(m.tokens or ()))
    is_residual = m.residual is not None
    start = _STEP.pack(m.handle, m.first_pos, *m.layers, KEEP_ALL, m.sample, is_residual, 0, len(data) // 4)
    return [start, data]


def _decode_step(body: _Body) -> Step:
    fixed = body.raw(_STEP_BYTES - 4)
    handle, first, begin, end, keep, sample, which, reserved = struct.unpack("<QiiiIBBH", fixed)
    require(keep == KEEP_ALL and reserved == 0, "a reserved field is set")
    require(sample <= 1 and which <= 1, "a flag is neither 0 nor 1")
    n = body.count(4)
    require(n > 0, "a step without positions")
    data = body.raw(4 * n)
    ids = None if which else struct.unpack(f"<{n}i", data)
    return Step(handle, first, (begin, end), bool(sample), ids, bytes(data) if which else None)


def _encode_stepped(m: Stepped) -> list[Buffer]:
    if m.sampled is not None:
        s = m.sampled
        sampled = _SAMPLED.pack(s.token, s.is_end, s.logprob is not None, 0) + _put_blob(s.piece)
        require(len(s.top) <= (MAX_LOGPROBS if s.logprob is not None else 0), "too many log-probabilities")
        if s.logprob is not None:
            sampled += _put_logprob(s.logprob) + LIKELY.put(s.top)
        return [_STEPPED.pack(m.compute_ns, 2, _ZEROS) + sampled]
    if m.residual:
        return [_STEPPED.pack(m.compute_ns, 1, _ZEROS) + _U32.pack(len(m.residual) // 4), m.residual]
    return [_STEPPED.pack(m.compute_ns, 0, _ZEROS)]


def _decode_stepped(body: _Body) -> Stepped:
    compute_ns, which, zeros = body.unpack(_STEPPED)
    require(which <= 2, "the kind of output is unknown")
    require(zeros == _ZEROS, "a reserved field is not 0")
    if which == 1:
        n = body.count(4)
        require(n > 0, "a residual without positions")
        return Stepped(compute_ns, bytes(body.raw(4 * n)))
    if which == 2:
        token, is_end, told, zeros = body.unpack(_SAMPLED)
        require(zeros == 0, "a reserved field is not 0")
        require(is_end <= 1 and told <= 1, "a flag is neither 0 nor 1")
        piece = _take_blob(body)
        logprob, top = (_take_logprob(body), LIKELY.take(body)) if told else (None, ())
        require(len(top) <= MAX_LOGPROBS, "too many log-probabilities")
        return Stepped(compute_ns, sampled=Sampled(token, piece, bool(is_end), logprob, top))
    return Stepped(compute_ns)


def _encode_tokenize(m: Tokenize) -> list[Buffer]:
    chat = m.text is None
    require(bool(m.segments) if chat else not m.segments, "either a text or segments")
    require(not (chat and (m.add_special or m.parse_special)), "flags of a text in a chat")
    flags = struct.pack("<???B", chat, m.add_special, m.parse_special, 0)
    return [flags + (SEGMENTS.put(m.segments) if chat else TEXT.put(m.text))]


def _decode_tokenize(body: _Body) -> Tokenize:
    chat, add_special, parse_special = (_take_flag(body) for _ in range(3))
    require(body.raw(1)[0] == 0, "a reserved field is not 0")
    if not chat:
        return Tokenize(_take_text(body), add_special, parse_special)
    require(not (add_special or parse_special), "flags of a text in a chat")
    segments = SEGMENTS.take(body)
    require(bool(segments), "a chat without text")
    return Tokenize(None, segments=segments)


@dataclass(frozen=True, slots=True)
class _Kind:
    number: int
    message: type[Message]
    fields: dict[str, _Codec] = field(default_factory=dict)  # in order; unless the two functions below say more
    encode: Callable[[Any], list[Buffer]] | None = None
    decode: Callable[[_Body], Message] | None = None


_KINDS = (
    _Kind(1, Load, {
        "files": FILES, "layers": LAYERS, "n_sessions": U32, "n_ctx": U32, "max_step": U32, "n_threads": U32,
        "numerics": U8,
    }),
    _Kind(2, say.Open, {"handle": U64, "sampling": SAMPLING, "start": U32, "prompt": IDS}),
    _Kind(3, Step, encode=_encode_step, decode=_decode_step),
    _Kind(4, say.Truncate, {"handle": U64, "keep": U32}),
    _Kind(5, say.Close, {"handle": U64}),
    _Kind(6, Tokenize, encode=_encode_tokenize, decode=_decode_tokenize),
    _Kind(7, Pieces, {"ids": IDS}),
    _Kind(8, say.DescribeChat),
    _Kind(9, say.Fork, {
        "handle": U64, "origin": U64, "keep": U32, "sampling": SAMPLING, "start": U32, "prompt": IDS,
    }),
    _Kind(0x80, say.Hello, {"version": U32, "engine": TEXT}),
    _Kind(0x81, say.Loaded, {
        "architecture": TEXT, "layers": LAYERS, "n_layer": I32, "n_embd": I32, "n_vocab": I32, "n_ctx_train": I32,
        "n_sessions": U32, "n_ctx": U32, "max_step": U32, "has_template": FLAG, "tensor_bytes": U64, "kv_bytes": U64,
        "recipe": TEXT, "fingerprint": TEXT, "certificate": TEXT,
    }),
    _Kind(0x82, say.Opened),
    _Kind(0x83, Stepped, encode=_encode_stepped, decode=_decode_stepped),
    _Kind(0x84, say.Truncated),
    _Kind(0x85, say.Closed),
    _Kind(0x86, say.Tokens, {"ids": IDS}),
    _Kind(0x87, say.PieceList, {"pieces": BLOBS}),
    _Kind(0x88, say.ChatFacts, {"source": TEXT, "bos": BLOB, "eos": BLOB, "controls": BLOBS}),
    _Kind(0x89, say.Forked),
    _Kind(0xFF, say.Error, {"code": TEXT, "message": TEXT}),
)  # fmt: skip
_BY_CLASS = {kind.message: kind for kind in _KINDS}
_BY_NUMBER = {kind.number: kind for kind in _KINDS}
# native/frames.h has the same limits for a LOAD, each with its reason.
_LOAD_LIMITS = {"n_sessions": 256, "n_ctx": 1 << 24, "max_step": 1 << 16, "n_threads": 1024}


def _check(message: Message) -> None:
    if isinstance(message, Load):
        require(1 <= len(message.files) <= MAX_FILES, "the number of files is out of range")
        for name, most in _LOAD_LIMITS.items():
            require(1 <= getattr(message, name) <= most, f"{name} is out of range")
        require(message.numerics in (INVARIANT, FAST), "numerics is unknown")
    elif isinstance(message, Pieces):
        require(len(message.ids) <= MAX_PIECES, "too many ids")


def encode(message: Message, request_id: int) -> list[Buffer]:
    """The parts of one frame, in order, to be written together; a residual is a part of its own and not copied."""
    kind = _BY_CLASS[type(message)]
    try:
        if kind.encode:
            parts = kind.encode(message)
        else:
            _check(message)
            parts = [b"".join([codec.put(getattr(message, name)) for name, codec in kind.fields.items()])]
        length = sum(map(len, parts))
        parts[0] = HEADER.pack(length, kind.number, 0, request_id) + parts[0]
    except (struct.error, UnicodeEncodeError) as error:
        raise MeshError("bad_frame", f"a field does not fit its place in {kind.message.__name__}: {error}") from None
    return parts


def decode(kind: int, body: Buffer) -> Message:
    """The message of a whole body of that kind; it keeps nothing of the buffer. Raises MeshError bad_frame."""
    known = _BY_NUMBER.get(kind)
    if known is None:
        raise MeshError("bad_frame", f"unknown kind {kind}")
    taken = _Body(memoryview(body))
    if known.decode:
        message = known.decode(taken)
    else:
        message = known.message(*(codec.take(taken) for codec in known.fields.values()))
        _check(message)
    require(taken.at == len(taken.view), "bytes follow the last field")
    return message


class FrameReader:
    """Cuts a stream into frames without copying it twice.

    space() is a buffer to read into; received(n), called when n bytes of it were filled, yields every whole frame as
    (kind, request id, body). A body is valid until the next space(). max_body bounds every body, in bytes, and may be
    raised. A header that is out of bounds raises MeshError bad_frame: framing is lost.
    """

    def __init__(self, max_body: int = UNLOADED_BOUND) -> None:
        self.max_body = max_body
        self._buffer = bytearray(256 << 10)  # the residual of a prompt chunk of a small model fits
        self._start = self._end = 0

    @property
    def partial(self) -> bool:
        """Whether a frame has begun and not ended."""
        return self._end > self._start

    def space(self) -> memoryview:
        have = self._end - self._start
        need = HEADER.size + (self._header()[0] if have >= HEADER.size else 0)
        if need > len(self._buffer):
            old, self._buffer = self._buffer, bytearray(need)
            self._buffer[:have] = memoryview(old)[self._start : self._end]
            self._start, self._end = 0, have
        elif self._start:
            self._buffer[:have] = self._buffer[self._start : self._end]
            self._start, self._end = 0, have
        return memoryview(self._buffer)[self._end :]

    def received(self, n: int) -> Iterator[tuple[int, int, memoryview]]:
        self._end += n
        while self._end - self._start >= HEADER.size:
            length, kind, request_id = self._header()
            end = self._start + HEADER.size + length
            if self._end < end:
                return
            body = memoryview(self._buffer)[self._start + HEADER.size : end]
            self._start = end
            yield kind, request_id, body

    def _header(self) -> tuple[int, int, int]:
        length, kind, reserved, request_id = HEADER.unpack_from(self._buffer, self._start)
        require(reserved == 0, "the reserved field of a header is not 0")
        require(length <= self.max_body, f"a body of {length} bytes is over the bound of {self.max_body}")
        return length, kind, request_id
