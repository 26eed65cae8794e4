"""Is a GGUF a model that may be advertised? Checked by ourselves: the reader of the format's authors is no validator.

read_header(fd, size) -> Header   the structure: bounds, overlaps, alignment, types, duplicates (header.py)
validate(header) -> Summary       the model: architecture, shapes, completeness, tokenizer; bad_gguf names the fault

Neither reads tensor data, and neither looks at a clock or a path. Whatever the bytes, both end within 2 s and 64 MiB.
What they cannot see (a flipped bit, a NaN in a weight, a looping template) the identity or a check at run time tells.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import MeshError
from . import architectures
from .cursor import bad, quote
from .ggml import MATRIX_TYPES, VECTOR_TYPES
from .header import Array, Header, Tensor, Value, read_header
from .keys import Keys
from .shapes import Model, shapes
from .tokenizer import check_tokenizer

__all__ = ["Array", "Header", "Summary", "Tensor", "Value", "read_header", "validate"]

RULES = 3  # raise it when validate() or Summary changes: what was found by other rules is then found anew

PROJECTORS = ("clip", "mmproj", "projector")
PROJECTOR = "it is a projector, which turns images or sound into embeddings, and no model by itself"
MAX_CONTEXT = 1 << 24  # positions: ten times the longest in use; above it a file's claim is not believed
MAX_LABEL = 128  # characters

_LAYER = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Summary:
    """What may be told of a sound model. Sizes in bytes as stored, counts in layers, channels, tokens, positions."""

    architecture: str
    name: str  # general.name made a label: printable, one line, no path; "" when the file gives none
    n_layer: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int  # at most MAX_CONTEXT: never a reason to allocate
    tied: bool  # the output matrix is the embedding matrix
    layer_bytes: tuple[int, ...]  # of each layer
    embedding_bytes: int  # of the token embeddings, which a head looks rows up in
    head_bytes: int  # of what turns a residual into logits at a tail: norm and output matrix, tied or not
    has_template: bool
    file_bytes: int  # of the file, or of all shards

    @property
    def tensor_bytes(self) -> int:
        """All tensors as stored, each counted once (rope factors, a few hundred bytes, are left out)."""
        return sum(self.layer_bytes) + self.head_bytes + (0 if self.tied else self.embedding_bytes)


def validate(header: Header) -> Summary:
    """Check that the header is that of a whole model the engine can load and run.

    Errors: bad_gguf naming the fault, bad_shards (one shard of several, alone), unsupported_architecture.
    """
    general = Keys(header, "general.")
    architecture = general.text("architecture")
    if architecture in PROJECTORS or general.text("type", "model") in PROJECTORS:
        raise MeshError("unsupported_architecture", PROJECTOR, hint="serve the model that it belongs to")
    name = label(general.text("name", ""))
    general.whole("file_type", 0, (1 << 32) - 1, 0)
    if (shards := Keys(header).whole("split.count", 0, (1 << 16) - 1, 1, kind="u16")) > 1:
        raise MeshError("bad_shards", f"it is one shard of {shards}, and its name does not say where the others are")
    if not header.tensors:
        raise bad("it holds no tensors, only metadata")
    architectures.check(architecture)
    n_vocab = check_tokenizer(header)
    model = shapes(header, architecture, n_vocab)
    _check_tensors(header.tensors, model)
    sizes = {tensor.name: tensor.nbytes for tensor in header.tensors.values()}
    layer_bytes = _layer_bytes(sizes, model.n_layer)
    if 0 in layer_bytes:
        raise bad(f"layer {layer_bytes.index(0)} has no tensors")
    tied = "output.weight" not in sizes
    return Summary(
        architecture=architecture,
        name=name,
        n_layer=model.n_layer,
        n_embd=model.n_embd,
        n_vocab=n_vocab,
        n_ctx_train=min(model.n_ctx, MAX_CONTEXT),
        tied=tied,
        layer_bytes=layer_bytes,
        embedding_bytes=sizes["token_embd.weight"],
        head_bytes=sizes.get("output_norm.weight", 0) + sizes["token_embd.weight" if tied else "output.weight"],
        has_template=bool(Keys(header).text("tokenizer.chat_template", "")),
        file_bytes=header.size,
    )


def label(text: str) -> str:
    """A name that may be shown anywhere: the last part of anything path-like, printable, at most 128 characters."""
    last = re.split(r"[/\\]", text.strip().rstrip("/\\"))[-1]
    return "".join(c if c.isprintable() else "?" for c in last)[:MAX_LABEL].strip()


def _check_tensors(tensors: dict[str, Tensor], model: Model) -> None:
    for name in model.required:
        if name not in tensors:
            raise bad(f"tensor {name} is missing")
    for name, tensor in tensors.items():
        shape = model.required.get(name) or model.optional.get(name)
        layer = _LAYER.match(name)
        beyond = layer is not None and int(layer[1]) >= model.n_layer
        if shape is None and model.open and not beyond:
            continue  # the engine's loader knows
        if shape is None:
            why = f": there are {model.n_layer} layers" if beyond else ""
            raise bad(f"tensor {quote(name)} belongs to no model of this architecture{why}")
        padded = shape + (1,) * (len(tensor.dims) - len(shape))
        if tensor.dims != padded:
            raise bad(f"tensor {name} has the shape {list(tensor.dims)} instead of {list(shape)}")
        allowed = VECTOR_TYPES if len(shape) == 1 else MATRIX_TYPES
        if tensor.type.name not in allowed:
            raise bad(f"tensor {name} has the type {tensor.type.name}, which the engine cannot compute with")


def _layer_bytes(sizes: dict[str, int], n_layer: int) -> tuple[int, ...]:
    layers = [0] * n_layer
    for name, nbytes in sizes.items():
        if match := _LAYER.match(name):
            layers[int(match[1])] += nbytes
    return tuple(layers)
