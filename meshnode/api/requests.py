"""What a person asks a mesh: read from JSON, bounded, and refused with a reason before anything is spent on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import MeshError
from ..wire.messages import MAX_PROMPT, MAX_TEXT, TOKEN_LIMIT, Sampling, Turn

ROLES = ("system", "user", "assistant")
MAX_TURNS = 1024  # what one message to a head holds
MAX_MODEL = 200
MAX_TOKENS = 1 << 20  # far above any context; the context is checked where the model is known
MAX_TEMPERATURE = 100  # drawn from all alike long before
MAX_TOP_K = 1 << 20  # above any vocabulary
MAX_SEED = (1 << 64) - 1  # as the wire has it
MAX_BIASES, MAX_BIAS = 1024, 100
MAX_GRAMMAR = 1 << 16  # bytes, as the wire has it
MAX_LOGPROBS = 20
MAX_PENALTY = 100  # of presence and frequency, either way
MAX_WINDOW = (1 << 32) - 1  # of tokens that penalties look back on: the whole history
MILLION = 1_000_000
_FIELDS = frozenset(
    (
        "model", "prompt", "messages", "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "typical_p",
        "logit_bias", "grammar", "logprobs", "repeat_penalty", "repeat_last_n", "presence_penalty",
        "frequency_penalty", "tokens",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class RunRequest:
    """One prompt for one model: raw text in `prompt`, its ids in `tokens`, or turns (role, content) in `messages` for
    its chat template.

    model: an identity, an unambiguous prefix of one, or a name; never a path. temperature 0 is exact argmax, and then
    neither top_k (0: all), top_p, min_p nor seed matter. MeshError usage or bad_prompt.
    """

    model: str
    prompt: str | None = None
    messages: tuple[tuple[str, str], ...] = ()
    max_tokens: int | None = None  # None: a usual number, or what the context has room for
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    typical_p: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (id, what is added to its logit), ids ascending
    grammar: str = ""  # GBNF that the answer follows
    logprobs: int | None = None  # of so many of the likeliest tokens, and the chosen one's
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64  # tokens that the three penalties look back on
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if type(self.model) is not str or not 1 <= len(self.model) <= MAX_MODEL or not self.model.isprintable():
            raise MeshError("usage", f"the model is to be named by 1 to {MAX_MODEL} printable characters")
        self._check_prompt()
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        _number("temperature", self.temperature, 0, MAX_TEMPERATURE)
        _integer("top_k", self.top_k, 0, MAX_TOP_K)
        _number("top_p", self.top_p, 0, 1)
        _number("min_p", self.min_p, 0, 1)
        _integer("seed", self.seed, 0, MAX_SEED)
        _number("typical_p", self.typical_p, 0, 1)
        if type(self.logit_bias) is not tuple or len(self.logit_bias) > MAX_BIASES:
            raise MeshError("usage", f"logit_bias has at most {MAX_BIASES} tokens")
        for token, bias in self.logit_bias:
            _integer("a token of logit_bias", token, 0, TOKEN_LIMIT)
            _number("a bias of logit_bias", bias, -MAX_BIAS, MAX_BIAS)
        if type(self.grammar) is not str or len(self.grammar.encode(errors="replace")) > MAX_GRAMMAR:
            raise MeshError("bad_grammar", f"a grammar is a text of at most {MAX_GRAMMAR} bytes")
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _number("repeat_penalty", self.repeat_penalty, 1 / MILLION, MAX_PENALTY)
        _integer("repeat_last_n", self.repeat_last_n, 0, MAX_WINDOW)
        _number("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _number("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)

    def _check_prompt(self) -> None:
        if (self.prompt is not None) + bool(self.messages) + bool(self.tokens) != 1:
            raise MeshError("bad_prompt", "give either a prompt or messages")
        if self.tokens:
            if type(self.tokens) is not tuple or len(self.tokens) > MAX_PROMPT:
                raise MeshError("context_exceeded", f"a prompt has at most {MAX_PROMPT} tokens")
            for token in self.tokens:
                _integer("a token of the prompt", token, 0, TOKEN_LIMIT)
            return
        if self.prompt is not None:
            _text("the prompt", self.prompt, MAX_TEXT)
            return
        if type(self.messages) is not tuple or len(self.messages) > MAX_TURNS:
            raise MeshError("bad_prompt", f"messages are a list of at most {MAX_TURNS}")
        left = MAX_TEXT
        for role, content in self.messages:
            if role not in ROLES:
                raise MeshError("bad_prompt", f"a message's role is one of {', '.join(ROLES)}")
            left -= _text("a message", content, left)

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(Turn(role, content) for role, content in self.messages)

    @property
    def sampling(self) -> Sampling:
        """As the wire has it: in millionths."""
        return Sampling(
            round(self.temperature * MILLION),
            self.top_k,
            max(1, round(self.top_p * MILLION)),  # of 0 the best token is left
            round(self.min_p * MILLION),
            self.seed,
            typical_p=max(1, round(self.typical_p * MILLION)),
            biases=tuple(sorted((token, round(bias * MILLION)) for token, bias in dict(self.logit_bias).items())),
            grammar=self.grammar,
            logprobs=self.logprobs,
            repeat_penalty=round(self.repeat_penalty * MILLION),
            repeat_last_n=self.repeat_last_n,
            presence_penalty=round(self.presence_penalty * MILLION),
            frequency_penalty=round(self.frequency_penalty * MILLION),
        )

    def to_json(self) -> dict[str, Any]:
        said: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "seed": self.seed,
            "typical_p": self.typical_p,
            "logit_bias": {str(token): bias for token, bias in self.logit_bias},
            "grammar": self.grammar,
            "logprobs": self.logprobs,
            "repeat_penalty": self.repeat_penalty,
            "repeat_last_n": self.repeat_last_n,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }
        if self.tokens:
            return said | {"tokens": list(self.tokens)}
        if self.prompt is not None:
            return said | {"prompt": self.prompt}
        return said | {"messages": [{"role": role, "content": content} for role, content in self.messages]}

    @classmethod
    def from_json(cls, value: Any) -> RunRequest:
        """Fields that nobody knows are refused: a misspelt one must not be ignored."""
        if not isinstance(value, dict):
            raise MeshError("usage", "a request is a JSON object")
        unknown = sorted(str(key) for key in value if key not in _FIELDS)
        if unknown:
            raise MeshError("usage", f"a request has no {unknown[0][:80]!r}")
        if "model" not in value:
            raise MeshError("usage", "a request names a model")
        fields = dict(value)
        if "messages" in fields:
            fields["messages"] = _messages(fields["messages"])
        if "tokens" in fields:
            fields["tokens"] = tuple(fields["tokens"]) if isinstance(fields["tokens"], list) else fields["tokens"]
        if "logit_bias" in fields:
            fields["logit_bias"] = _biases(fields["logit_bias"])
        return cls(**fields)


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict) or not all(type(key) is str and key.isdecimal() and len(key) < 12 for key in value):
        raise MeshError("usage", "logit_bias is an object from token ids to biases")
    return tuple((int(key), bias) for key, bias in value.items())


def _messages(value: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, list):
        raise MeshError("bad_prompt", "messages are a list")
    for item in value:
        if not isinstance(item, dict) or set(item) != {"role", "content"}:
            raise MeshError("bad_prompt", "a message has a role and a content, and nothing else")
    return tuple((item["role"], item["content"]) for item in value)


def _text(what: str, value: Any, most: int) -> int:
    """Its bytes in UTF-8."""
    if type(value) is not str:
        raise MeshError("bad_prompt", f"{what} is no text")
    if not value:
        raise MeshError("bad_prompt", f"{what} is empty")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise MeshError("bad_prompt", f"{what} is no valid Unicode", hint="give it in UTF-8") from error
    if size > most:
        raise MeshError("context_exceeded", f"{what} has {size} bytes; {most} are left of the limit of {MAX_TEXT}")
    return size


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise MeshError("usage", f"{name} is an integer from {low} to {high}, not {_shown(value)}")


def _number(name: str, value: Any, low: float, high: float) -> None:
    if type(value) not in (int, float) or not low <= value <= high:  # which NaN is not either
        raise MeshError("usage", f"{name} is a number from {low} to {high}, not {_shown(value)}")


def _shown(value: Any) -> str:
    return ascii(value)[:40]
