"""The main job on real parts: separate processes, the real engine, a real model."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from .conftest import Lab, lab_of, mapped, open_files
from .exactness import SPLITS, answers
from .prompts import draw

GREEDY = ("--max-tokens", "48", "--temperature", "0")
SAMPLED = ("--max-tokens", "24", "--temperature", "0.9", "--top-p", "0.95", "--seed", "11")
PROMPTS = draw(seed=int(os.environ.get("MESHNODE_SEED", "2")), count=3)
ROUNDS = int(os.environ.get("MESHNODE_ROUNDS", "1"))  # more in `make soak`


@pytest.fixture(scope="module")
def whole(model: Path, worker_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one node with every layer says, and what it takes in memory."""
    with lab_of(tmp_path_factory.mktemp("whole"), model, layers="0-30") as lab:
        greedy = [lab.run(prompt, *GREEDY)["token_ids"] for prompt in PROMPTS]
        sampled = [lab.run(prompt, *SAMPLED)["token_ids"] for prompt in PROMPTS]
        assert together(lab) == [*greedy, greedy[0]]  # what the others are to do too, before memory is compared
        [holding] = lab.nodes()["node-1"]["holdings"]
        return {"greedy": greedy, "sampled": sampled, "memory": mapped(holding["worker"], model.name)}


def test_thirds_say_what_the_whole_says(thirds: Lab, whole: dict[str, Any]) -> None:
    said = [thirds.run(prompt, *GREEDY) for prompt in PROMPTS]
    assert [answer["token_ids"] for answer in said] == whole["greedy"]
    assert [hop["effective"] for hop in said[0]["route"]] == [[0, 10], [10, 20], [20, 30]]
    assert len({hop["peer"] for hop in said[0]["route"]}) == 3
    assert len(said[0]["receipts"]) == 3
    assert said[0]["usage"]["completion_tokens"] == len(said[0]["token_ids"])
    assert [thirds.run(prompt, *SAMPLED)["token_ids"] for prompt in PROMPTS] == whole["sampled"]
    assert whole["sampled"] != whole["greedy"]


@pytest.mark.parametrize("layers", SPLITS[1:])
def test_other_splits_do_too(model: Path, layers: str, whole: dict[str, Any]) -> None:
    assert answers(model, layers, PROMPTS[:2]) == whole["greedy"][:2]


def together(lab: Lab) -> list[list[int]]:
    """Four sessions at once: every prompt, and the first one twice."""
    asked = [*PROMPTS, PROMPTS[0]]
    running = [lab.start("run", "--model", str(lab.model), "--prompt", prompt, *GREEDY) for prompt in asked]
    return [json.loads(process.communicate(timeout=60)[0])["token_ids"] for process in running]


LEFT_BY_OTHERS = 16 << 20  # bytes that a worker keeps of other tests' grammars and batches; a third's cache has 60 MiB


@pytest.mark.parametrize("turn", range(ROUNDS))
def test_four_sessions_at_once_say_what_each_says_alone(thirds: Lab, whole: dict[str, Any], turn: int) -> None:
    assert together(thirds) == [*whole["greedy"], whole["greedy"][0]]


def test_a_stage_maps_and_takes_only_what_is_its_own(thirds: Lab, whole: dict[str, Any], model: Path) -> None:
    thirds.run(PROMPTS[0], "--max-tokens", "2")
    own_kv = 0
    for name, node in thirds.nodes().items():
        if name == "entry":
            assert not [path for path in open_files(node["pid"]) if path.endswith(".gguf")]
            continue
        [holding] = node["holdings"]
        memory = mapped(holding["worker"], model.name)
        assert 0 < memory["size"] <= 1.1 * holding["tensor_bytes"], (name, memory, holding)
        others_kv = holding["kv_bytes"] * 2  # of the two thirds that it does not hold
        most = whole["memory"]["anonymous"] - others_kv + LEFT_BY_OTHERS
        assert memory["anonymous"] <= most, (name, memory, whole["memory"])
        own_kv += holding["kv_bytes"]
    assert own_kv > 0


def test_an_answer_may_be_empty(thirds: Lab) -> None:
    said = thirds.run("Tell me a long story.", *GREEDY)  # which this model takes for a text that is at its end
    assert (said["text"], said["token_ids"], said["finish_reason"]) == ("", [], "stop")
    assert len(said["receipts"]) == 3


def test_logs_name_a_request_on_every_hop_and_neither_prompt_nor_path(thirds: Lab, model: Path) -> None:
    thirds.run("Xylophones of Quebec", "--max-tokens", "4")
    logs = [path.read_text() for path in thirds.folder.glob("*/node.log")]
    assert len(logs) == 4
    entry = next(log for log in logs if "a route of 3 hops" in log)
    request = re.findall(r"a route of 3 hops for \d+ tokens request=(\w{8})", entry)[-1]
    assert all(f"request={request}" in log for log in logs)
    for log in logs:
        assert "ylophone" not in log
        assert str(thirds.folder) not in log
        assert model.name not in log
        assert "meshnode/" not in log
