import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshnode.config import Home
from meshnode.errors import CODES, MeshError
from meshnode.keys import NodeKey
from meshnode.mesh import KnownMesh, Mesh
from tests.api.fake_node import FakeNode, result

from .conftest import Meshnode


def test_text_and_nothing_else_in_a_pipe(meshnode: Meshnode, node: FakeNode) -> None:
    ended = meshnode("run", "smollm2", "hi", "--max-tokens", "5")
    assert (ended.status, ended.out, ended.err) == (0, "The answer is 42.\n", "")
    [asked] = node.requests
    assert (asked.prompt, asked.messages, asked.temperature, asked.seed) == ("hi", (), 0.0, 0)


def test_json(meshnode: Meshnode, node: FakeNode) -> None:
    ended = meshnode("run", "smollm2", "hi", "--max-tokens", "5", "--json")
    assert json.loads(ended.out) == result(node.requests[0])


def test_chat_and_sampling(meshnode: Meshnode, node: FakeNode) -> None:
    meshnode(
        *["run", "smollm2", "hi", "--chat", "--system", "brief", "--max-tokens", "1", "--temperature", "0.7"],
        *["--top-k", "40", "--top-p", "0.9", "--min-p", "0.05", "--seed", "7"],
    )
    [asked] = node.requests
    assert asked.messages == (("system", "brief"), ("user", "hi"))
    assert (asked.temperature, asked.top_k, asked.top_p, asked.min_p, asked.seed) == (0.7, 40, 0.9, 0.05, 7)


def test_a_seed_is_drawn_when_it_matters(meshnode: Meshnode, node: FakeNode) -> None:
    for _ in range(2):
        meshnode("run", "smollm2", "hi", "--max-tokens", "1", "--temperature", "1")
    assert node.requests[0].seed != node.requests[1].seed


def test_prompt_from_a_pipe(meshnode: Meshnode, node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, said, prompt in (((), b"hello\n", "hello"), (("-",), b"hello\n\n", "hello\n")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(said)))
        assert meshnode("run", "smollm2", *arguments, "--max-tokens", "1").status == 0
        assert node.requests[-1].prompt == prompt


@pytest.mark.parametrize(
    ("said", "code"),
    [(b"", "bad_prompt"), (b"\n", "bad_prompt"), (b"\xff\xfe", "bad_prompt"), (b"x" * 600_000, "context_exceeded")],
)
def test_bad_prompts(
    meshnode: Meshnode, node: FakeNode, monkeypatch: pytest.MonkeyPatch, said: bytes, code: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(said)))
    ended = meshnode("run", "smollm2")
    assert ended.status == CODES[code][0]
    assert ended.err.startswith(f"error {code}: ")
    assert node.requests == []


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("run", "smollm2", ""), "bad_prompt"),
        (("run", "smollm2", "\udcff"), "bad_prompt"),
        (("run", "", "hi"), "usage"),
        (("run", "smollm2", "hi", "--max-tokens", "0"), "usage"),
        (("run", "smollm2", "hi", "--temperature", "-1"), "usage"),
        (("run", "smollm2", "hi", "--temperature", "nan"), "usage"),
        (("run", "smollm2", "hi", "--system", "x"), "usage"),
        (("run", "./none.gguf", "hi"), "not_found"),
        (("run", "none.gguf", "hi"), "not_found"),
        (("run", "/", "hi"), "not_a_file"),
        (("run", "./" + "x" * 250 + ".gguf", "hi"), "not_found"),
        (("run", "smollm2", "hi", "--grammar", "none.gbnf"), "usage"),
        (("run", "smollm2", "hi", "--grammar", sys.executable), "bad_grammar"),
    ],
)
def test_refused_before_the_node_is_asked(
    meshnode: Meshnode, node: FakeNode, arguments: tuple[str, ...], code: str
) -> None:
    ended = meshnode(*arguments)
    assert ended.err.startswith(f"error {code}: ")
    assert ended.status == CODES[code][0]
    assert node.requests == []
    assert json.loads(meshnode(*arguments, "--json").out)["error"]["code"] == code


def test_what_the_node_refuses(meshnode: Meshnode, node: FakeNode) -> None:
    node.on_open = MeshError("context_exceeded", "3000 tokens do not fit 2048", hint="shorten it")
    ended = meshnode("run", "smollm2", "hi")
    assert (ended.status, ended.out) == (5, "")
    assert ended.err == "error context_exceeded: 3000 tokens do not fit 2048\n  shorten it\n"


def test_a_fault_on_the_way_begins_a_line(meshnode: Meshnode, node: FakeNode) -> None:
    node.fail_at = 3
    ended = meshnode("run", "smollm2", "hi", "--max-tokens", "5")
    assert ended.status == CODES["hop_failed"][0]
    assert ended.out == "The answer is\n"
    assert ended.err.startswith("error hop_failed: the middle is gone\n")
    ended = meshnode("run", "smollm2", "hi", "--max-tokens", "5", "--json")
    assert json.loads(ended.out)["error"]["code"] == "hop_failed"


def test_ctrl_c_and_sigterm_leave_nothing_running(node: FakeNode, home: Home) -> None:
    node.pace_s = 0.05
    for number in (signal.SIGINT, signal.SIGTERM):
        command = [sys.executable, "-m", "meshnode", "run", "smollm2", "hi", "--home", str(home.path)]
        with subprocess.Popen(
            [*command, "--max-tokens", "10000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as asking:
            try:
                assert asking.stdout is not None
                assert asking.stderr is not None
                assert asking.stdout.read(10) == "The answer"
                asking.send_signal(number)
                assert asking.wait(5) == 130
                assert asking.stderr.read().startswith("error cancelled")
            finally:
                asking.kill()
        ends = time.monotonic() + 2
        while node.runs and time.monotonic() < ends:
            time.sleep(0.02)
        assert node.runs == 0


def test_a_reader_that_leaves_cancels(node: FakeNode, home: Home) -> None:
    node.pace_s = 0.02
    command = f"{sys.executable} -m meshnode run smollm2 hi --home {home.path} --max-tokens 10000 | head -c 5"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30)
    assert (done.stdout, done.stderr) == ("The a", "")
    ends = time.monotonic() + 2
    while node.runs and time.monotonic() < ends:
        time.sleep(0.02)
    assert node.runs == 0


class TestWithoutANode:
    def test_says_so(self, meshnode: Meshnode) -> None:
        ended = meshnode("run", "smollm2", "hi")
        assert ended.status == CODES["no_node"][0]
        assert "--join" in ended.err

    def test_bad_joins(self, meshnode: Meshnode, tmp_path: Path, home: Home) -> None:
        bad = tmp_path / "bad"
        bad.write_text("garbage")
        bad.chmod(0o600)
        os.mkfifo(tmp_path / "fifo")
        for join, code in (
            (str(bad), "bad_invite"),
            (str(tmp_path / "none"), "not_found"),
            (str(tmp_path), "not_a_file"),
            (str(tmp_path / "fifo"), "not_a_file"),
            ("/ip4/999.0.0.1/tcp/1/p2p/x", "usage"),
            ("/ip4/127.0.0.1/tcp/1", "usage"),
            ("meshnode-invite-1.AAAA", "bad_invite"),
        ):
            ended = meshnode("run", "smollm2", "hi", "--join", join)
            assert ended.err.startswith(f"error {code}: "), join
            assert ended.status == CODES[code][0]
        assert not home.path.exists()

    def test_nobody_there(self, meshnode: Meshnode, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
        from meshnode.cli import run

        monkeypatch.setattr(run, "FIND_S", 0.5)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            peer = NodeKey.generate().peer
            at = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{peer}"
            ended = meshnode("run", "smollm2", "hi", "--join", at)
        assert ended.err.startswith(f"error unreachable: no member of public lets us in at {at}\n")
        assert ended.status == CODES["unreachable"][0]
        assert not home.path.exists()

    def test_a_known_mesh_is_not_changed_by_accident(self, meshnode: Meshnode, home: Home, tmp_path: Path) -> None:
        from meshnode.wire.invite import Invite

        home.remember(KnownMesh(Mesh.private()))
        path = tmp_path / "invite"
        path.write_text(Invite("mesh-other", bytes(32), (), int(time.time()) + 100).to_line())
        path.chmod(0o644)
        ended = meshnode("run", "smollm2", "hi", "--join", str(path))
        assert ended.status == CODES["bad_config"][0]
        assert "others can read" in ended.err
        path.write_text(Invite("mesh-other", bytes(32), (), int(time.time()) - 100).to_line())
        assert "error invite_expired" in meshnode("run", "smollm2", "hi", "--join", str(path)).err
