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
    meta = [m._replace(value=changed.pop(m.key.rpartition(".")[2], m.value)) for m in meta]
    meta += [Meta("novel." + key, "u32", value) for key, value in changed.items()]
    blobs = [blob for blob in tensors(shape) if lacks not in blob.name]
    return encode(meta, [blob._replace(name=blob.name.replace(*calls)) for blob in blobs])


@pytest.mark.usefixtures("novel")
def test_without_a_table_what_is_the_same_in_all_is_checked(tmp_path: Path) -> None:
    summary = described(tmp_path, novel_bytes(calls=("attn_q", "attn_other")))
    assert (summary.architecture, summary.n_layer, summary.tied) == ("novel", 2, True)
    assert described(tmp_path, novel_bytes(pooling_type=(1 << 32) - 1)) == summary  # how the engine writes "none"
    described(tmp_path, novel_bytes(expert_count=8, expert_used_count=2, expert_group_count=4, expert_group_used_count=2))
    for body, fault in (
        (novel_bytes(pooling_type=1), "pooling_type is set"),
        (novel_bytes(lacks="token_embd"), "token_embd.weight is missing"),
        (novel_bytes(lacks="blk.1."), "layer 1 has no tensors"),
        (novel_bytes(calls=("blk.1.", "blk.2.")), "there are 2 layers"),
        (novel_bytes(block_count=1), "there are 1 layers"),
        (novel_bytes(embedding_length=32), "shape [64, 320] instead of [32, 320]"),
        (novel_bytes(block_count=0), "block_count is 0"),
        (novel_bytes(context_length=0), "context_length is 0"),
        (novel_bytes(expert_count=2_000_000), "expert_count is 2000000"),
        (novel_bytes(expert_count=4, expert_used_count=5), "expert_used_count is 5"),
        (novel_bytes(expert_count=4, expert_used_count=0), "expert_used_count is 0"),
        (novel_bytes(expert_count=8, expert_used_count=2, expert_group_count=3), "no multiple of the 3 groups"),
        (novel_bytes(expert_count=8, expert_group_count=4, expert_group_used_count=4), "expert_group_used_count is 4"),
    ):
        with pytest.raises(MeshError) as caught:
            described(tmp_path, body)
        assert fault in caught.value.message
        assert caught.value.code == "bad_gguf"
