"""What goes wrong on real parts: killed nodes, killed entry nodes, Ctrl-C; and what is left of a lab."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from .conftest import MESHNODE, Lab, lab_of, runs

ROUNDS = int(os.environ.get("MESHNODE_ROUNDS", "1"))  # more in `make soak`


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
