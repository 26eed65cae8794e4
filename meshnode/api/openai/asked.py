"""OpenAI's requests, read into what a mesh is asked. What cannot be done is refused with the parameter's name."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ...errors import MeshError
from ..requests import MAX_BIAS, MAX_BIASES, MAX_LOGPROBS, MILLION, RunRequest
from . import fault as faults
from .fault import Fault
from .schema import ANY_OBJECT, SchemaFault, to_gbnf

T = TypeVar("T")
MAX_CHOICES = 16  # answers of one request: they are made one after the other
MAX_STOPS, MAX_STOP = 16, 256  # OpenAI takes four
NOTHING: tuple[tuple[str, str], ...] = ()
NO_STOPS: tuple[str, ...] = ()
NO_BIASES: tuple[tuple[int, float], ...] = ()
IGNORED = frozenset(
    (  # they change nothing in an answer of a mesh
        "user", "metadata", "service_tier", "parallel_tool_calls", "prompt_cache_key", "safety_identifier",
    )
)  # fmt: skip
# what is taken only with the value that asks for nothing
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "modalities": (["text"],),
    "suffix": ("",),
    "function_call": ("none",),
    "functions": ([],),
}


@dataclass(frozen=True)
class Asked:
    """choices: what a mesh is asked, one after the other; prefill_only: no token of the answer is wanted."""

    model: str
    choices: tuple[RunRequest, ...]
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    prefill_only: bool = False
    echo: tuple[str, ...] = ()  # a text before each choice
    is_chat: bool = True
    tools: frozenset[str] = field(default=frozenset())  # names; not empty: the answer may call them


class Fields:
    """The parameters of a request. A name that nobody asked for is refused: a misspelt one must not be ignored."""

    def __init__(self, value: Any) -> None:
        if not isinstance(value, dict):
            raise Fault("the request is no JSON object")
        self._left = {key: one for key, one in value.items() if one is not None}

    def take(self, name: str, read: Callable[[str, Any], T], default: T) -> T:
        return read(name, self._left.pop(name)) if name in self._left else default

    def must(self, name: str, read: Callable[[str, Any], T]) -> T:
        if name not in self._left:
            raise Fault(f"you must provide a {name} parameter", param=name, code="missing_required_parameter")
        return read(name, self._left.pop(name))

    def done(self) -> None:
        for name, value in self._left.items():
            if name in IGNORED:
                continue
            if name not in _NEUTRAL:
                raise Fault(f"this API has no parameter {name[:80]!r}", param=name[:80], code="unknown_parameter")
            if value not in _NEUTRAL[name]:
                raise Fault(f"{name} is not offered here", param=name, code="unsupported_parameter")


def chat(value: Any) -> Asked:
    """A request of /v1/chat/completions."""
    fields = Fields(value)
    model, turns = fields.must("model", text), fields.must("messages", messages)
    fields.take("tools", _no_tools, None)
    fields.take("tool_choice", lambda name, one: choice(name, one, ("none", "auto")), "none")
    wanted = fields.take("logprobs", flag, False)
    top = fields.take("top_logprobs", integer(0, MAX_LOGPROBS), None)
    if top is not None and not wanted:
        raise Fault("top_logprobs needs logprobs to be true", param="top_logprobs")
    grammar = fields.take("response_format", response_format, "")
    limits = [fields.take(name, integer(0), None) for name in ("max_completion_tokens", "max_tokens")]
    limit = limits[0] if limits[0] is not None else limits[1]
    request = {"model": model, "messages": turns, "logprobs": (top or 0) if wanted else None}
    return _asked(fields, [request], limit, grammar, is_chat=True)


def completion(value: Any) -> Asked:
    """A request of /v1/completions."""
    fields = Fields(value)
    model, prompts = fields.must("model", text), fields.must("prompt", _prompts)
    top = fields.take("logprobs", _legacy_logprobs, None)
    echo = fields.take("echo", flag, False)
    best_of = fields.take("best_of", integer(1, MAX_CHOICES), None)
    grammar = fields.take("response_format", response_format, "")
    requests: list[dict[str, Any]] = [{"model": model, "logprobs": top} | prompt for prompt in prompts]
    if echo and (top is not None or any("tokens" in prompt for prompt in prompts)):
        raise Fault("echo is offered for texts, without logprobs", param="echo", code="unsupported_parameter")
    asked = _asked(fields, requests, fields.take("max_tokens", integer(0), 16), grammar, is_chat=False)
    if best_of is not None and best_of * len(prompts) != len(asked.choices):
        raise Fault("best_of is offered only as many as n", param="best_of", code="unsupported_parameter")
    return replace(asked, echo=tuple(one.prompt or "" for one in asked.choices)) if echo else asked


def _asked(fields: Fields, prompts: list[dict[str, Any]], limit: int | None, grammar: str, *, is_chat: bool) -> Asked:
    """With what both kinds of request share."""
    n = fields.take("n", integer(1, MAX_CHOICES), 1)
    if n * len(prompts) > MAX_CHOICES:
        raise Fault(f"a request has at most {MAX_CHOICES} answers", param="n")
    stop = fields.take("stop", stops, NO_STOPS)
    stream = fields.take("stream", flag, False)
    options = fields.take("stream_options", _stream_options, None)
    if options is not None and not stream:
        raise Fault("stream_options needs stream to be true", param="stream_options")
    own_grammar = fields.take("grammar", text, "")
    if own_grammar and grammar:
        raise Fault("give either response_format or grammar", param="grammar")
    temperature = fields.take("temperature", number(0, 2), 1.0)
    given_seed = fields.take("seed", integer(-(1 << 63), (1 << 63) - 1), None)
    drawn: dict[str, Any] = dict(
        temperature=temperature,
        top_p=fields.take("top_p", number(0, 1), 1.0),
        presence_penalty=fields.take("presence_penalty", number(-2, 2), 0.0),
        frequency_penalty=fields.take("frequency_penalty", number(-2, 2), 0.0),
        logit_bias=fields.take("logit_bias", biases, NO_BIASES),
        top_k=fields.take("top_k", integer(0, 1 << 20), 0),
        min_p=fields.take("min_p", number(0, 1), 0.0),
        typical_p=fields.take("typical_p", number(0, 1), 1.0),
        repeat_penalty=fields.take("repeat_penalty", number(1 / MILLION, 100), 1.0),
        repeat_last_n=fields.take("repeat_last_n", integer(0, (1 << 32) - 1), (1 << 32) - 1),
        grammar=own_grammar or grammar,
        max_tokens=limit or (1 if limit == 0 else None),
    )
    fields.done()
    seed = secrets.randbits(32) if given_seed is None else given_seed % (1 << 64)
    try:
        choices = [
            RunRequest(**prompt, **drawn, seed=(seed + number) % (1 << 64)) for prompt in prompts for number in range(n)
        ]
    except MeshError as error:
        raise _of_request(error) from error
    return Asked(
        prompts[0]["model"],
        tuple(choices),
        stop,
        stream,
        bool(options),
        limit == 0,
        is_chat=is_chat,
    )


def _of_request(error: MeshError) -> Fault:
    fault = faults.of(error)
    if error.code == "usage" and "model" in error.message:
        fault.param = "model"
    return fault


# what a parameter may be


def text(name: str, value: Any) -> str:
    if type(value) is not str:
        raise Fault(f"{name} is a text", param=name)
    return value


def flag(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise Fault(f"{name} is true or false", param=name)
    return value


def integer(low: int, high: int = 1 << 20) -> Callable[[str, Any], Any]:
    def read(name: str, value: Any) -> int:
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            raise Fault(f"{name} is an integer from {low} to {high}", param=name)
        return value

    return read


def number(low: float, high: float) -> Callable[[str, Any], float]:
    def read(name: str, value: Any) -> float:
        if type(value) not in (int, float) or not low <= value <= high:  # which NaN is not either
            raise Fault(f"{name} is a number from {low:g} to {high:g}", param=name)
        return float(value)

    return read


def choice(name: str, value: Any, of: Collection[str]) -> str:
    if type(value) is not str or value not in of:
        raise Fault(f"{name} is one of {', '.join(of)}", param=name, code="unsupported_value")
    return value


def stops(name: str, value: Any) -> tuple[str, ...]:
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or len(given) > MAX_STOPS:
        raise Fault(f"{name} is a text or a list of at most {MAX_STOPS}", param=name)
    for one in given:
        if type(one) is not str or not 1 <= len(one) <= MAX_STOP:
            raise Fault(f"each of {name} is a text of 1 to {MAX_STOP} characters", param=name)
    return tuple(given)


def biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise Fault(f"{name} is an object of at most {MAX_BIASES} token ids", param=name)
    for key in value:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) < 1 << 31):
            raise Fault(f"{name} is an object from token ids to numbers", param=name)
    read = number(-MAX_BIAS, MAX_BIAS)
    return tuple((int(key), read(name, one)) for key, one in value.items())


def messages(name: str, value: Any) -> tuple[tuple[str, str], ...]:
    """(role, content) of each."""
    if not isinstance(value, list) or not value:
        raise Fault(f"{name} is a list of at least one message", param=name)
    turns: list[tuple[str, str]] = []
    for number_, one in enumerate(value):
        at = f"{name}.[{number_}]"
        if not isinstance(one, dict) or not isinstance(one.get("role"), str):
            raise Fault(f"{at} is an object with a role", param=at)
        role = choice(f"{at}.role", one["role"], ("system", "developer", "user", "assistant"))
        role = "system" if role == "developer" else role
        extra = [key for key in one if key not in ("role", "content", "name", "refusal") and one[key]]
        if extra:
            raise Fault(f"{at}.{extra[0][:80]} is not offered here", param=at, code="unsupported_parameter")
        turns.append((role, content(f"{at}.content", one.get("content"))))
    return tuple(turns)


def content(name: str, value: Any) -> str:
    """A text, or the texts of a list of parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise Fault(f"{name} is a text or a list of text parts", param=name)
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise Fault(f"{name} can have parts of type text alone", param=name, code="unsupported_value")
    return "".join(part["text"] for part in value)


def response_format(name: str, value: Any) -> str:
    """The grammar that an answer follows; empty for none."""
    match value:
        case {"type": "text"}:
            return ""
        case {"type": "json_object"}:
            return ANY_OBJECT
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            try:
                return to_gbnf(schema)
            except SchemaFault as error:
                raise Fault(f"the schema cannot be kept: {error}", param=name, code="unsupported_schema") from error
    raise Fault(f"{name} has the type text, json_object or json_schema, with its json_schema.schema", param=name)


def _stream_options(name: str, value: Any) -> bool:
    if not isinstance(value, dict) or set(value) - {"include_usage", "include_obfuscation"}:
        raise Fault(f"{name} may have include_usage", param=name)
    return flag(f"{name}.include_usage", value.get("include_usage", False))


def _legacy_logprobs(name: str, value: Any) -> int:
    if value is True or value is False:
        raise Fault(f"{name} is an integer", param=name)
    return integer(0, MAX_LOGPROBS)(name, value)  # type: ignore[no-any-return]


def _prompts(name: str, value: Any) -> list[dict[str, Any]]:
    """One text, several, one list of ids, or several."""
    if isinstance(value, str):
        return [{"prompt": value}]
    if isinstance(value, list) and value:
        if all(type(one) is int for one in value):
            return [{"tokens": ids(name, value)}]
        if len(value) <= MAX_CHOICES and all(isinstance(one, str) for one in value):
            return [{"prompt": one} for one in value]
        if len(value) <= MAX_CHOICES and all(isinstance(one, list) and one for one in value):
            return [{"tokens": ids(name, one)} for one in value]
    raise Fault(f"{name} is a text or a list of token ids, or at most {MAX_CHOICES} of either", param=name)


def ids(name: str, value: list[Any]) -> tuple[int, ...]:
    if not all(type(one) is int and 0 <= one < 1 << 31 for one in value):
        raise Fault(f"{name} has token ids that are none", param=name)
    return tuple(value)


def _no_tools(name: str, value: Any) -> None:
    if value != []:
        raise Fault("tools are not offered for this model", param=name, code="unsupported_parameter")
