"""No random sound file is refused; after one random change a file is refused, or still tells of a whole model."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fixtures.make_fixtures import Blob, Meta, Tiny, encode, metadata, model_bytes, tensors
from meshnode.artifact.gguf import Summary
from meshnode.artifact.header import read_header
from meshnode.artifact.identity import describe, open_artifact
from meshnode.artifact.shapes import shapes
from meshnode.errors import MeshError

SOUND = model_bytes(Tiny(n_layer=2))

settings.register_profile("artifact", deadline=None, max_examples=80, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "x.gguf"


@st.composite
def models(draw: st.DrawFn) -> Tiny:
    kind = draw(st.sampled_from(["F32", "F16", "Q8_0", "Q4_0"]))
    n_head = draw(st.sampled_from([1, 2, 4]))
    head = draw(st.sampled_from([8, 32, 64])) if kind.startswith("F") else 32
    return Tiny(
        seed=draw(st.integers(0, 99)),
        n_layer=draw(st.integers(1, 3)),
        n_embd=n_head * head,
        n_ff=draw(st.sampled_from([32, 64, 96])),
        n_head=n_head,
        n_kv=draw(st.sampled_from([k for k in (1, 2, 4) if n_head % k == 0])),
        n_vocab=draw(st.integers(259, 330)),
        n_ctx=draw(st.integers(1, 1 << 31)),
        type=kind,
        tied=draw(st.booleans()),
        name=draw(st.text(max_size=20)),
    )


extras = st.lists(
    st.one_of(
        st.tuples(st.just("str"), st.text(max_size=40)),
        st.tuples(st.just("u8"), st.integers(0, 255)),
        st.tuples(st.just("i64"), st.integers(-(2**63), 2**63 - 1)),
        st.tuples(st.just("f64"), st.floats()),
        st.tuples(st.just("[f32]"), st.lists(st.floats(width=32), max_size=40)),
        st.tuples(st.just("[str]"), st.lists(st.text(max_size=9), max_size=40)),
    ),
    max_size=5,
)


@st.composite
def sound_files(draw: st.DrawFn) -> tuple[Tiny, list[Meta], list[Blob], int, int]:
    tiny = draw(models())
    meta = metadata(tiny) + [Meta(f"x.{i}", kind, value) for i, (kind, value) in enumerate(draw(extras))]
    alignment = draw(st.sampled_from([32, 64, 512]))
    if alignment != 32:
        meta.append(Meta("general.alignment", "u32", alignment))
    return tiny, draw(st.permutations(meta)), list(tensors(tiny)), draw(st.sampled_from([2, 3])), alignment


def describe_bytes(path: Path, body: bytes) -> Summary:
    path.write_bytes(body)
    with open_artifact(path) as artifact:
        return describe(artifact)


@settings(settings.get_profile("artifact"))
@given(file=sound_files())
def test_no_sound_file_is_refused(scratch: Path, file: tuple[Tiny, list[Meta], list[Blob], int, int]) -> None:
    tiny, meta, blobs, version, alignment = file
    summary = describe_bytes(scratch, encode(meta, blobs, version=version, alignment=alignment))
    assert (summary.n_layer, summary.n_vocab, summary.tied) == (tiny.n_layer, tiny.n_vocab, tiny.tied)
    assert summary.tensor_bytes == sum(len(blob.data) for blob in blobs)


@settings(settings.get_profile("artifact"), max_examples=250)
@given(data=st.data())
def test_one_change_is_refused_or_leaves_a_model(scratch: Path, data: st.DataObject) -> None:
    """The second opinion is that of another reader, which may be asked: what is accepted is sound in structure."""
    body = bytearray(SOUND)
    end = SOUND.rindex(b"output_norm.weight") + 60  # of the tensor table
    at = data.draw(st.integers(0, end), label="at")
    change = data.draw(st.sampled_from(["bit", "byte", "insert", "delete", "cut"]), label="change")
    if change == "bit":
        body[at] ^= 1 << data.draw(st.integers(0, 7))
    elif change == "byte":
        body[at] = data.draw(st.sampled_from([0, 1, 127, 128, 255]))
    elif change == "insert":
        body[at:at] = bytes(data.draw(st.sampled_from([1, 4, 8, 32])))
    elif change == "delete":
        del body[at : at + data.draw(st.sampled_from([1, 4, 8, 32]))]
    else:
        del body[at:]
    try:
        summary = describe_bytes(scratch, bytes(body))
    except MeshError:
        return
    reader = gguf.GGUFReader(scratch)
    found = {tensor.name: (tuple(int(d) for d in tensor.shape), int(tensor.n_bytes)) for tensor in reader.tensors}
    assert sum(nbytes for _, nbytes in found.values()) == summary.tensor_bytes
    with open_artifact(scratch) as artifact:
        model = shapes(read_header(artifact.fd, artifact.size), "llama", summary.n_vocab)
    assert model.required.keys() <= found.keys() <= model.required.keys() | model.optional.keys()
    assert all(found[name][0] == shape for name, shape in model.required.items())
