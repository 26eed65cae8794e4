"""A tiny sound model of each architecture whose tensors are known, made from the table that is to be proven."""

from fixtures.make_fixtures import Blob, Meta, Tiny, encode, metadata, tensors
from meshnode.artifact.header import Header, Value
from meshnode.artifact.shapes import FAMILIES, shapes

SHAPE = Tiny(n_layer=2, type="F32")
WITH_HEAD = "output.weight"


def family_metadata(architecture: str) -> list[Meta]:
    made = [
        meta._replace(
            key=meta.key.replace("llama.", architecture + ".", 1) if meta.key.startswith("llama.") else meta.key,
            value=architecture if meta.key == "general.architecture" else meta.value,
        )
        for meta in metadata(SHAPE)
    ]
    return made + [Meta(f"{architecture}.{key}", "f32", 8.0) for key in FAMILIES[architecture].divisors]


def family_bytes(architecture: str, *, tied: bool = True, optional: bool = False) -> bytes:
    """Everything that is required; with what is optional too, but for the output matrix of a tied model."""
    meta = family_metadata(architecture)
    values = {m.key: Value("arr" if m.type.startswith("[") else m.type, m.value) for m in meta}
    model = shapes(Header(3, values, None, {}, 0, 0, 0), architecture, SHAPE.n_vocab)
    wanted = dict(model.required)
    if optional:
        wanted |= {name: shape for name, shape in model.optional.items() if name != WITH_HEAD}
    if not tied:
        wanted |= {name: shape for name, shape in model.optional.items() if name == WITH_HEAD}
    weights = b"".join(blob.data for blob in tensors(Tiny(n_layer=2, type="F32", n_embd=128)) if len(blob.dims) == 2)
    ones = b"\0\0\x80\x3f" * max(SHAPE.n_embd, SHAPE.n_ff, SHAPE.n_vocab)
    blobs = []
    for name, shape in sorted(wanted.items()):
        size = 4 * (shape[0] if len(shape) == 1 else shape[0] * shape[1])
        blobs.append(Blob(name, shape, "F32", (ones if len(shape) == 1 else weights)[:size]))
    return encode(meta, blobs)
