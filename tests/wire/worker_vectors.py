"""Writes protocol/vectors/worker.json: `python tests/wire/worker_vectors.py`; --check tells whether it is current.

The bytes are put together here field by field, and the samples drawn by a plain reference, without any of meshnode's
code, so that the Python and the C++ side are both held against a third statement of protocol/05-worker.md.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from pathlib import Path
from typing import Any

VECTORS = Path(__file__).parents[2] / "protocol" / "vectors" / "worker.json"
ALL = 0xFFFFFFFF

KINDS = {
    "load": 1, "open": 2, "step": 3, "truncate": 4, "close": 5, "tokenize": 6, "pieces": 7,
    "describe_chat": 8, "fork": 9,
    "hello": 0x80, "loaded": 0x81, "opened": 0x82, "stepped": 0x83, "truncated": 0x84, "closed": 0x85, "tokens": 0x86,
    "piece_list": 0x87, "chat_facts": 0x88, "forked": 0x89, "error": 0xFF,
}  # fmt: skip


def u8(x: int) -> bytes:
    return struct.pack("<B", x)


def u32(x: int) -> bytes:
    return struct.pack("<I", x)


def i32(x: int) -> bytes:
    return struct.pack("<i", x)


def u64(x: int) -> bytes:
    return struct.pack("<Q", x)


def i64(x: int) -> bytes:
    return struct.pack("<q", x)


def f64(x: float) -> bytes:
    return struct.pack("<d", x)


def text(x: str | bytes) -> bytes:
    raw = x.encode() if isinstance(x, str) else x
    return u32(len(raw)) + raw


def ids(x: list[int]) -> bytes:
    return u32(len(x)) + b"".join(map(i32, x))


def frame(kind: str | int, request: int, body: bytes) -> str:
    number = KINDS[kind] if isinstance(kind, str) else kind
    return (struct.pack("<IHHQ", len(body), number, 0, request) + body).hex()


NEUTRAL: dict[str, Any] = {
    "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0, "repeat_last_n": 64,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": 0, "typical_p": 1.0, "logprobs": None,
    "logit_bias": [], "grammar": "",
}  # fmt: skip


def sampling(s: dict[str, Any]) -> bytes:
    return (
        f64(s["temperature"]) + u32(s["top_k"]) + f64(s["top_p"]) + f64(s["min_p"]) + f64(s["repeat_penalty"])
        + u32(s["repeat_last_n"]) + f64(s["presence_penalty"]) + f64(s["frequency_penalty"]) + u64(s["seed"])
        + f64(s["typical_p"]) + u8(255 if s["logprobs"] is None else s["logprobs"]) + u32(len(s["logit_bias"]))
        + b"".join(i32(token) + f64(bias) for token, bias in s["logit_bias"]) + text(s["grammar"])
    )  # fmt: skip


FILE: dict[str, Any] = {
    "path": "/proc/self/fd/9", "device": 65026, "inode": 1234567, "size": 97_000_000,
    "mtime_ns": 1_700_000_000_123_456_789, "ctime_ns": -1,
}  # fmt: skip


def model_file(f: dict[str, Any]) -> bytes:
    stamp = u64(f["device"]) + u64(f["inode"]) + u64(f["size"]) + i64(f["mtime_ns"]) + i64(f["ctime_ns"])
    return text(f["path"]) + stamp


def load(**changes: Any) -> tuple[dict[str, Any], bytes]:
    m: dict[str, Any] = {
        "files": [FILE], "layers": [10, 20], "n_sessions": 4, "n_ctx": 2048,
        "max_step": 256, "n_threads": 1, "numerics": 0,
    } | changes  # fmt: skip
    body = u32(len(m["files"])) + b"".join(map(model_file, m["files"]))
    body += i32(m["layers"][0]) + i32(m["layers"][1]) + u32(m["n_sessions"]) + u32(m["n_ctx"])
    return m, body + u32(m["max_step"]) + u32(m["n_threads"]) + u8(m["numerics"])


def opening(handle: int, prompt: list[int], **changes: Any) -> tuple[dict[str, Any], bytes]:
    start = changes.pop("start", len(prompt))
    s = NEUTRAL | changes
    m = {"handle": handle, "sampling": s, "start": start, "prompt": prompt}
    return m, u64(handle) + sampling(s) + u32(start) + ids(prompt)


def fork(handle: int, origin: int, keep: int, prompt: list[int], **changes: Any) -> tuple[dict[str, Any], bytes]:
    m, body = opening(handle, prompt, **changes)
    return m | {"origin": origin, "keep": keep}, body[:8] + u64(origin) + u32(keep) + body[8:]


def step_start(
    handle: int, first: int, layers: list[int], sample: int, which: int, keep: int = ALL, z: int = 0
) -> bytes:
    start = u64(handle) + i32(first) + i32(layers[0]) + i32(layers[1]) + u32(keep)
    return start + u8(sample) + u8(which) + struct.pack("<H", z)


def step(handle: int, first: int, layers: list[int], sample: bool, **data: Any) -> tuple[dict[str, Any], bytes]:
    m = {"handle": handle, "first_pos": first, "layers": layers, "sample": sample, "tokens": None, "residual": None}
    m |= data
    start = step_start(handle, first, layers, sample, m["residual"] is not None)
    if m["residual"] is None:
        return m, start + ids(m["tokens"])
    raw = bytes.fromhex(m["residual"])
    return m, start + u32(len(raw) // 4) + raw


def floats(*values: float) -> str:
    return struct.pack(f"<{len(values)}f", *values).hex()


LOADED = {
    "architecture": "llama", "layers": [10, 20], "n_layer": 30, "n_embd": 576, "n_vocab": 49152, "n_ctx_train": 8192,
    "n_sessions": 4, "n_ctx": 2048, "max_step": 256, "has_template": True, "tensor_bytes": 22_000_000,
    "kv_bytes": 5_000_000_000, "recipe": '{"isa":"avx512","kv":"f16"}', "fingerprint": "5a" * 32,
    "certificate": '{"invariant":true,"planes":1,"truncate":"any"}',
}  # fmt: skip


def loaded_body(flag: int = 1) -> bytes:
    m: dict[str, Any] = LOADED
    body = text(m["architecture"]) + i32(10) + i32(20) + i32(30) + i32(576) + i32(49152) + i32(8192)
    body += u32(4) + u32(2048) + u32(256) + u8(flag) + u64(m["tensor_bytes"]) + u64(m["kv_bytes"])
    return body + text(m["recipe"]) + text(m["fingerprint"]) + text(m["certificate"])


def sampled(token: int, piece: str, **more: Any) -> dict[str, Any]:
    return {"token": token, "piece": piece, "is_end": False, "logprob": None, "top": []} | more


def frames() -> list[dict[str, Any]]:
    table: list[tuple[str, str, int, tuple[dict[str, Any], bytes]]] = [
        ("load a range", "load", 1, load()),
        ("load every layer, fast", "load", 2**64 - 1, load(layers=[0, -1], numerics=1, files=[FILE | {"path": ""}])),
        ("load a set of shards", "load", 3, load(files=[FILE | {"inode": n} for n in (9, 12, 8)])),
        ("open, greedy, without history", "open", 2, opening(1, [])),
        ("open with everything set", "open", 3, opening(
            2**64 - 1, [1, 49151, 0], temperature=0.7, top_k=40, top_p=0.95, min_p=0.05, repeat_penalty=1.1,
            repeat_last_n=ALL, presence_penalty=-0.5, frequency_penalty=0.25, seed=2**64 - 1, typical_p=0.9,
            logprobs=20, logit_bias=[[0, -100.0], [49151, 2.5]], grammar='root ::= "é" [0-9]+', start=2)),
        ("step of tokens", "step", 4, step(1, 0, [0, 10], False, tokens=[1, 2, 49151])),
        ("step of one token through the whole model", "step", 5, step(1, 2047, [0, 30], True, tokens=[7])),
        ("step of a residual", "step", 6, step(1, 3, [10, 20], False, residual=floats(1.0, -0.5, 98407.0, 1e-30))),
        ("step of a residual that is sampled", "step", 7, step(2**63, 0, [20, 30], True, residual=floats(0.25, 3.0))),
        ("truncate", "truncate", 8, ({"handle": 1, "keep": 17}, u64(1) + u32(17))),
        ("close", "close", 9, ({"handle": 2**64 - 1}, u64(2**64 - 1))),
        ("tokenize a text", "tokenize", 10, (
            {"text": "Grüße, 世界 🌍", "add_special": True, "parse_special": False, "segments": []},
            bytes([0, 1, 0, 0]) + text("Grüße, 世界 🌍"))),
        ("tokenize an empty text, special ones parsed", "tokenize", 11, (
            {"text": "", "add_special": False, "parse_special": True, "segments": []}, bytes([0, 0, 1, 0]) + text(""))),
        ("tokenize a chat", "tokenize", 12, (
            {"text": None, "add_special": False, "parse_special": False,
             "segments": [[True, "<|im_start|>"], [False, "<|im_end|>"]]},
            bytes([1, 0, 0, 0]) + u32(2) + u8(1) + text("<|im_start|>") + u8(0) + text("<|im_end|>"))),
        ("pieces", "pieces", 13, ({"ids": [5, 6]}, ids([5, 6]))),
        ("no pieces", "pieces", 14, ({"ids": []}, ids([]))),
        ("fork", "fork", 15, fork(2, 1, 2047, [7, 8], start=2048, temperature=1.0, logprobs=0)),
        ("fork without a history", "fork", 16, fork(2**64 - 1, 2**63, 0, [])),
        ("hello", "hello", 0, ({"version": 2, "engine": "llama.cpp 0c1e57098"}, u32(2) + text("llama.cpp 0c1e57098"))),
        ("loaded", "loaded", 1, (LOADED, loaded_body())),
        ("opened", "opened", 2, ({}, b"")),
        ("stepped, a residual", "stepped", 6, (
            {"compute_ns": 1_234_567, "residual": floats(2.0, -1.0, 0.5, 0.0), "sampled": None},
            u64(1_234_567) + bytes([1, 0, 0, 0]) + u32(4) + bytes.fromhex(floats(2.0, -1.0, 0.5, 0.0)))),
        ("stepped, half a character sampled", "stepped", 7, (
            {"compute_ns": 2**64 - 1, "residual": "", "sampled": sampled(49151, "f09f8c")},
            u64(2**64 - 1) + bytes([2, 0, 0, 0]) + i32(49151) + bytes([0, 0, 0, 0]) + text(b"\xf0\x9f\x8c"))),
        ("stepped, the end sampled", "stepped", 8, (
            {"compute_ns": 0, "residual": "", "sampled": sampled(2, "", is_end=True)},
            u64(0) + bytes([2, 0, 0, 0]) + i32(2) + bytes([1, 0, 0, 0]) + text(b""))),
        ("stepped, with the chosen one's log-probability", "stepped", 9, (
            {"compute_ns": 1, "residual": "", "sampled": sampled(2, "61", logprob=-0.5)},
            u64(1) + bytes([2, 0, 0, 0]) + i32(2) + bytes([0, 1, 0, 0]) + text("a") + f64(-0.5) + u32(0))),
        ("stepped, with the likeliest", "stepped", 10, (
            {"compute_ns": 1, "residual": "",
             "sampled": sampled(2, "61", logprob=-1.5, top=[[7, -0.25, "c3"], [3, -1.5, ""]])},
            u64(1) + bytes([2, 0, 0, 0]) + i32(2) + bytes([0, 1, 0, 0]) + text("a") + f64(-1.5) + u32(2)
            + i32(7) + f64(-0.25) + text(b"\xc3") + i32(3) + f64(-1.5) + text(""))),
        ("stepped, nothing asked of the tail", "stepped", 9, (
            {"compute_ns": 5, "residual": "", "sampled": None}, u64(5) + bytes([0, 0, 0, 0]))),
        ("truncated", "truncated", 8, ({}, b"")),
        ("closed", "closed", 9, ({}, b"")),
        ("forked", "forked", 15, ({}, b"")),
        ("tokens", "tokens", 10, ({"ids": [1, 2, 3]}, ids([1, 2, 3]))),
        ("a piece that is no UTF-8, an empty one", "piece_list", 13, (
            {"pieces": ["ff", ""]}, u32(2) + text(b"\xff") + text(b""))),
        ("describe chat", "describe_chat", 15, ({}, b"")),
        ("chat facts", "chat_facts", 15, (
            {"source": "{{ bos_token }}", "bos": "3c733e", "eos": "", "controls": ["3c733e"]},
            text("{{ bos_token }}") + text("<s>") + text("") + u32(1) + text("<s>"))),
        ("error", "error", 4, (
            {"code": "cache_miss", "message": "it ends at 3"}, text("cache_miss") + text("it ends at 3"))),
    ]  # fmt: skip
    return [
        {"name": name, "kind": kind, "id": number, "message": m, "hex": frame(kind, number, body)}
        for name, kind, number, (m, body) in table
    ]


def refused() -> list[dict[str, Any]]:
    """Frames whose header is sound and whose body is not: bad_frame, and the next frame can be read."""
    one = step_start(1, 0, [0, 10], 0, 0)
    table: list[tuple[str, str | int, bytes]] = [
        ("unknown kind 0", 0, b""),
        ("unknown kind 127", 127, u64(1)),
        ("unknown kind 65535", 0xFFFF, b""),
        ("load: empty body", "load", b""),
        ("load: path longer than the body", "load", u32(1 << 31) + b"/proc"),
        ("load: path is no UTF-8", "load", load()[1].replace(b"/proc", b"/pr\xffc")),
        ("load: no file", "load", load(files=[])[1]),
        ("load: ends within numerics", "load", load()[1][:-1]),
        ("load: a byte too many", "load", load()[1] + b"\0"),
        ("load: unknown numerics", "load", load(numerics=2)[1]),
        ("load: no sessions", "load", load(n_sessions=0)[1]),
        ("load: 257 sessions", "load", load(n_sessions=257)[1]),
        ("load: no context", "load", load(n_ctx=0)[1]),
        ("load: context over 2^24", "load", load(n_ctx=(1 << 24) + 1)[1]),
        ("load: steps over 2^16", "load", load(max_step=(1 << 16) + 1)[1]),
        ("load: no threads", "load", load(n_threads=0)[1]),
        ("open: count of 2^32 - 1", "open", opening(1, [])[1][:-4] + u32(ALL)),
        ("open: count beyond the body by one", "open", opening(1, [])[1][:-4] + u32(3) + i32(1) + i32(2)),
        ("open: count of 2^30, whose bytes wrap 32 bits", "open", opening(1, [])[1][:-4] + u32(1 << 30)),
        ("open: negative temperature", "open", opening(1, [], temperature=-0.1)[1]),
        ("open: temperature is NaN", "open", opening(1, [], temperature=math.nan)[1]),
        ("open: temperature is infinite", "open", opening(1, [], temperature=math.inf)[1]),
        ("open: top_p is 0", "open", opening(1, [], top_p=0.0)[1]),
        ("open: top_p over 1", "open", opening(1, [], top_p=1.01)[1]),
        ("open: min_p over 1", "open", opening(1, [], min_p=1.5)[1]),
        ("open: repeat_penalty is 0", "open", opening(1, [], repeat_penalty=0.0)[1]),
        ("open: presence_penalty is NaN", "open", opening(1, [], presence_penalty=math.nan)[1]),
        ("open: frequency_penalty is infinite", "open", opening(1, [], frequency_penalty=-math.inf)[1]),
        ("open: typical_p is 0", "open", opening(1, [], typical_p=0.0)[1]),
        ("open: 21 log-probabilities", "open", opening(1, [], logprobs=21)[1]),
        ("open: a bias that is NaN", "open", opening(1, [], logit_bias=[[1, math.nan]])[1]),
        ("open: a bias of no token", "open", opening(1, [], logit_bias=[[-1, 0.0]])[1]),
        ("open: biases out of order", "open", opening(1, [], logit_bias=[[2, 0.0], [1, 0.0]])[1]),
        ("open: two biases of one token", "open", opening(1, [], logit_bias=[[2, 0.0], [2, 1.0]])[1]),
        ("open: 1025 biases", "open", opening(1, [], logit_bias=[[i, 1.0] for i in range(1025)])[1]),
        ("fork: negative temperature", "fork", fork(2, 1, 3, [], temperature=-0.1)[1]),
        ("fork: short", "fork", fork(2, 1, 3, [])[1][:-1]),
        ("step: ends within the fixed fields", "step", one[:-1]),
        ("step: no tokens", "step", one + u32(0)),
        ("step: no residual", "step", step_start(1, 0, [10, 20], 0, 1) + u32(0)),
        ("step: count of 2^32 - 1", "step", one + u32(ALL) + i32(1)),
        ("step: keep is used", "step", step_start(1, 0, [0, 10], 0, 0, keep=5) + ids([1])),
        ("step: reserved is set", "step", step_start(1, 0, [0, 10], 0, 0, z=1) + ids([1])),
        ("step: sample is 2", "step", step_start(1, 0, [0, 10], 2, 0) + ids([1])),
        ("step: unknown input", "step", step_start(1, 0, [0, 10], 0, 2) + ids([1])),
        ("step: a byte too many", "step", one + ids([1]) + b"\0"),
        ("truncate: short", "truncate", u64(1) + b"\0\0\0"),
        ("close: empty", "close", b""),
        ("close: a byte too many", "close", u64(1) + b"\0"),
        ("tokenize: flag is 2", "tokenize", bytes([0, 2, 0, 0]) + text("a")),
        ("tokenize: reserved is set", "tokenize", bytes([0, 0, 0, 1]) + text("a")),
        ("tokenize: overlong UTF-8", "tokenize", bytes(4) + text(b"\xc0\xaf")),
        ("tokenize: surrogate", "tokenize", bytes(4) + text(b"\xed\xa0\x80")),
        ("tokenize: half a character", "tokenize", bytes(4) + text(b"a\xf0\x9f\x8c")),
        ("tokenize: beyond Unicode", "tokenize", bytes(4) + text(b"\xf4\x90\x80\x80")),
        ("tokenize: lone continuation", "tokenize", bytes(4) + text(b"\x80")),
        ("tokenize: a chat without text", "tokenize", bytes([1, 0, 0, 0]) + u32(0)),
        ("tokenize: flags in a chat", "tokenize", bytes([1, 1, 0, 0]) + u32(1) + u8(1) + text("a")),
        ("tokenize: whose a segment is, is 2", "tokenize", bytes([1, 0, 0, 0]) + u32(1) + u8(2) + text("a")),
        ("tokenize: segments beyond the body", "tokenize", bytes([1, 0, 0, 0]) + u32(2) + u8(1) + text("a")),
        ("describe_chat: not empty", "describe_chat", b"\0"),
        ("pieces: count of 2^30", "pieces", u32(1 << 30)),
        ("pieces: 4097 ids", "pieces", ids([1] * 4097)),
        ("hello: short", "hello", u32(1)[:3]),
        ("loaded: flag is 2", "loaded", loaded_body(2)),
        ("opened: not empty", "opened", b"\0"),
        ("stepped: unknown output", "stepped", u64(0) + bytes([3, 0, 0, 0])),
        ("stepped: reserved is set", "stepped", u64(0) + bytes([0, 0, 1, 0])),
        ("stepped: empty residual", "stepped", u64(0) + bytes([1, 0, 0, 0]) + u32(0)),
        ("stepped: residual beyond the body", "stepped", u64(0) + bytes([1, 0, 0, 0]) + u32(2) + bytes(4)),
        ("stepped: is_end is 2", "stepped", u64(0) + bytes([2, 0, 0, 0]) + i32(1) + bytes([2, 0, 0, 0]) + text("")),
        (
            "stepped: a log-probability over 0",
            "stepped",
            u64(0) + bytes([2, 0, 0, 0]) + i32(1) + bytes([0, 1, 0, 0]) + text("") + f64(0.1) + u32(0),
        ),
        (
            "stepped: a log-probability that is infinite",
            "stepped",
            u64(0) + bytes([2, 0, 0, 0]) + i32(1) + bytes([0, 1, 0, 0]) + text("") + f64(-math.inf) + u32(0),
        ),
        (
            "stepped: 21 likeliest",
            "stepped",
            u64(0)
            + bytes([2, 0, 0, 0])
            + i32(1)
            + bytes([0, 1, 0, 0])
            + text("")
            + f64(-1.0)
            + u32(21)
            + 21 * (i32(1) + f64(-1.0) + text("")),
        ),
        ("stepped: nothing, and more", "stepped", u64(0) + bytes([0, 0, 0, 0]) + u32(0)),
        ("piece_list: a piece beyond the body", "piece_list", u32(1) + u32(2) + b"a"),
        ("error: code is no UTF-8", "error", text(b"\xff") + text("")),
    ]
    return [
        {"name": name, "side": side(kind), "hex": frame(kind, 1, body)} for name, kind, body in table
    ]  # fmt: skip


def side(kind: str | int) -> str:
    return "reply" if isinstance(kind, str) and KINDS[kind] >= 0x80 else "request"


def lost() -> list[dict[str, Any]]:
    """Streams in which framing is lost, with the bound that a reader has. The error comes at `at` bytes or the end."""
    sound = frame("close", 1, u64(1))
    return [
        {"name": "reserved is set", "bound": 65536, "hex": "080000000500010001000000000000000100000000000000"},
        {"name": "reserved is set in its high byte", "bound": 65536, "hex": "00000000050000800100000000000000"},
        {"name": "a body over the bound by one", "bound": 65536, "hex": "01000100050000000100000000000000"},
        {"name": "a body of 2^32 - 1", "bound": 1 << 30, "hex": "ffffffff050000000100000000000000"},
        {"name": "text in place of a frame", "bound": 65536, "hex": b"Segmentation fault\n".hex()},
        {"name": "after a sound frame", "bound": 65536, "hex": sound + "00000000050001000100000000000000"},
    ]


# ---- sampling


def philox(c: list[int], k: list[int]) -> list[int]:
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & ALL, (a >> 32) ^ c[3] ^ k[1], a & ALL]
        k = [(k[0] + 0x9E3779B9) & ALL, (k[1] + 0xBB67AE85) & ALL]
    return c


def draw53(seed: int, position: int) -> int:
    x = philox([position & ALL, position >> 32, 0, 0], [seed & ALL, seed >> 32])
    return (x[1] << 32 | x[0]) >> 11


def choose(logits: list[float], history: list[int], s: dict[str, Any], position: int) -> int:
    """The reference: everything sorted, nothing clever."""
    values = list(logits)
    for token, bias in s["logit_bias"]:
        values[token] += bias
    window = history[max(0, len(history) - s["repeat_last_n"]) :]
    for token in set(window):
        value = values[token]
        value = value / s["repeat_penalty"] if value > 0 else value * s["repeat_penalty"]
        values[token] = value - (s["presence_penalty"] + window.count(token) * s["frequency_penalty"])
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    best = values[order[0]]
    if s["temperature"] == 0:
        return order[0]
    kept = order[: s["top_k"]] if s["top_k"] else order
    if s["typical_p"] < 1:
        total = math.fsum(math.exp(values[i] - best) for i in kept)
        surprise = {i: math.log(total) - (values[i] - best) for i in kept}
        expected = math.fsum(math.exp(-surprise[i]) * surprise[i] for i in kept)
        near = sorted(kept, key=lambda i: (abs(surprise[i] - expected), -values[i], i))
        mass, kept = 0.0, []
        for i in near:
            if kept and mass >= s["typical_p"] * total:
                break
            kept.append(i)
            mass += math.exp(values[i] - best)
        kept.sort(key=lambda i: (-values[i], i))
        best = values[kept[0]]
    if s["top_p"] < 1:
        total = math.fsum(math.exp(values[i] - best) for i in kept)
        mass, count = 0.0, 0
        while count < len(kept) and (count == 0 or mass < s["top_p"] * total):
            mass += math.exp(values[kept[count]] - best)
            count += 1
        kept = kept[:count]
    kept = sorted(i for i in kept if math.exp(values[i] - best) >= s["min_p"])
    weights = [math.exp((values[i] - best) / s["temperature"]) for i in kept]
    target, total = draw53(s["seed"], position) / 2**53 * sum(weights), 0.0
    for i, weight in zip(kept, weights, strict=True):
        total += weight
        if total > target:
            return i
    raise AssertionError("the running sum ends at the total")


def samples() -> list[dict[str, Any]]:
    flat, hill = [0.0] * 8, [0.5, 2.0, -1.0, 2.0, 1.5, -3.0, 0.0, 1.0]
    long = [math.floor(8 * math.sin(i * i)) / 4 for i in range(700)]
    cases: list[tuple[str, list[float], list[int], dict[str, Any]]] = [
        ("greedy, lowest id among equals", hill, [], {}),
        ("greedy, everything equal", flat, [], {}),
        ("greedy ignores the seed", hill, [], {"seed": 99}),
        ("greedy, repeated tokens penalised", hill, [1, 3, 3], {"repeat_penalty": 1.5}),
        ("a negative logit is penalised away from 0", [-1.0, -1.25], [0], {"repeat_penalty": 1.5}),
        ("only the window counts", hill, [1, 3, 6], {"repeat_penalty": 8.0, "repeat_last_n": 1}),
        ("no window", hill, [1, 3, 6], {"repeat_penalty": 8.0, "repeat_last_n": 0}),
        ("the whole history", hill, [1] + [6] * 99, {"presence_penalty": 1.75, "repeat_last_n": ALL}),
        ("frequency counts", hill, [1, 3, 3], {"frequency_penalty": 0.5}),
        ("presence does not", hill, [1, 3, 3], {"presence_penalty": 0.25}),
        ("tempered", hill, [], {"temperature": 1.0, "seed": 1}),
        ("cold", hill, [], {"temperature": 0.01, "seed": 2}),
        ("hot", hill, [], {"temperature": 100.0, "seed": 3}),
        ("top_k 1 is greedy", hill, [], {"temperature": 5.0, "top_k": 1, "seed": 4}),
        ("top_k 3", hill, [], {"temperature": 5.0, "top_k": 3, "seed": 5}),
        ("top_k over the vocabulary", hill, [], {"temperature": 5.0, "top_k": 100, "seed": 6}),
        ("top_p of nearly nothing", hill, [], {"temperature": 5.0, "top_p": 1e-9, "seed": 7}),
        ("top_p", hill, [], {"temperature": 5.0, "top_p": 0.7, "seed": 8}),
        ("top_p after top_k", hill, [], {"temperature": 5.0, "top_k": 4, "top_p": 0.7, "seed": 9}),
        ("min_p", hill, [], {"temperature": 5.0, "min_p": 0.4, "seed": 10}),
        ("min_p 1 keeps the best", hill, [], {"temperature": 5.0, "min_p": 1.0, "seed": 11}),
        ("typical_p", hill, [], {"temperature": 5.0, "typical_p": 0.6, "seed": 14}),
        ("typical_p leaves the best out", [4.0] + [1.0] * 39, [], {"temperature": 5.0, "typical_p": 0.2, "seed": 15}),
        ("what left is not drawn", [14.0] + [1.0] * 39, [], {"temperature": 0.01, "typical_p": 0.2, "seed": 2}),
        ("typical_p before top_p", hill, [], {"temperature": 5.0, "typical_p": 0.8, "top_p": 0.6, "seed": 16}),
        ("a bias", hill, [], {"logit_bias": [[6, 3.0]]}),
        ("a bias against the best", hill, [], {
            "temperature": 1.0, "logit_bias": [[1, -100.0], [3, -100.0]], "seed": 17}),
        ("a bias before penalties", hill, [6], {"logit_bias": [[6, 2.5]], "repeat_penalty": 2.0}),
        ("all filters", long, [3, 5, 8] * 30, {
            "temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.05, "repeat_penalty": 1.1,
            "presence_penalty": 0.25, "frequency_penalty": 0.125, "seed": 2**64 - 1}),
        ("a nucleus wider than one sorted piece", long, [], {"temperature": 1.5, "top_p": 0.99, "seed": 12}),
        ("nothing filtered, long", long, [], {"temperature": 1.0, "seed": 13}),
    ]  # fmt: skip
    return [
        {
            "name": name, "logits": logits, "history": history, "sampling": NEUTRAL | changes,
            "tokens": [[position, choose(logits, history, NEUTRAL | changes, position)]
                       for position in (0, 1, 2, 3, 1000, 2**32, 2**40 + 1)],
        }
        for name, logits, history, changes in cases
    ]  # fmt: skip


def logprobs() -> list[dict[str, Any]]:
    """To twelve digits: the last bits of exp and log are nobody's promise."""
    cases = [([0.5, 2.0, -1.0, 2.0, 1.5], 2, 3), ([0.0] * 4, 3, 9), ([90.0, -90.0], 1, 0)]
    rows = []
    for logits, token, count in cases:
        best = max(logits)
        total = best + math.log(math.fsum(math.exp(x - best) for x in logits))
        order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:count]
        told = [[i, float(f"{min(logits[i] - total, 0.0):.12g}")] for i in (token, *order)]
        rows.append({"logits": logits, "token": token, "count": count, "told": told})
    return rows


def document() -> dict[str, Any]:
    return {
        "what": "frames between node and worker, and sampling; see protocol/05-worker.md",
        "provenance": "python tests/wire/worker_vectors.py; philox: the known answers published with Random123",
        "version": 2,
        "frames": frames(),
        "refused": refused(),
        "lost": lost(),
        "philox": [
            {"counter": [0] * 4, "key": [0] * 2, "output": [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]},
            {"counter": [ALL] * 4, "key": [ALL] * 2, "output": [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]},
            {"counter": [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], "key": [0xA4093822, 0x299F31D0],
             "output": [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]},
        ],
        "uniform": [
            {"seed": seed, "position": position, "numerator_of_2_53": draw53(seed, position)}
            for seed in (0, 1, 2**32, 2**64 - 1) for position in (0, 1, 2**32, 2**64 - 1)
        ],
        "sample": samples(),
        "logprobs": logprobs(),
    }  # fmt: skip


def render() -> str:
    """A line an entry, so that a difference can be read."""
    lines = []
    for key, value in document().items():
        if isinstance(value, list):
            entries = ",\n    ".join(json.dumps(entry, ensure_ascii=False) for entry in value)
            lines.append(f"  {json.dumps(key)}: [\n    {entries}\n  ]")
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(VECTORS.read_text() != render())
    VECTORS.write_text(render())
