"""What the metadata of a tokenizer must be for the engine: a fault here aborts a worker or garbles its answers."""

from __future__ import annotations

from .cursor import MARKS, bad
from .header import TOKEN_TYPES, TOKENS, Header
from .keys import Keys

_GGML = "tokenizer.ggml."
_BYTE = 6  # the token type of a raw byte, whose text is "<0x..>"

_NO_TOKEN = (1 << 32) - 1  # how converters write "none"
_MODELS = ("gpt2", "llama")
_IDS = (
    "bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "cls", "mask",
    "fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep", "prefix", "suffix", "middle",
)  # fmt: skip
_FLAGS = (
    "add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix", "remove_extra_whitespaces",
    "normalizer.lowercase", "normalizer.strip_accents",
)  # fmt: skip
# The splitters of text that the pinned engine knows; it refuses every other name. But not `whitespace`, with which two
# spaces end its process, nor `superbpe`, which takes seconds for some KiB of digits.
_SPLITTERS = frozenset(
    """
    default minicpm5 llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano deepseek-llm
    deepseek-coder deepseek-v3 spark2_5 youtu falcon mpt starcoder gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es
    jina-v2-de a.x-4.0 mellum modern-bert jais-2 gemma4 granite-embed-multi-311m sarvam-moe jina-v1-en jina-v2-code
    roberta-bpe refact command-r qwen2 deepseek-r1-qwen kormo f2llmv2 qwen35 stablelm2 olmo dbrx smaug-bpe
    poro-chat chatglm-bpe glm4 glm5 viking jais tekken smollm codeshell bloom gpt3-finnish exaone exaone4 exaone-moe
    chameleon minerva-7b megrez gpt-4o llama4 kanana2 talkie granite-embed-multi-97m tiny_aya cohere2moe
    trillion granite-docling bailingmoe bailingmoe2 llada-moe seed-coder hunyuan hunyuan-dense hy_v4 joyai-llm kimi-k2
    ufakzeka grok-2 afmoe laguna minimax-m2 solar-open mellum2
    """.split()  # noqa: SIM905
)


def check_tokenizer(header: Header) -> int:
    """Check the tokenizer and return the number of its tokens; bad_gguf, naming the fault."""
    keys, ggml = Keys(header), Keys(header, _GGML)
    model = ggml.text("model")
    if model not in _MODELS:
        raise bad(f"the tokenizer model {model[:40]!r} is not supported ({' and '.join(_MODELS)} are)")
    tokens = header.tokens
    keys.array(TOKENS, ("str",), required=True)
    if tokens is None or tokens.count == 0:
        raise bad(f"{TOKENS} is empty")
    if not tokens.distinct:
        raise bad(f"{TOKENS} holds a token twice")
    if tokens.bad_text is not None:
        raise bad(f"token {tokens.bad_text} is no UTF-8")
    if model == "llama" and len(tokens.byte_values) < 256:
        raise bad("it has no token for some byte, so that there are texts it cannot take")
    name = keys.text("general.name", "").lower()
    if ("phi-3" in name or "phi3" in name) and tokens.marks != MARKS:  # the engine goes by the name
        raise bad("it is called phi-3, but its tokens are not phi-3's")
    _check_types(header, keys, tokens.count)
    _check_splitting(ggml, model)
    scores = ggml.array("scores", ("f32", "i32"), required=False)
    if scores is not None and scores.count < tokens.count:
        raise bad(f"{_GGML}scores has {scores.count} entries for {tokens.count} tokens")
    _check_ids(ggml, tokens.count)
    for flag in _FLAGS:
        ggml.flag(flag, False)
    ggml.whole("token_type_count", 0, _NO_TOKEN, 0)
    ggml.array("suppress_tokens", ("i32",), required=False)
    keys.text("tokenizer.chat_template", "")
    return tokens.count


def _check_types(header: Header, keys: Keys, n_tokens: int) -> None:
    types = keys.array(TOKEN_TYPES, ("i32",), required=False)
    if types is None:
        return
    if types.count < n_tokens:
        raise bad(f"{TOKEN_TYPES} has {types.count} entries for {n_tokens} tokens")
    assert header.tokens is not None
    for token, kind in enumerate(types.values()[:n_tokens]):
        if kind == _BYTE and token not in header.tokens.byte_forms:
            raise bad(f"token {token} is said to be a byte, but is not written <0x..>")


def _check_splitting(ggml: Keys, model: str) -> None:
    splitter = ggml.text("pre", "default")
    if model == "gpt2":
        ggml.array("merges", ("str",), required=True)
        if splitter and splitter not in _SPLITTERS:
            raise bad(f"the engine does not know {_GGML}pre {splitter[:40]!r}")


def _check_ids(ggml: Keys, n_tokens: int) -> None:
    for name in _IDS:
        key = f"{name}_token_id"
        token = ggml.whole(key, 0, _NO_TOKEN, _NO_TOKEN)
        if token >= n_tokens and token != _NO_TOKEN:
            raise bad(f"{_GGML}{key} is {token}, but there are {n_tokens} tokens")
