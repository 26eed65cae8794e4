import pytest

from meshnode.api.requests import RunRequest
from meshnode.errors import MeshError
from meshnode.wire import schema
from meshnode.wire.messages import MAX_TEXT, Sampling


def refused(value: object) -> str:
    with pytest.raises(MeshError) as error:
        RunRequest.from_json(value)
    assert error.value.message
    return error.value.code


def test_there_and_back() -> None:
    for request in (
        RunRequest("smollm2", "hi"),
        RunRequest("smollm2", messages=(("system", "be brief"), ("user", "hi")), temperature=0.7, seed=2**64 - 1),
    ):
        assert RunRequest.from_json(request.to_json()) == request


def test_the_defaults_are_greedy() -> None:
    assert RunRequest("m", "hi").sampling == Sampling()


def test_sampling_fits_the_wire() -> None:
    extreme = RunRequest("m", "hi", temperature=100, top_k=1 << 20, top_p=1, min_p=1, seed=(1 << 64) - 1)
    assert schema.encode_nested(extreme.sampling)
    assert RunRequest("m", "hi", temperature=0.7, top_p=0.95).sampling == Sampling(700_000, 0, 950_000)


@pytest.mark.parametrize(
    "change",
    [
        {"model": ""},
        {"model": "x" * 201},
        {"model": "a\nb"},
        {"model": 5},
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": 1.0},
        {"max_tokens": True},
        {"max_tokens": "5"},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "hot"},
        {"temperature": 10**400},
        {"top_k": -1},
        {"top_p": 1.1},
        {"min_p": None},
        {"seed": -1},
        {"seed": 1 << 64},
        {"max_token": 5},
    ],
)
def test_fields_out_of_bounds(change: dict[str, object]) -> None:
    assert refused({"model": "m", "prompt": "hi"} | change) == "usage"


@pytest.mark.parametrize("value", [None, [], "text", 5, {}, {"prompt": "hi"}])
def test_no_request(value: object) -> None:
    assert refused(value) == "usage"


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"prompt": ""},
        {"prompt": None},
        {"prompt": 5},
        {"prompt": "\ud800"},
        {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}]},
        {"messages": []},
        {"messages": "hi"},
        {"messages": ["hi"]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": ""}]},
        {"messages": [{"role": "root", "content": "hi"}]},
        {"messages": [{"role": "user", "content": "hi", "name": "x"}]},
        {"messages": [{"role": ["user"], "content": "hi"}]},
        {"messages": [{"role": "user", "content": "hi"}] * 1025},
    ],
)
def test_no_prompt(change: dict[str, object]) -> None:
    assert refused({"model": "m"} | change) == "bad_prompt"


def test_longer_than_any_context() -> None:
    assert RunRequest("m", "x" * MAX_TEXT)
    assert refused({"model": "m", "prompt": "x" * (MAX_TEXT + 1)}) == "context_exceeded"
    assert refused({"model": "m", "prompt": "é" * MAX_TEXT}) == "context_exceeded"
    half = {"role": "user", "content": "x" * (MAX_TEXT // 2 + 1)}
    assert refused({"model": "m", "messages": [half, half]}) == "context_exceeded"
