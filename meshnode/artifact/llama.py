"""The llama architecture: what its metadata may say and which tensors of which shapes follow from it.

shapes(header, n_vocab) -> Model    or bad_gguf; anything that passes loads and computes in the engine

n_embd: channels of the residual; n_head, n_kv: heads of queries and of keys and values; head: channels of a head;
n_ff: channels of the feed-forward part. A tensor's shape is (elements of a row, rows ...), as the file has it.
"""

from __future__ import annotations

from typing import NamedTuple

from .cursor import bad
from .header import Header
from .keys import MAX_LAYERS, Keys

MAX_EXPERTS = 1024  # the engine's
_MAX = (1 << 32) - 1
_BIG = 1 << 31  # far beyond any dimension; products of two stay within 64 bits

Shape = tuple[int, ...]


class Model(NamedTuple):
    """n_ctx is what the file claims, up to 2^32 - 1. Shapes are by full tensor name."""

    n_layer: int
    n_embd: int
    n_ctx: int
    required: dict[str, Shape]
    optional: dict[str, Shape]


def shapes(header: Header, n_vocab: int) -> Model:
    """The tensors that a model of this metadata has; bad_gguf for values that no model can have."""
    keys = Keys(header, "llama.")
    n_layer = keys.whole("block_count", 1, MAX_LAYERS)
    n_embd = keys.whole("embedding_length", 1, _BIG)
    n_ctx = keys.whole("context_length", 1, _MAX)
    n_head = keys.alike("attention.head_count", n_layer, 1, n_embd)
    n_kv = keys.alike("attention.head_count_kv", n_layer, 1, n_head, n_head)
    n_ff = keys.alike("feed_forward_length", n_layer, 1, _BIG)
    if n_head % n_kv:
        raise bad(f"llama.attention.head_count {n_head} is no multiple of head_count_kv {n_kv}")
    head = _head(keys, n_embd // n_head)
    _check_rest(keys)
    keys.whole("vocab_size", 0, _MAX, n_vocab)
    required: dict[str, Shape] = {
        "token_embd.weight": (n_embd, n_vocab),
        "output_norm.weight": (n_embd,),
    }
    optional: dict[str, Shape] = {"output.weight": (n_embd, n_vocab), "rope_freqs.weight": (head // 2,)}
    experts = _experts(keys, n_layer)
    for layer in range(n_layer):
        block = f"blk.{layer}."
        _attention(block, n_embd, n_head * head, n_kv * head, required, optional)
        _feed_forward(block, n_embd, n_ff, experts, required, optional)
    return Model(n_layer, n_embd, n_ctx, required, optional)


def _head(keys: Keys, default: int) -> int:
    head = keys.whole("attention.key_length", 1, _BIG, default)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (value := keys.whole(key, 1, _BIG, default if key.startswith("att") else head)) != head:
            raise bad(f"llama.{key} is {value}, but a head has {head} channels")
    if head < 2 or head % 2:
        raise bad(f"a head has {head} channels; rotary positions need an even number of them")
    return head


def _check_rest(keys: Keys) -> None:
    """Keys that only change numbers: the types that the engine demands, and values that leave the numbers finite."""
    keys.number("attention.layer_norm_rms_epsilon", 0, 1)
    keys.number("rope.freq_base", 1, 1e12, 1e4)
    for key in ("rope.scaling.factor", "rope.scale_linear", "rope.scaling.alpha"):
        keys.number(key, 0, 1e6, 0)
    for key in ("rope.scaling.attn_factor", "attention.scale"):
        keys.number(key, 0, 100, 0)
    keys.whole("rope.scaling.original_context_length", 1, _MAX, 1)
    keys.flag("rope.scaling.finetuned", False)
    scaling = keys.text("rope.scaling.type", "none")
    if scaling not in ("none", "linear", "yarn"):
        raise bad(f"llama.rope.scaling.type {scaling[:40]!r} is not supported")
    for factor in ("log_multiplier", "ext_factor", "attn_factor", "beta_fast", "beta_slow"):
        keys.number(f"rope.scaling.yarn_{factor}", -100, 100, 0)
    if not keys.flag("attention.causal", True):
        raise bad("llama.attention.causal is false: it does not write text")
    for key in ("pooling_type", "classifier.pooling_type", "nextn_predict_layers", "embedding_length_out"):
        if keys.whole(key, 0, _MAX, 0):
            raise bad(f"llama.{key} is set: that is another kind of model")


def _experts(keys: Keys, n_layer: int) -> int:
    experts = keys.whole("expert_count", 0, MAX_EXPERTS, 0)
    used = keys.alike("expert_used_count", n_layer, 0, experts, 0)
    if experts and not used:
        raise bad(f"llama.expert_used_count is 0 of {experts} experts")
    for key in ("expert_group_count", "expert_group_used_count"):
        if keys.whole(key, 0, _MAX, 0):
            raise bad(f"llama.{key} is set, which this architecture cannot")
    return experts


def _attention(
    block: str, n_embd: int, q: int, kv: int, required: dict[str, Shape], optional: dict[str, Shape]
) -> None:
    required[block + "attn_norm.weight"] = (n_embd,)
    for name, rows in (("q", q), ("k", kv), ("v", kv)):
        required[f"{block}attn_{name}.weight"] = (n_embd, rows)
        optional[f"{block}attn_{name}.bias"] = (rows,)
    required[block + "attn_output.weight"] = (q, n_embd)
    optional[block + "attn_output.bias"] = (n_embd,)


def _feed_forward(
    block: str, n_embd: int, n_ff: int, experts: int, required: dict[str, Shape], optional: dict[str, Shape]
) -> None:
    required[block + "ffn_norm.weight"] = (n_embd,)
    for name, shape in (("gate", (n_embd, n_ff)), ("up", (n_embd, n_ff)), ("down", (n_ff, n_embd))):
        if experts:
            required[f"{block}ffn_{name}_exps.weight"] = (*shape, experts)
        else:
            required[f"{block}ffn_{name}.weight"] = shape
            optional[f"{block}ffn_{name}.bias"] = (shape[1],)
    if experts:
        required[block + "ffn_gate_inp.weight"] = (n_embd, experts)
