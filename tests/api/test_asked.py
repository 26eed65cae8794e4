"""OpenAI's requests, read."""

from __future__ import annotations

from typing import Any

import pytest

from meshnode.api.openai import asked
from meshnode.api.openai.fault import Fault

HI = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def test_a_chat_with_all_that_is_offered() -> None:
    said = asked.chat(
        HI
        | {
            "messages": [
                {"role": "developer", "content": "be brief"},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                    "name": "jo",
                },
            ],
            "n": 2,
            "seed": -1,
            "stop": "x",
            "temperature": 0.5,
            "top_p": 0.9,
            "presence_penalty": 1,
            "frequency_penalty": -2,
            "logit_bias": {"5": -100},
            "max_completion_tokens": 7,
            "max_tokens": 9,
            "logprobs": True,
            "top_logprobs": 3,
            "response_format": {"type": "json_object"},
            "user": "someone",
            "stream": True,
            "stream_options": {"include_usage": True},
            "top_k": 40,
            "min_p": 0.1,
            "store": False,
            "functions": None,
            "tools": [],
            "repeat_penalty": 1.1,
        }
    )
    first, second = said.choices
    assert first.messages == (("system", "be brief"), ("user", "ab"))
    assert (first.seed, second.seed) == ((1 << 64) - 1, 0)
    assert (first.max_tokens, first.logprobs, first.top_k, first.presence_penalty) == (7, 3, 40, 1)
    assert first.logit_bias == ((5, -100),)
    assert "root ::= object" in first.grammar
    assert (said.stop, said.stream, said.include_usage, said.prefill_only) == (("x",), True, True, False)


def test_what_is_left_out_is_as_at_openai() -> None:
    [one] = asked.chat(HI).choices
    assert (one.temperature, one.top_p, one.max_tokens, one.logprobs, one.grammar) == (1.0, 1.0, None, None, "")
    assert asked.chat(HI).choices[0].seed != one.seed
    [one] = asked.completion({"model": "m", "prompt": "x"}).choices
    assert one.max_tokens == 16


def test_prompts_of_all_kinds() -> None:
    def prompts(prompt: Any) -> list[Any]:
        return [one.prompt or one.tokens for one in asked.completion({"model": "m", "prompt": prompt, "n": 1}).choices]

    assert prompts("a") == ["a"]
    assert prompts(["a", "b"]) == ["a", "b"]
    assert prompts([1, 2]) == [(1, 2)]
    assert prompts([[1], [2, 3]]) == [(1,), (2, 3)]
    assert asked.completion({"model": "m", "prompt": "a", "max_tokens": 0}).prefill_only
    assert asked.completion({"model": "m", "prompt": ["a", "b"], "n": 2, "echo": True}).echo == ("a", "a", "b", "b")


CHAT_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages.[0].content"),
    ({"messages": [{"role": "user", "content": ""}]}, "prompt"),
    ({"messages": [{"role": "god", "content": "x"}]}, "messages.[0].role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.[0].content",
    ),
    ({"model": None}, "model"),
    ({"model": ""}, "model"),
    ({"model": 5}, "model"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": -1}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": True}, "n"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": 5}, "stop"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"seed": 1 << 64}, "seed"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": []}, "logit_bias"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"store": True}, "store"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": "yes"}, "stream"),
    ({"temprature": 1}, "temprature"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"audio": {}}, "audio"),
]


@pytest.mark.parametrize(("change", "param"), CHAT_FAULTS)
def test_a_fault_names_its_parameter(change: dict[str, Any], param: str) -> None:
    with pytest.raises(Fault) as fault:
        asked.chat(HI | change)
    assert (fault.value.status, fault.value.kind) == (400, "invalid_request_error")
    assert fault.value.param == param


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1 << 31]}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "a" * 600_000}, None),
        ({"prompt": ["a"] * 16, "n": 2}, "n"),
    ],
)
def test_a_completions_fault_names_its_parameter(change: dict[str, Any], param: str | None) -> None:
    with pytest.raises(Fault) as fault:
        asked.completion({"model": "m", "prompt": "x"} | change)
    assert (fault.value.status, fault.value.param) == (400, param)
