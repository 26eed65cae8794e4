"""What the metadata of each architecture may say, and which tensors of which shapes follow from it.

shapes(header, architecture, n_vocab) -> Model    or bad_gguf; anything that passes loads and computes in the engine

FAMILIES says how the dense transformers differ. An architecture that is served and has no row there is checked for what
is the same in all; the engine's own loader then has the last word on it.

n_embd: channels of the residual; n_head, n_kv: heads of queries and of keys and values; head: channels of a head;
n_ff: channels of the feed-forward part. A tensor's shape is (elements of a row, rows ...), as the file has it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from .cursor import bad
from .header import Header
from .keys import MAX_LAYERS, Keys

MAX_EXPERTS = 1024  # the engine's
_MAX = (1 << 32) - 1
_BIG = 1 << 31  # far beyond any dimension; products of two stay within 64 bits

Shape = tuple[int, ...]


class Model(NamedTuple):
    """n_ctx is what the file claims, up to 2^32 - 1. Shapes are by full tensor name; open: it may have others too."""

    n_layer: int
    n_embd: int
    n_ctx: int
    required: dict[str, Shape]
    optional: dict[str, Shape]
    open: bool = False


class Family(NamedTuple):
    """pre_norms: norms before attention and feed-forward; post_norms: after them; qk_norm: of queries and keys.

    own_head: heads need not share the residual's channels out evenly; output: the matrix beside the embeddings;
    full: what llama has beyond the others: biases, tabled rotary frequencies, experts; numbers, counts: further keys;
    divisors: numbers that have to be there and are divided by.
    """

    pre_norms: bool = True
    post_norms: bool = False
    qk_norm: Literal["head", "all"] | None = None
    own_head: bool = True
    output: Literal["optional", "required", "never"] = "optional"
    output_bias: bool = False
    full: bool = False
    numbers: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    divisors: tuple[str, ...] = ()


_ATTENTIONLESS = ("mamba", "rwkv")
_WINDOW = ("attention.sliding_window",)
_SCALES = ("residual_scale", "embedding_scale", "attention.scale")
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")

FAMILIES: dict[str, Family] = {
    "gemma": Family(output="never"),
    "gemma2": Family(post_norms=True, output="never", numbers=_CAPS, counts=_WINDOW),
    "gemma3": Family(post_norms=True, qk_norm="head", numbers=_CAPS[1:], counts=_WINDOW),
    "granite": Family(full=True, numbers=_SCALES, divisors=("logit_scale",)),
    "llama": Family(full=True),
    "mistral3": Family(full=True),
    "olmo2": Family(pre_norms=False, post_norms=True, qk_norm="all", own_head=False, output="required", counts=_WINDOW),
    "qwen2": Family(own_head=False, output_bias=True),
    "qwen3": Family(qk_norm="head"),
    "smollm3": Family(),
}


def shapes(header: Header, architecture: str, n_vocab: int) -> Model:
    """The tensors that a model of this metadata has; bad_gguf for values that no model can have."""
    keys = Keys(header, architecture + ".")
    n_embd = keys.whole("embedding_length", 1, _BIG)
    n_ctx = keys.whole("context_length", 1, _MAX)
    embeddings: dict[str, Shape] = {"token_embd.weight": (n_embd, n_vocab)}
    _check_kind(keys)
    keys.whole("vocab_size", 0, _MAX, n_vocab)
    family = FAMILIES.get(architecture)
    if family is None:
        ahead = keys.whole("nextn_predict_layers", 0, MAX_LAYERS, 0)
        n_layer = keys.whole("block_count", 1 + ahead, MAX_LAYERS) - ahead
        _check_asserted(keys, architecture, n_embd, n_layer + ahead)
        return Model(n_layer, n_embd, n_ctx, embeddings, {}, open=True)
    if keys.whole("nextn_predict_layers", 0, _MAX, 0):
        raise bad(f"{keys.name('nextn_predict_layers')} is set: that is another kind of model")
    n_layer = keys.whole("block_count", 1, MAX_LAYERS)
    n_head = keys.alike("attention.head_count", n_layer, 1, n_embd)
    n_kv = keys.alike("attention.head_count_kv", n_layer, 1, n_head, n_head)
    n_ff = keys.alike("feed_forward_length", n_layer, 1, _BIG)
    if n_head % n_kv:
        raise bad(f"{keys.name('attention.head_count')} {n_head} is no multiple of head_count_kv {n_kv}")
    head = _head(keys, n_embd // n_head)
    if not family.own_head and head * n_head != n_embd:
        raise bad(f"{n_head} heads of {head} channels do not make the {n_embd} of the model")
    _check_rest(keys, family)
    experts = _experts(keys, family, n_layer)
    required = embeddings | {"output_norm.weight": (n_embd,)}
    optional: dict[str, Shape] = {"rope_freqs.weight": (head // 2,)} if family.full else {}
    if family.output != "never":
        (required if family.output == "required" else optional)["output.weight"] = (n_embd, n_vocab)
    if family.output_bias:
        optional["output.bias"] = (n_vocab,)
    for layer in range(n_layer):
        block = f"blk.{layer}."
        _norms(block, family, n_embd, head, n_head * head, n_kv * head, required)
        _attention(block, family, n_embd, n_head * head, n_kv * head, required, optional)
        _feed_forward(block, family, n_embd, n_ff, experts, required, optional)
    return Model(n_layer, n_embd, n_ctx, required, optional)


def _head(keys: Keys, default: int) -> int:
    head = keys.whole("attention.key_length", 1, _BIG, default)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (value := keys.whole(key, 1, _BIG, default if key.startswith("att") else head)) != head:
            raise bad(f"{keys.name(key)} is {value}, but a head has {head} channels")
    if head < 2 or head % 2:
        raise bad(f"a head has {head} channels; rotary positions need an even number of them")
    return head


def _check_kind(keys: Keys) -> None:
    if not keys.flag("attention.causal", True):
        raise bad(f"{keys.name('attention.causal')} is false: it does not write text")
    for key in ("pooling_type", "classifier.pooling_type", "embedding_length_out"):
        if keys.whole(key, 0, _MAX, 0) not in (0, _MAX):  # the latter is how the engine writes that it is not set
            raise bad(f"{keys.name(key)} is set: that is another kind of model")


def _check_asserted(keys: Keys, architecture: str, n_embd: int, n_layer: int) -> None:
    """What the engine asserts of every architecture: it would abort where its loader does not even come to a tensor."""
    _check_routing(keys, architecture, n_layer)
    heads = keys.each("attention.head_count", n_layer, 0, _BIG)
    if heads and not any(heads) and not any(kind in architecture for kind in _ATTENTIONLESS):
        raise bad(f"{keys.name('attention.head_count')} is 0 in every layer")
    if heads and heads[0]:  # the engine looks at the first layer's, and at no rotary dimensions where that is 0
        head = keys.whole("attention.key_length", 1, _BIG, n_embd // heads[0])
        rotary = keys.whole("rope.dimension_count", 0, head, 0)
        if rotary % 2:
            raise bad(f"{keys.name('rope.dimension_count')} is {rotary}; rotary positions need an even number")
    for key in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count"):
        keys.whole(f"ssm.{key}", 1, _BIG, 1)


def _check_routing(keys: Keys, architecture: str, n_layer: int) -> None:
    experts = keys.whole("expert_count", 0, MAX_EXPERTS, 0)
    if architecture.startswith("hunyuan") and experts == 1:
        return  # the engine takes that for a model without experts
    used = max(keys.each("expert_used_count", n_layer, 0, experts), default=0)  # the engine, too, asks for the most
    if experts and not used:
        raise bad(f"{keys.name('expert_used_count')} is 0 of {experts} experts")
    groups = keys.whole("expert_group_count", 0, max(experts - 1, 0), 0)
    if groups > 1:
        if experts % groups:
            raise bad(f"{keys.name('expert_count')} {experts} is no multiple of expert_group_count {groups}")
        if not keys.whole("expert_group_used_count", 1, groups - 1, 0):
            raise bad(f"{keys.name('expert_group_used_count')} is missing for {groups} groups")


def _check_rest(keys: Keys, family: Family) -> None:
    """Keys that only change numbers: the types that the engine demands, and values that leave the numbers finite."""
    keys.number("attention.layer_norm_rms_epsilon", 0, 1)
    keys.number("rope.freq_base", 1, 1e12, 1e4)
    keys.number("rope.freq_base_swa", 1, 1e12, 1e4)
    for key in ("rope.scaling.factor", "rope.scale_linear", "rope.scaling.alpha"):
        keys.number(key, 0, 1e6, 0)
    for key in ("rope.scaling.attn_factor", "attention.scale", "attention.temperature_scale"):
        keys.number(key, 0, 100, 0)
    keys.whole("rope.scaling.original_context_length", 1, _MAX, 1)
    keys.flag("rope.scaling.finetuned", False)
    scaling = keys.text("rope.scaling.type", "none")
    if scaling not in ("none", "linear", "yarn"):
        raise bad(f"{keys.name('rope.scaling.type')} {scaling[:40]!r} is not supported")
    for factor in ("log_multiplier", "ext_factor", "attn_factor", "beta_fast", "beta_slow"):
        keys.number(f"rope.scaling.yarn_{factor}", -100, 100, 0)
    for key in family.numbers:
        keys.number(key, 0, 1e6, 0)
    for key in family.divisors:
        keys.number(key, 1e-6, 1e6)
    for key in family.counts:
        keys.whole(key, 0, _MAX, 0)


def _experts(keys: Keys, family: Family, n_layer: int) -> int:
    experts = keys.whole("expert_count", 0, MAX_EXPERTS if family.full else 0, 0)
    used = keys.alike("expert_used_count", n_layer, 0, experts, 0)
    if experts and not used:
        raise bad(f"{keys.name('expert_used_count')} is 0 of {experts} experts")
    for key in ("expert_group_count", "expert_group_used_count", "expert_shared_feed_forward_length"):
        if keys.whole(key, 0, _MAX, 0):
            raise bad(f"{keys.name(key)} is set, which this architecture cannot")
    return experts


def _norms(block: str, family: Family, n_embd: int, head: int, q: int, kv: int, required: dict[str, Shape]) -> None:
    names = ["attn_norm", "ffn_norm"] * family.pre_norms + ["post_attention_norm", "post_ffw_norm"] * family.post_norms
    for name in names:
        required[f"{block}{name}.weight"] = (n_embd,)
    if family.qk_norm:
        required[block + "attn_q_norm.weight"] = (head if family.qk_norm == "head" else q,)
        required[block + "attn_k_norm.weight"] = (head if family.qk_norm == "head" else kv,)


def _attention(
    block: str, family: Family, n_embd: int, q: int, kv: int, required: dict[str, Shape], optional: dict[str, Shape]
) -> None:
    for name, rows in (("q", q), ("k", kv), ("v", kv)):
        required[f"{block}attn_{name}.weight"] = (n_embd, rows)
        optional[f"{block}attn_{name}.bias"] = (rows,)
    required[block + "attn_output.weight"] = (q, n_embd)
    if family.full:
        optional[block + "attn_output.bias"] = (n_embd,)


def _feed_forward(
    block: str,
    family: Family,
    n_embd: int,
    n_ff: int,
    experts: int,
    required: dict[str, Shape],
    optional: dict[str, Shape],
) -> None:
    for name, shape in (("gate", (n_embd, n_ff)), ("up", (n_embd, n_ff)), ("down", (n_ff, n_embd))):
        if experts:
            required[f"{block}ffn_{name}_exps.weight"] = (*shape, experts)
            continue
        required[f"{block}ffn_{name}.weight"] = shape
        if family.full:
            optional[f"{block}ffn_{name}.bias"] = (shape[1],)
    if experts:
        required[block + "ffn_gate_inp.weight"] = (n_embd, experts)
