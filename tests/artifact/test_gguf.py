"""Validation: what no model can be is refused by name of its fault; what is sound is summarised."""

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fixtures.make_fixtures import Blob, Meta, Tiny, encode, metadata, model_bytes, tensors
from meshnode.artifact.gguf import Summary, validate
from meshnode.artifact.header import Header, read_header
from meshnode.artifact.identity import describe, open_artifact
from meshnode.errors import MeshError


def header_of(path: Path, body: bytes) -> Header:
    path.write_bytes(body)
    with open_artifact(path) as artifact:
        return read_header(artifact.fd, artifact.size)


def summary_of(path: Path, body: bytes) -> Summary:
    return validate(header_of(path, body))


def refusal(path: Path, body: bytes) -> MeshError:
    with pytest.raises(MeshError) as caught:
        summary_of(path, body)
    assert str(path.parent) not in caught.value.message
    return caught.value


# --- what is sound -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("tied", [True, False])
def test_sound_model_is_summarised(tmp_path: Path, kind: str, tied: bool) -> None:
    tiny = Tiny(type=kind, tied=tied, n_layer=3, name="Tiny One")
    body = model_bytes(tiny)
    summary = summary_of(tmp_path / "x.gguf", body)
    stored = {blob.name: len(blob.data) for blob in tensors(tiny)}
    head = "token_embd.weight" if tied else "output.weight"
    assert summary == Summary(
        architecture="llama",
        name="Tiny One",
        n_layer=3,
        n_embd=64,
        n_vocab=320,
        n_ctx_train=256,
        tied=tied,
        layer_bytes=tuple(sum(n for name, n in stored.items() if name.startswith(f"blk.{i}.")) for i in range(3)),
        embedding_bytes=stored["token_embd.weight"],
        head_bytes=stored["output_norm.weight"] + stored[head],
        has_template=True,
        file_bytes=len(body),
    )
    assert summary.tensor_bytes == sum(stored.values())


def test_version_2_other_alignments_trailing_bytes_and_unknown_keys_are_sound(tmp_path: Path) -> None:
    tiny = Tiny(n_layer=1)
    extra = [Meta("general.alignment", "u32", 256), Meta("x.list", "[f64]", [1.0] * 2000), Meta("x.none", "[str]", [])]
    body = encode(metadata(tiny) + extra, list(tensors(tiny)), version=2, alignment=256) + b"junk"
    assert summary_of(tmp_path / "x.gguf", body).n_layer == 1


def test_absurd_context_is_never_passed_on(tmp_path: Path) -> None:
    body = edited(Tiny(n_layer=1), **{"llama.context_length": 2**32 - 1})
    assert summary_of(tmp_path / "x.gguf", body).n_ctx_train == 1 << 24


def test_layer_counts_and_heads_may_be_lists_of_equal_values(tmp_path: Path) -> None:
    tiny = Tiny(n_layer=2)
    meta = [replace_meta(m, "[u32]", [4, 4]) if m.key == "llama.attention.head_count" else m for m in metadata(tiny)]
    assert summary_of(tmp_path / "x.gguf", encode(meta, list(tensors(tiny)))).n_layer == 2


def test_model_of_experts_is_sound(tmp_path: Path) -> None:
    tiny = Tiny(n_layer=1, type="F32")
    meta = [*metadata(tiny), Meta("llama.expert_count", "u32", 2), Meta("llama.expert_used_count", "u32", 1)]
    blobs = []
    for blob in tensors(tiny):
        if blob.name.startswith("blk.0.ffn_") and "norm" not in blob.name:
            name = blob.name.replace(".weight", "_exps.weight")
            blob = Blob(name, (*blob.dims, 2), "F32", blob.data * 2)
        blobs.append(blob)
    blobs.append(Blob("blk.0.ffn_gate_inp.weight", (64, 2), "F32", bytes(64 * 2 * 4)))
    assert summary_of(tmp_path / "x.gguf", encode(meta, blobs)).n_layer == 1
    error = refusal(tmp_path / "y.gguf", encode(meta, blobs[:-1]))
    assert "ffn_gate_inp" in error.message


def byte_fallback(model: Tiny) -> tuple[list[Meta], list[str]]:
    """Metadata and tokens of a model whose tokenizer falls back to bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *(f"\u2581w{i}" for i in range(61))]
    changed = {
        "tokenizer.ggml.model": ("str", "llama"),
        "tokenizer.ggml.tokens": ("[str]", tokens),
        "tokenizer.ggml.token_type": ("[i32]", [2, 3, 3] + [6] * 256 + [1] * 61),
        "tokenizer.ggml.merges": ("[f32]", [0.0] * 320),
    }
    meta = [replace_meta(m, *changed.get(m.key, (m.type, m.value))) for m in metadata(model)]
    return [m._replace(key="tokenizer.ggml.scores") if m.key.endswith("merges") else m for m in meta], tokens


def test_tokenizer_that_falls_back_to_bytes_needs_all_of_them(tmp_path: Path) -> None:
    tiny = Tiny(n_layer=1)
    meta, tokens = byte_fallback(tiny)
    assert summary_of(tmp_path / "x.gguf", encode(meta, list(tensors(tiny)))).n_vocab == 320
    tokens[100] = "<0xff>"  # the engine looks for capitals
    assert "no token for some byte" in refusal(tmp_path / "x.gguf", encode(meta, list(tensors(tiny)))).message


@pytest.mark.parametrize(
    ("given", "shown"),
    [("Tiny", "Tiny"), ("/home/ann/models/secret/Tiny.gguf", "Tiny.gguf"), (r"C:\ann\Tiny", "Tiny"),
     ("a\nb\x1b[31m", "a?b?[31m"), ("  ", "llama model"), ("x" * 500, "x" * 128)],
)  # fmt: skip
def test_name_is_a_label_without_path_or_control(tmp_path: Path, given: str, shown: str) -> None:
    path = tmp_path / "file stem.gguf"
    path.write_bytes(edited(Tiny(n_layer=1), **{"general.name": given}))
    with open_artifact(path) as artifact:
        assert describe(artifact).name == shown


# --- what is not: the bytes ------------------------------------------------------------------------------------------


def patched(body: bytes, at: int, new: bytes) -> bytes:
    return body[:at] + new + body[at + len(new) :]


BYTES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "magic": (lambda b: b"GGML" + b[4:], "not a GGUF file"),
    "version 0": (lambda b: patched(b, 4, struct.pack("<I", 0)), "version 0"),
    "version 4": (lambda b: patched(b, 4, struct.pack("<I", 4)), "version 4"),
    "big-endian": (lambda b: patched(b, 4, struct.pack(">I", 3)), "big-endian"),
    "cut in the header": (lambda b: b[:20], "ends inside"),
    "cut in the metadata": (lambda b: b[:3000], "ends inside"),
    "last weight missing": (lambda b: b[: -(len(b) // 3)], "beyond the end of the file"),
    "tensors without end": (lambda b: patched(b, 8, struct.pack("<Q", 1 << 40)), "number of tensors"),
    "keys without end": (lambda b: patched(b, 16, struct.pack("<Q", 1 << 62)), "number of metadata keys"),
    "long key": (lambda b: patched(b, 24, struct.pack("<Q", 1 << 63)), "ends inside the key 0"),
    "junk without end": (lambda b: b + bytes((1 << 20) + 64), "after the last tensor"),
}


@pytest.mark.parametrize("kind", BYTES)
def test_spoiled_bytes_are_refused(tmp_path: Path, tiny_bytes: bytes, kind: str) -> None:
    spoil, fault = BYTES[kind]
    error = refusal(tmp_path / "x.gguf", spoil(tiny_bytes))
    assert (error.code, fault in error.message) == ("bad_gguf", True), error.message


def test_every_cut_is_refused(tmp_path: Path) -> None:
    tiny = Tiny(n_layer=1, n_vocab=260)
    body = model_bytes(tiny)
    end = header_of(tmp_path / "x.gguf", body).data_end
    for length in [*range(1, 9000, 61), end - 1]:
        assert refusal(tmp_path / "x.gguf", body[:length]).code == "bad_gguf"


# --- what is not: the metadata ---------------------------------------------------------------------------------------


def replace_meta(meta: Meta, kind: str, value: Any) -> Meta:
    return meta._replace(type=kind, value=value)


def edited(tiny: Tiny, *, drop: str = "", extra: tuple[Meta, ...] = (), **values: Any) -> bytes:
    """The model with other values; a Meta as value also replaces the type."""
    meta = []
    for m in metadata(tiny):
        value = values.pop(m.key, m.value)
        if m.key != drop:
            meta.append(value if isinstance(value, Meta) else m._replace(value=value))
    assert not values, f"no such key: {values}"
    return encode([*meta, *extra], list(tensors(tiny)))


def meta(key: str, kind: str, value: Any) -> dict[str, Any]:
    return {key: Meta(key, kind, value)}


METADATA: dict[str, tuple[dict[str, Any], str]] = {
    "key twice": ({"extra": (Meta("llama.block_count", "u32", 3),)}, "stands there twice"),
    "no architecture": ({"drop": "general.architecture"}, "architecture is missing"),
    "architecture a number": (meta("general.architecture", "u32", 7), "has the type u32"),
    "another model's name": ({"general.name": "My Phi-3"}, "not phi-3's"),
    "name a number": (meta("general.name", "u32", 7), "has the type u32"),
    "no layers": ({"llama.block_count": 0}, "block_count is 0"),
    "too many layers": ({"llama.block_count": 513}, "block_count is 513"),
    "layers too many": ({"llama.block_count": 2**32 - 1}, "block_count is"),
    "fewer layers than tensors": ({"llama.block_count": 1}, "there are 1 layers"),
    "more layers than tensors": ({"llama.block_count": 3}, "blk.2.attn_norm.weight is missing"),
    "layers of another type": (meta("llama.block_count", "u64", 2), "type u64"),
    "no heads": ({"llama.attention.head_count": 0}, "head_count is 0"),
    "heads not shared evenly": ({"llama.attention.head_count_kv": 3}, "no multiple"),
    "no context": ({"llama.context_length": 0}, "context_length is 0"),
    "odd rotation": ({"llama.rope.dimension_count": 15}, "15"),
    "half a head rotated": ({"llama.rope.dimension_count": 8}, "a head has 16"),
    "no epsilon": ({"drop": "llama.attention.layer_norm_rms_epsilon"}, "epsilon is missing"),
    "epsilon not a number": ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon is nan"),
    "negative epsilon": ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "epsilon is -1"),
    "no rotation": ({"llama.rope.freq_base": 0.0}, "freq_base is 0"),
    "unknown scaling": ({"extra": (Meta("llama.rope.scaling.type", "str", "magic"),)}, "magic"),
    "not causal": ({"extra": (Meta("llama.attention.causal", "bool", False),)}, "causal"),
    "wider heads": ({"extra": (Meta("llama.attention.key_length", "u32", 32),)}, "a head has 32"),
    "experts unused": ({"extra": (Meta("llama.expert_count", "u32", 4),)}, "expert_used_count"),
    "layers that differ": (meta("llama.feed_forward_length", "[u32]", [96, 64]), "differs between layers"),
    "list of wrong length": (meta("llama.feed_forward_length", "[u32]", [96]), "1 values for 2 layers"),
    "alignment 0": ({"extra": (Meta("general.alignment", "u32", 0),)}, "alignment is 0"),
    "alignment 3": ({"extra": (Meta("general.alignment", "u32", 3),)}, "alignment is 3"),
    "alignment 8": ({"extra": (Meta("general.alignment", "u32", 8),)}, "alignment is 8"),
    "alignment a text": ({"extra": (Meta("general.alignment", "str", "32"),)}, "type str"),
    "no tokenizer": ({"drop": "tokenizer.ggml.model"}, "model is missing"),
    "unknown tokenizer": ({"tokenizer.ggml.model": "bert"}, "'bert' is not supported"),
    "unknown splitter": ({"tokenizer.ggml.pre": "gpt-3"}, "does not know"),
    "no tokens": ({"drop": "tokenizer.ggml.tokens"}, "tokens is missing"),
    "empty tokens": (meta("tokenizer.ggml.tokens", "[str]", []), "tokens is empty"),
    "tokens are numbers": (meta("tokenizer.ggml.tokens", "[i32]", [1] * 320), "array of i32"),
    "more tokens than rows": (meta("tokenizer.ggml.tokens", "[str]", [f"t{i}" for i in range(321)]), "321 tokens"),
    "fewer tokens than rows": (meta("tokenizer.ggml.tokens", "[str]", [f"t{i}" for i in range(300)]), "[64, 320]"),
    "token twice": (meta("tokenizer.ggml.tokens", "[str]", ["a"] * 320), "holds a token twice"),
    "token twice up to a NUL": (
        meta("tokenizer.ggml.tokens", "[str]", ["a", "a\0b"] + [f"t{i}" for i in range(318)]), "holds a token twice"),
    "token no text": (meta("tokenizer.ggml.tokens", "[str]", [b"\xff"] + [f"t{i}" for i in range(319)]), "token 0"),
    "few types": (meta("tokenizer.ggml.token_type", "[i32]", [1] * 10), "10 entries for 320"),
    "types of wrong type": (meta("tokenizer.ggml.token_type", "[u32]", [1] * 320), "array of u32"),
    "byte that is none": (meta("tokenizer.ggml.token_type", "[i32]", [6] * 320), "said to be a byte"),
    "few scores": ({"extra": (Meta("tokenizer.ggml.scores", "[f32]", [0.0]),)}, "1 entries for 320"),
    "no merges": ({"drop": "tokenizer.ggml.merges"}, "merges is missing"),
    "end beyond the tokens": ({"tokenizer.ggml.eos_token_id": 70000}, "eos_token_id is 70000"),
    "end negative": (meta("tokenizer.ggml.eos_token_id", "i32", -1), "type i32"),
    "flag a number": (meta("tokenizer.ggml.add_bos_token", "u8", 1), "type u8"),
    "template a list": (meta("tokenizer.chat_template", "[str]", ["x"]), "type arr"),
    "very long text": ({"tokenizer.chat_template": "x" * ((1 << 20) + 1)}, "more than 1048576"),
}  # fmt: skip


@pytest.mark.parametrize("kind", METADATA)
def test_impossible_metadata_is_refused(tmp_path: Path, kind: str) -> None:
    change, fault = METADATA[kind]
    error = refusal(tmp_path / "x.gguf", edited(Tiny(n_layer=2), **change))
    assert (error.code, fault in error.message) == ("bad_gguf", True), error.message


def test_odd_head_is_refused(tmp_path: Path) -> None:
    body = model_bytes(Tiny(n_layer=1, n_embd=60, type="F32"))
    assert "even number" in refusal(tmp_path / "x.gguf", body).message


def test_unknown_architecture_is_refused_by_its_name(tmp_path: Path) -> None:
    error = refusal(tmp_path / "x.gguf", edited(Tiny(n_layer=2), **{"general.architecture": "nosuch"}))
    assert (error.code, "'nosuch'" in error.message) == ("unsupported_architecture", True)


def test_shard_alone_is_refused(tmp_path: Path) -> None:
    body = edited(Tiny(n_layer=2), extra=(Meta("split.count", "u16", 3),))
    assert refusal(tmp_path / "x.gguf", body).code == "bad_shards"


@pytest.mark.parametrize("element", [9, 13, 99])
def test_lists_of_lists_and_unknown_types_are_refused(tmp_path: Path, tiny_bytes: bytes, element: int) -> None:
    key = b"x.list"
    body = struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, element, 1) + bytes(64)
    error = refusal(tmp_path / "x.gguf", tiny_bytes[:24] + body + tiny_bytes[24:])
    assert f"array of type {element}" in error.message
    value = struct.pack("<Q", len(key)) + key + struct.pack("<I", 99)
    assert "unknown type 99" in refusal(tmp_path / "x.gguf", tiny_bytes[:24] + value + tiny_bytes[24:]).message


# --- what is not: the tensors ----------------------------------------------------------------------------------------


def with_tensors(tiny: Tiny, change: Callable[[list[Blob]], list[Blob]]) -> bytes:
    return encode(metadata(tiny), change(list(tensors(tiny))))


def on(tensor: str, **fields: Any) -> Callable[[list[Blob]], list[Blob]]:
    return lambda blobs: [b._replace(**fields) if b.name == tensor else b for b in blobs]


def without(name: str) -> Callable[[list[Blob]], list[Blob]]:
    return lambda blobs: [b for b in blobs if b.name != name]


Q = "blk.0.attn_q.weight"
TENSORS: dict[str, tuple[Callable[[list[Blob]], list[Blob]], str]] = {
    "none": (lambda blobs: [], "no tensors"),
    "layer incomplete": (without("blk.1.ffn_up.weight"), "blk.1.ffn_up.weight is missing"),
    "no norm": (without("output_norm.weight"), "output_norm.weight is missing"),
    "no embeddings": (without("token_embd.weight"), "token_embd.weight is missing"),
    "five dimensions": (on(Q, dims=(64, 64, 1, 1, 1)), "5 dimensions"),
    "no dimension": (on(Q, dims=()), "0 dimensions"),
    "empty dimension": (on(Q, dims=(0, 64)), "impossible shape"),
    "negative dimension": (on(Q, dims=(1 << 63, 64)), "impossible shape"),
    "overflowing dimensions": (on(Q, dims=(1 << 40, 1 << 40)), "impossible shape"),
    "partial block": (on(Q, dims=(63, 64)), "no multiple of Q8_0's 32"),
    "twice": (lambda blobs: [*blobs, blobs[0]], "stands there twice"),
    "unknown type": (on(Q, type=250), "unknown type 250"),
    "withdrawn type": (on(Q, type=4), "unknown type 4"),
    "smaller type": (on(Q, type="Q4_0"), "leaves a gap"),
    "larger type": (on(Q, type="F32"), "overlaps"),
    "whole-number weights": (on("blk.0.attn_norm.weight", type=26), "type I32"),
    "activation format": (
        lambda blobs: on(Q, type=9, data=bytes(64 * 64 // 32 * 36))(blobs), "type Q8_1"),
    "transposed": (on("blk.0.ffn_up.weight", dims=(96, 64)), "[96, 64] instead of [64, 96]"),
    "stranger": (lambda b: [*b, Blob("blk.0.extra.weight", (32,), "F32", bytes(128))], "belongs to no model"),
    "long name": (on(Q, name="q" * 64), "more than 63"),
}  # fmt: skip


@pytest.mark.parametrize("kind", TENSORS)
def test_impossible_tensors_are_refused(tmp_path: Path, kind: str) -> None:
    change, fault = TENSORS[kind]
    error = refusal(tmp_path / "x.gguf", with_tensors(Tiny(n_layer=2), change))
    assert (error.code, fault in error.message) == ("bad_gguf", True), error.message


@pytest.mark.parametrize(
    ("offset", "fault"),
    [(1 << 40, "beyond the end"), (2**64 - 32, "beyond the end"), (33, "no multiple"), (0, "overlaps")],
)
def test_tensor_at_an_impossible_offset_is_refused(tmp_path: Path, offset: int, fault: str) -> None:
    body = model_bytes(Tiny(n_layer=2))
    at = body.index(Q.encode()) + len(Q) + 4 + 16 + 4
    assert fault in refusal(tmp_path / "x.gguf", patched(body, at, struct.pack("<Q", offset))).message


def test_one_layer_and_the_most_layers_are_sound(tmp_path: Path) -> None:
    tiny = Tiny(n_layer=512, n_embd=32, n_ff=32, n_head=1, n_kv=1, n_vocab=259)
    assert summary_of(tmp_path / "x.gguf", model_bytes(tiny)).n_layer == 512
    assert summary_of(tmp_path / "y.gguf", model_bytes(replace(tiny, n_layer=1))).n_layer == 1
