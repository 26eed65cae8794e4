"""Every architecture's tensors are held against its table; one without a table against what is the same in all."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import pytest

from fixtures.make_fixtures import Meta, Tiny, encode, metadata, tensors
from meshnode.artifact import architectures
from meshnode.artifact.gguf import Summary
from meshnode.artifact.identity import describe, open_artifact
from meshnode.artifact.shapes import FAMILIES
from meshnode.errors import MeshError

from .families import family_bytes


def described(folder: Path, body: bytes) -> Summary:
    path = folder / "x.gguf"
    path.write_bytes(body)
    with open_artifact(path) as artifact:
        return describe(artifact)


def test_a_table_is_only_of_what_is_served() -> None:
    assert FAMILIES.keys() <= architectures.ARCHITECTURES.keys()


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_tensor_that_the_architecture_lacks_or_has_otherwise(tmp_path: Path, architecture: str) -> None:
    sound = family_bytes(architecture)
    assert described(tmp_path, sound).n_layer == 2
    row = sound.index(b"blk.1.attn_k.weight")
    with pytest.raises(MeshError) as caught:
        described(tmp_path, sound[:row] + b"blk.1.attn_x.weight" + sound[row + 19 :])
    assert caught.value.message == "tensor blk.1.attn_k.weight is missing"
    with pytest.raises(MeshError) as caught:
        described(tmp_path, sound[:row] + b"blk.2.attn_k.weight" + sound[row + 19 :])
    assert caught.value.code == "bad_gguf"
    dims = row + 19 + 4
    with pytest.raises(MeshError) as caught:
        described(tmp_path, sound[:dims] + sound[dims + 8 : dims + 16] + sound[dims : dims + 8] + sound[dims + 16 :])
    assert "blk.1.attn_k.weight has the shape [32, 64] instead of [64, 32]" in caught.value.message


@pytest.fixture
def novel(monkeypatch: pytest.MonkeyPatch) -> None:
    """An architecture that is served, and whose tensors nobody wrote down."""
    more = {**architectures.ARCHITECTURES, "novel": architectures.ARCHITECTURES["llama"]}
    monkeypatch.setattr(architectures, "ARCHITECTURES", MappingProxyType(more))


def novel_bytes(*, lacks: str = "\0", calls: tuple[str, str] = ("\0", ""), **changed: int) -> bytes:
    shape = Tiny(n_layer=2)
    meta = [m._replace(key=m.key.replace("llama.", "novel.")) for m in metadata(shape)]
    meta[0] = Meta("general.architecture", "str", "novel")
    meta.append(Meta("novel.pooling_type", "u32", 0))
    meta = [m._replace(value=changed.get(m.key.rpartition(".")[2], m.value)) for m in meta]
    blobs = [blob for blob in tensors(shape) if lacks not in blob.name]
    return encode(meta, [blob._replace(name=blob.name.replace(*calls)) for blob in blobs])


@pytest.mark.usefixtures("novel")
def test_without_a_table_what_is_the_same_in_all_is_checked(tmp_path: Path) -> None:
    summary = described(tmp_path, novel_bytes(calls=("attn_q", "attn_other")))
    assert (summary.architecture, summary.n_layer, summary.tied) == ("novel", 2, True)
    assert described(tmp_path, novel_bytes(pooling_type=(1 << 32) - 1)) == summary  # how the engine writes "none"
    for body, fault in (
        (novel_bytes(pooling_type=1), "pooling_type is set"),
        (novel_bytes(lacks="token_embd"), "token_embd.weight is missing"),
        (novel_bytes(lacks="blk.1."), "layer 1 has no tensors"),
        (novel_bytes(calls=("blk.1.", "blk.2.")), "there are 2 layers"),
        (novel_bytes(block_count=1), "there are 1 layers"),
        (novel_bytes(embedding_length=32, dimension_count=8), "shape [64, 320] instead of [32, 320]"),
        (novel_bytes(block_count=0), "block_count is 0"),
        (novel_bytes(context_length=0), "context_length is 0"),
    ):
        with pytest.raises(MeshError) as caught:
            described(tmp_path, body)
        assert fault in caught.value.message
        assert caught.value.code == "bad_gguf"


Metadata = dict[str, int | list[int]]


def with_keys(architecture: str, changed: Metadata) -> bytes:
    """A model of an architecture without a table, with these keys: a whole number, or one for each of two layers."""
    shape = Tiny(n_layer=2)
    meta = [m._replace(key=m.key.replace("llama.", f"{architecture}.")) for m in metadata(shape)]
    meta[0] = Meta("general.architecture", "str", architecture)
    changed = {f"{architecture}.{key}": value for key, value in changed.items()}
    meta = [m for m in meta if m.key not in changed]
    for key, value in changed.items():
        meta.append(Meta(key, "[u32]" if isinstance(value, list) else "u32", value))
    return encode(meta, list(tensors(shape)))


def routed(experts: int, used: int | list[int], groups: int = 0, groups_used: int = 0) -> Metadata:
    found: Metadata = {"expert_count": experts, "expert_used_count": used}
    return found | ({"expert_group_count": groups, "expert_group_used_count": groups_used} if groups else {})


@pytest.mark.parametrize(
    ("architecture", "changed", "fault"),
    [
        ("qwen3moe", routed(1025, 8), "expert_count is 1025"),
        ("qwen3moe", routed(8, 9), "expert_used_count is 9"),
        ("qwen3moe", routed(8, [2, 9]), "expert_used_count is 9 in one layer"),
        ("qwen3moe", routed(8, [2]), "expert_used_count has 1 values for 2 layers"),
        ("qwen3moe", routed(8, 0), "expert_used_count is 0 of 8 experts"),
        ("qwen3moe", {"expert_count": 8}, "expert_used_count is 0 of 8 experts"),
        ("qwen3moe", {"expert_used_count": 8}, "expert_used_count is 8"),
        ("deepseek2", routed(8, 2, 3, 1), "expert_count 8 is no multiple of expert_group_count 3"),
        ("deepseek2", routed(8, 2, 8, 4), "expert_group_count is 8"),
        ("deepseek2", routed(8, 2, 4, 4), "expert_group_used_count is 4"),
        ("deepseek2", routed(8, 2, 4, 0), "expert_group_used_count is 0"),
        ("deepseek2", routed(8, 2) | {"expert_group_count": 4}, "expert_group_used_count is missing for 4 groups"),
        ("gpt-oss", {"attention.head_count": 0}, "attention.head_count is 0 in every layer"),
        ("nemotron_h", {"attention.head_count": [0, 0]}, "attention.head_count is 0 in every layer"),
        ("gpt-oss", {"rope.dimension_count": 7}, "rope.dimension_count is 7"),
        ("gpt-oss", {"rope.dimension_count": 66, "attention.key_length": 64}, "rope.dimension_count is 66"),
        ("jamba", {"ssm.state_size": 0}, "ssm.state_size is 0"),
    ],
)
def test_what_the_engine_would_abort_on_is_refused(
    tmp_path: Path, architecture: str, changed: Metadata, fault: str
) -> None:
    with pytest.raises(MeshError) as caught:
        described(tmp_path, with_keys(architecture, changed))
    assert (caught.value.code, f"{architecture}.{fault}" in caught.value.message) == ("bad_gguf", True), caught.value


@pytest.mark.parametrize(
    ("architecture", "changed"),
    [
        ("deepseek2", routed(256, 8, 8, 4) | {"attention.key_length": 576, "attention.key_length_mla": 192}),
        ("deepseek2", routed(64, 6, 1, 1)),
        ("hunyuan-dense", {"expert_count": 1}),
        ("qwen3moe", routed(128, [8, 0])),
        ("gpt2", {"rope.dimension_count": 0}),
        ("mamba", {"attention.head_count": 0, "ssm.group_count": 1}),
        ("nemotron_h", {"attention.head_count": [0, 4], "rope.dimension_count": 78}),
        ("granitehybrid", {"attention.head_count_kv": [0, 2]}),
    ],
)
def test_what_sound_models_say_passes(tmp_path: Path, architecture: str, changed: Metadata) -> None:
    assert described(tmp_path, with_keys(architecture, changed)).architecture == architecture
