"""The lab's commands on real nodes with the toy worker."""

import json
import time
from pathlib import Path

import pytest

from meshnode.errors import CODES
from meshnode.lab.process import start_time

from .conftest import Meshnode


@pytest.fixture
def lab(tmp_path: Path, fake_worker: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESHNODE_WORKER", str(fake_worker))
    monkeypatch.setenv("MESHNODE_FAKE_SHAPE", "6 64 320")
    return tmp_path / "lab"


def test_up_run_status_down(meshnode: Meshnode, tiny_model: Path, lab: Path) -> None:
    at = ("--home", str(lab))
    try:
        up = json.loads(meshnode("lab", "up", "--model", str(tiny_model), "--layers", "0-4,2-6", "--json", *at).out)
        assert [node["name"] for node in up["nodes"]] == ["node-1", "node-2", "entry"]
        status = json.loads(meshnode("lab", "status", "--json", *at).out)
        assert [[h["layers"] for h in node["holdings"]] for node in status["nodes"]] == [[[0, 4]], [[2, 6]], []]
        assert {"name", "pid", "peer", "home", "holdings", "sessions"} <= set(status["nodes"][0])
        ended = meshnode("lab", "up", "--model", str(tiny_model), *at)
        assert ended.status == CODES["home_in_use"][0]

        ask = ("lab", "run", "--prompt", "hello", "--max-tokens", "3", *at)
        said = json.loads(meshnode(*ask, "--model", str(tiny_model), "--json").out)
        (begin, cut), (cut_too, end) = (hop["effective"] for hop in said["route"])
        assert (begin, end) == (0, 6)
        assert 2 <= cut == cut_too <= 4  # where, the faster of the two decides
        assert len(said["token_ids"]) == 3
        assert json.loads(meshnode(*ask, "--model", up["artifact"][7:17], "--json").out)["text"] == said["text"]
        ended = meshnode(*ask, "--model", str(tiny_model), "--details")
        assert ended.out == said["text"] + "\n"
        assert "2 receipts, checked and countersigned" in ended.err

        assert meshnode(*ask, "--model", str(tiny_model), "--nodes", "3").err.startswith("error bad_config: ")
        ended = meshnode("lab", "run", "--model", str(tiny_model), "--prompt", "x" * 5000, *at)
        assert ended.err.startswith("error context_exceeded: ")
        assert json.loads(meshnode(*ask, "--json").out)["text"] == said["text"]  # the lab's own model
        assert meshnode(*ask, "--numerics", "fast").err.startswith("error bad_config: ")
        assert meshnode(*ask, "--model", "other").err.startswith("error unknown_model: ")
        assert meshnode("status", "--home", up["nodes"][2]["home"]).status == 0
    finally:
        ended = meshnode("lab", "down", *at)
    assert ended.status == 0
    assert all(start_time(node["pid"]) is None for node in up["nodes"])
    assert meshnode("lab", "status", *at).err.startswith("error no_node: ")
    assert meshnode(*ask).err.startswith("error usage: no lab is up")


def test_for_one_question(meshnode: Meshnode, tiny_model: Path, lab: Path) -> None:
    shape = ("--model", str(tiny_model), "--nodes", "1", "--home", str(lab))
    ended = meshnode("lab", "run", *shape, "--prompt", "hello", "--chat", "--max-tokens", "2", "--json")
    said = json.loads(ended.out)
    assert said["usage"]["completion_tokens"] == 2
    assert list((lab / "passing").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--layers", "0-2,3-6"), "bad_layers"),
        (("--layers", "0-2,2-7"), "bad_layers"),
        (("--layers", "0-2,6-2"), "bad_layers"),
        (("--layers", "0-6", "--nodes", "2"), "bad_layers"),
        (("--nodes", "0"), "usage"),
        (("--nodes", "7"), "bad_layers"),
        (("--prompt", ""), "bad_prompt"),
        (("--max-tokens", "0"), "usage"),
        (("--model", "none.gguf"), "not_found"),
        (("--model", "/"), "not_a_file"),
    ],
)
def test_refused_before_anything_starts(
    meshnode: Meshnode, tiny_model: Path, lab: Path, arguments: tuple[str, ...], code: str
) -> None:
    began = time.monotonic()
    common = ("--model", str(tiny_model), "--prompt", "hi", "--home", str(lab))
    ended = meshnode("lab", "run", *common, *arguments)
    assert ended.err.startswith(f"error {code}: ")
    assert ended.status == CODES[code][0]
    assert json.loads(meshnode("lab", "run", *common, *arguments, "--json").out)["error"]["code"] == code
    assert time.monotonic() - began < 5
    assert not lab.exists()
