"""The JSON of answers: what is said of a whole one, and of each part of one that is streamed."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from .asked import Asked


@dataclass
class Said:
    """A token as it is told with log-probabilities. begin: where its text begins in the answer, in characters."""

    begin: int
    text: str
    told: dict[str, Any]  # {"logprob", "top": [{"id", "logprob", "bytes"}]}, "id"

    @property
    def bytes(self) -> list[int]:
        own = next((top["bytes"] for top in self.told["top"] if top["id"] == self.told["id"]), None)
        return list(self.text.encode()) if own is None else own

    def chat(self) -> dict[str, Any]:
        top = [_likely(one["bytes"]) | {"logprob": one["logprob"]} for one in self.told["top"]]
        return _likely(self.bytes) | {"logprob": self.told["logprob"], "top_logprobs": top[: self.told["asked"]]}


@dataclass
class Choice:
    """One answer as far as it has come."""

    index: int
    text: str = ""
    tokens: list[Said] = field(default_factory=list)
    finish: str | None = None


@dataclass
class Usage:
    prompt: int = 0
    completion: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
        }


class Shape:
    """Writes one request's answers."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._kind = "chat.completion" if asked.is_chat else "text_completion"
        prefix = "chatcmpl-" if asked.is_chat else "cmpl-"
        self._id = prefix + secrets.token_hex(12)
        self._created = int(time.time())
        # what every part begins with, written once: a part a token is what a stream costs
        start = json.dumps(self._top(self._kind + ".chunk" if asked.is_chat else self._kind))[:-1]
        self._start = f'data: {start}, "choices": ['
        self._usage = ', "usage": null}\n\n' if asked.include_usage else "}\n\n"

    def _top(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._asked.model}

    def whole(self, choices: list[Choice], usage: Usage, notes: list[dict[str, Any]]) -> dict[str, Any]:
        said = [self._choice(choice) for choice in choices]
        top = self._top(self._kind) | {"choices": said, "usage": usage.as_json()}
        return top | ({"meshnode": {"notes": notes}} if notes else {})

    def _choice(self, choice: Choice) -> dict[str, Any]:
        told = self.logprobs(choice.tokens)
        said: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish, "logprobs": told}
        if self._asked.is_chat:
            return said | {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
        return said | {"text": choice.text}

    def part(self, index: int, text: str, tokens: list[Said]) -> str:
        """An event of a stream, with text that has come."""
        told = json.dumps(self.logprobs(tokens)) if tokens else "null"
        what = f'"delta": {{"content": {json.dumps(text)}}}' if self._asked.is_chat else f'"text": {json.dumps(text)}'
        return f'{self._start}{{"index": {index}, {what}, "logprobs": {told}, "finish_reason": null}}]{self._usage}'

    def first(self, index: int) -> str:
        """What a stream of a chat's answer begins with."""
        rest = '"delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null'
        return f'{self._start}{{"index": {index}, {rest}}}]{self._usage}'

    def last(self, index: int, finish: str) -> str:
        what = '"delta": {}' if self._asked.is_chat else '"text": ""'
        return (
            f'{self._start}{{"index": {index}, {what}, "logprobs": null, "finish_reason": {json.dumps(finish)}}}]'
            f"{self._usage}"
        )

    def usage(self, usage: Usage) -> str:
        return f'{self._start}], "usage": {json.dumps(usage.as_json())}}}\n\n'

    def logprobs(self, tokens: list[Said]) -> dict[str, Any] | None:
        if not tokens:
            return None
        if self._asked.is_chat:
            return {"content": [said.chat() for said in tokens], "refusal": None}
        return {
            "tokens": [_decoded(said.bytes) for said in tokens],
            "token_logprobs": [said.told["logprob"] for said in tokens],
            "top_logprobs": [
                {_decoded(one["bytes"]): one["logprob"] for one in reversed(said.told["top"][: said.told["asked"]])}
                for said in tokens
            ],
            "text_offset": [said.begin for said in tokens],
        }


def _likely(piece: list[int]) -> dict[str, Any]:
    return {"token": _decoded(piece), "bytes": piece}


def _decoded(piece: list[int]) -> str:
    return bytes(piece).decode(errors="replace")
