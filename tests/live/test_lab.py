"""The main job on real parts: separate processes, the real engine, a real model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from .conftest import MESHNODE, Lab, lab_of, mapped, open_files, runs
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
        assert memory["anonymous"] <= whole["memory"]["anonymous"] - others_kv, (name, memory, whole["memory"])
        own_kv += holding["kv_bytes"]
    assert own_kv > 0


def test_an_answer_may_be_empty(thirds: Lab) -> None:
    said = thirds.run("Tell me a long story.", *GREEDY)  # which this model takes for a text that is at its end
    assert (said["text"], said["token_ids"], said["finish_reason"]) == ("", [], "stop")
    assert len(said["receipts"]) == 3


def tell_a_story(lab: Lab) -> subprocess.Popen[str]:
    """A run that is far from its end when its first character comes."""
    ask = ("--model", str(lab.model), "--prompt", "Once upon a time, in a village by the sea,", "--max-tokens", "1500")
    return lab.start("run", *ask, json_output=False)


@pytest.mark.parametrize("turn", range(ROUNDS))
def test_ctrl_c_leaves_no_session_on_any_hop(thirds: Lab, turn: int) -> None:
    asked = tell_a_story(thirds)
    assert asked.stdout
    assert asked.stdout.read(1)  # it streams
    assert set(thirds.sessions().values()) == {1}
    asked.send_signal(signal.SIGINT)
    assert asked.wait(timeout=5) == 130
    ends = time.monotonic() + 2
    while any(left := thirds.sessions().values()) and time.monotonic() < ends:
        time.sleep(0.1)
    assert not any(left)


@pytest.mark.parametrize("turn", range(ROUNDS))
def test_a_node_that_is_killed_ends_the_answer_with_a_clear_error(model: Path, tmp_path: Path, turn: int) -> None:
    with lab_of(tmp_path, model, nodes=3) as lab:
        middle = lab.nodes()["node-2"]
        asked = tell_a_story(lab)
        assert asked.stdout
        assert asked.stderr
        assert asked.stdout.read(1)
        os.kill(middle["pid"], signal.SIGKILL)
        killed = time.monotonic()
        status = asked.wait(timeout=5)
        assert time.monotonic() - killed < 5
        error = asked.stderr.read()
        assert status == 9
        assert "hop_failed" in error
        assert middle["peer"] in error
        assert "Traceback" not in error

        refused = lab.run("hello", "--max-tokens", "4")["error"]  # the nodes stay up, and know what is missing
        assert refused["code"] == "no_route"
        assert "10-20" in refused["message"]


@pytest.mark.parametrize("turn", range(ROUNDS))
def test_the_hops_free_a_session_whose_entry_node_is_killed(model: Path, tmp_path: Path, turn: int) -> None:
    with lab_of(tmp_path, model, nodes=2) as lab:
        asked = tell_a_story(lab)
        assert asked.stdout
        assert asked.stdout.read(1)
        os.kill(lab.nodes()["entry"]["pid"], signal.SIGKILL)
        asked.communicate(timeout=5)
        time.sleep(5.0 + 1.0)  # the lab's time to live, and one second
        assert not any(lab.sessions().values())


def test_everything_ends_with_the_lab(model: Path, tmp_path: Path) -> None:
    with lab_of(tmp_path, model, nodes=2) as lab:
        pids = [node["pid"] for node in lab.nodes().values()]
        pids += [h["worker"] for node in lab.nodes().values() for h in node["holdings"]]
    assert not [pid for pid in pids if runs(pid)]


def test_one_question_brings_up_a_lab_and_takes_it_down(model: Path, tmp_path: Path) -> None:
    shape = ("--nodes", "3", "--layers", "0-10,10-20,20-30", "--home", str(tmp_path), "--json")
    ask = ("--model", str(model), "--prompt", "The capital of France is", "--max-tokens", "8", "--temperature", "0")
    command = [*MESHNODE, "lab", "run", *shape, *ask]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    said = json.loads(done.stdout)
    assert {"text", "token_ids", "prompt_token_ids", "finish_reason", "usage", "route", "timing", "receipts"} <= set(
        said
    )
    assert "Paris" in said["text"]
    assert {"peer", "holding", "effective", "epoch"} <= set(said["route"][0])
    assert {"ttft_s", "prefill_tok_s", "decode_tok_s"} <= set(said["timing"])
    assert not (tmp_path / "lab.json").exists()
