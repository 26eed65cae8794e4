"""status, peers, models, route, invite, stop, identify."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import make_fixtures
from meshnode.config import Home
from meshnode.errors import CODES
from meshnode.lab.process import start_time
from meshnode.wire.invite import Invite
from tests.api.fake_node import ARTIFACT, HOPS, PEERS, FakeNode

from .conftest import Meshnode


def test_status(meshnode: Meshnode, node: FakeNode) -> None:
    node.holdings = [
        {"artifact": ARTIFACT, "name": "a\x1bb", "layers": [0, 10], "n_layer": 30, "state": "hashing", "progress": 0.4},
        {"artifact": None, "name": "b", "layers": [0, 3], "n_layer": 3, "state": "failed"}
        | {"error": {"code": "x", "message": "y"}},
    ]
    node.runs = 1
    ended = meshnode("status")
    assert ended.status == 0
    lines = ended.out.splitlines()
    assert f"peer\t{node.peer}" in lines
    assert "holding\ta\\x1bb\t0-10\t30\thashing 40 %" in lines
    assert "holding\tb\t0-3\t3\tfailed: x: y" in lines
    assert "session\t0011223344556677\t1\t0-10\t7\thop" in lines
    assert "session\t0011223344556677\t1\t-\t7\tentry" in lines
    assert json.loads(meshnode("status", "--json").out) == node.status()


def test_home_by_option(meshnode: Meshnode, node: FakeNode, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHNODE_HOME", "/nowhere/at/all")
    assert meshnode("status").status == CODES["no_node"][0]
    assert meshnode("status", "--home", str(home.path)).status == 0


def test_peers(meshnode: Meshnode, node: FakeNode) -> None:
    assert [line.split("\t")[0] for line in meshnode("peers").out.splitlines()] == PEERS
    assert len(json.loads(meshnode("peers", "--json").out)["peers"]) == 3


def test_models(meshnode: Meshnode, node: FakeNode) -> None:
    assert meshnode("models").out == f"smollm2\t{ARTIFACT}\tllama\t30\t\tcomplete\t3 holders\t\n"
    node.complete = False
    assert "missing 10-20" in meshnode("models").out
    assert json.loads(meshnode("models", "--json").out)["models"][0]["missing"] == [[10, 20]]


def test_models_of_a_folder(meshnode: Meshnode, tiny_model: Path, tmp_path: Path) -> None:
    """Odd names, a set of shards, a copy, a link to a blob, and what is refused; no node is asked."""
    folder = tmp_path / "some models"
    shards = make_fixtures.write("f16-metadata-first", folder)
    odd = folder / "nai\u0308ve 模型\n'q\"🦙.gguf"
    odd.write_bytes(tiny_model.read_bytes())
    (folder / "blob").write_bytes(tiny_model.read_bytes())
    (folder / "link.gguf").symlink_to("blob")
    (folder / "broken.gguf").write_bytes(tiny_model.read_bytes()[:-1])
    artifact = json.loads(meshnode("identify", str(tiny_model), "--json").out)["artifact"]
    ended = meshnode("models", str(folder), str(tmp_path / "none"), "--json")
    said = json.loads(ended.out)
    assert ended.status == CODES["not_found"][0]
    assert {model["artifact"]: sorted(model["paths"]) for model in said["models"] if model["artifact"] == artifact} == {
        artifact: sorted([str(odd), str(folder / "link.gguf")])
    }
    [other] = [model for model in said["models"] if model["artifact"] != artifact]
    assert (other["artifact"][:7], other["n_layer"], other["architecture"]) == ("shards:", 4, "llama")
    assert other["bytes"] == sum(shard.stat().st_size for shard in shards)
    assert {Path(refused["path"]).name: refused["code"] for refused in said["refused"]} == {
        "broken.gguf": "bad_gguf",
        "none": "not_found",
    }
    ended = meshnode("models", str(folder))
    assert ended.status == 0  # nobody asked for that very file
    lines = ended.out.splitlines()
    assert len(lines) == 3  # the newline of a name is written out
    assert any("broken.gguf" in line and "bad_gguf" in line and "beyond the end" in line for line in lines)
    shards[2].unlink()
    ended = meshnode("models", str(folder), "--json")
    assert [r["code"] for r in json.loads(ended.out)["refused"] if "shards" in r["message"] or "shard" in r["code"]]


def test_route(meshnode: Meshnode, node: FakeNode) -> None:
    ended = meshnode("route", "smollm2")
    assert ended.status == 0
    assert ended.out.splitlines()[1] == f"1\t{PEERS[1]}\t10-20\t10-20"
    assert json.loads(meshnode("route", "smollm2", "--json").out)["hops"] == HOPS


def test_a_hop_in_use_is_not_among_the_unused(
    meshnode: Meshnode, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each layer every peer is judged: the head of the route does not hold what its tail does."""
    found = {
        "artifact": ARTIFACT,
        "complete": True,
        "hops": HOPS,
        "missing": [],
        "candidates": [
            {"peer": peer, "holding": [0, 10], "usable": False, "reason": "does not hold layer 20"}
            for peer in (PEERS[0], "12D3KooWOther")
        ],
    }

    async def route(model: str) -> dict[str, object]:
        return found

    monkeypatch.setattr(node, "route", route)
    ended = meshnode("route", "smollm2")
    assert [line.split("\t")[1] for line in ended.out.splitlines()] == [*PEERS, "12D3KooWOther"]


def test_no_route_says_why(meshnode: Meshnode, node: FakeNode) -> None:
    node.complete = False
    ended = meshnode("route", "smollm2")
    assert ended.status == CODES["no_route"][0]
    assert "busy: no session is free" in ended.out
    assert "error no_route: no route covers the layers 10-20" in ended.err
    ended = meshnode("route", "smollm2", "--json")
    assert ended.status == CODES["no_route"][0]
    assert json.loads(ended.out)["missing"] == [[10, 20]]


def test_unknown_model(meshnode: Meshnode, node: FakeNode) -> None:
    ended = meshnode("route", "other")
    assert ended.status == CODES["unknown_model"][0]
    assert ended.err.startswith("error unknown_model: ")


def test_invite(meshnode: Meshnode, node: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert meshnode("invite").out == "meshnode-invite-1.fake604800\n"
    assert meshnode("invite", "--expires", "12h").out == "meshnode-invite-1.fake43200\n"
    ended = meshnode("invite", "--expires", "soon")
    assert (ended.status, ended.err.split(":")[0]) == (2, "error usage")
    line = Invite("mesh-1", bytes(32), ("/ip4/127.0.0.1/tcp/1",), 99).to_line()

    async def invite(expires_s: float) -> str:
        return line

    monkeypatch.setattr(node, "invite", invite)
    out = tmp_path / "invite"
    os.umask(0)
    ended = meshnode("invite", "--out", str(out))
    assert (ended.status, ended.out) == (0, "")
    assert out.read_text() == line + "\n"
    assert out.stat().st_mode & 0o777 == 0o600
    said = json.loads(meshnode("invite", "--json").out)
    assert said == {"mesh_id": "mesh-1", "addresses": ["/ip4/127.0.0.1/tcp/1"], "expires": 99, "invite": line}
    ended = meshnode("invite", "--out", str(tmp_path / "no" / "folder"))
    assert ended.status == CODES["bad_output"][0]
    assert ended.err.startswith("error bad_output: --out: ")
    assert meshnode("invite", "--out", str(out)).status == 0  # one takes another's place
    for name, text in (("model.gguf", "GGUF"), ("empty", "")):
        (tmp_path / name).write_text(text)
        ended = meshnode("invite", "--out", str(tmp_path / name))
        assert (ended.status, ended.err.split(":")[0]) == (2, "error usage")
        assert (tmp_path / name).read_text() == text
    assert meshnode("invite", "--out", str(tmp_path)).status == 2


def test_stop_waits_for_the_process(meshnode: Meshnode, home: Home) -> None:
    home.create()
    program = [sys.executable, "-m", "tests.api.fake_serve", "serve", "--home", str(home.path)]
    with subprocess.Popen(program) as process:
        try:
            ends = time.monotonic() + 20
            while meshnode("status").status and time.monotonic() < ends:
                time.sleep(0.05)
            assert meshnode("stop").status == 0
            assert start_time(process.pid) is None
            assert not (home.path / "control.sock").exists()
        finally:
            process.kill()


@pytest.mark.parametrize("command", ["status", "serve", "run m hi", "stop", "identify FILE", "lab status", "invite"])
def test_homes_that_cannot_be(meshnode: Meshnode, tiny_model: Path, tmp_path: Path, command: str) -> None:
    words = [str(tiny_model) if word == "FILE" else word for word in command.split()]
    ended = meshnode(*words, "--home", "")
    assert ended.err.startswith("error usage: --home is empty\n")
    long = tmp_path / "/".join(["a" * 100] * 6)
    ended = meshnode(*words, "--home", str(long))
    assert ended.err.startswith("error bad_home: a home's path has at most 480 bytes")


def test_stop_waits_for_the_end(
    meshnode: Meshnode, node: FakeNode, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshnode.cli import stop

    monkeypatch.setattr(stop, "EXIT_S", 0.1)  # the fake node's process is this one
    ended = meshnode("stop", "--json")
    assert json.loads(ended.out)["stopped"]
    assert home.holder() is None
    assert meshnode("stop").status == CODES["no_node"][0]


def test_stop_says_when_it_does_not_end(meshnode: Meshnode, node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshnode.cli import stop

    monkeypatch.setattr(stop, "PATIENCE_S", 0.2)
    with monkeypatch.context() as patch:
        patch.setattr(node, "stop", lambda: None)
        ended = meshnode("stop")
    assert ended.status == CODES["deadline"][0]
    assert f"kill -9 {os.getpid()}" in ended.err


class TestIdentify:
    def test_a_model(self, meshnode: Meshnode, tiny_model: Path) -> None:
        said = json.loads(meshnode("identify", str(tiny_model), "--json").out)
        assert said["artifact"].startswith("sha256:")
        assert (said["architecture"], said["n_layer"]) == ("llama", 6)
        ended = meshnode("identify", str(tiny_model))
        assert f"identity\t{said['artifact']}" in ended.out.splitlines()

    def test_what_is_none(self, meshnode: Meshnode, tmp_path: Path) -> None:
        (tmp_path / "text.gguf").write_text("not a model at all")
        os.mkfifo(tmp_path / "fifo")
        for name, code in (("text.gguf", "bad_gguf"), ("fifo", "not_a_file"), (".", "not_a_file"), ("no", "not_found")):
            began = time.monotonic()
            ended = meshnode("identify", str(tmp_path / name))
            assert ended.err.startswith(f"error {code}: ")
            assert ended.status == CODES[code][0]
            assert len(ended.err.splitlines()) == 2
            assert time.monotonic() - began < 5

    def test_a_path_stands_for_its_identity(self, meshnode: Meshnode, node: FakeNode, tiny_model: Path) -> None:
        artifact = json.loads(meshnode("identify", str(tiny_model), "--json").out)["artifact"]
        meshnode("run", str(tiny_model), "hi", "--max-tokens", "1")
        assert node.requests[0].model == artifact


def test_rotating(meshnode: Meshnode, node: FakeNode) -> None:
    assert meshnode("invite", "--rotate").out == "meshnode-invite-1.fake604800\n"
    assert meshnode("invite", "--rotate", "--overlap", "0").status == 0
    assert meshnode("invite", "--rotate", "--overlap", "10m").status == 0
    assert node.rotations == [86400.0, 0.0, 600.0]
    assert meshnode("invite", "--overlap", "10m").status == 2
    assert meshnode("invite", "--rotate", "--overlap", "400d").status == 2
    assert len(node.rotations) == 3


def test_denying(meshnode: Meshnode, node: FakeNode) -> None:
    assert "denied" in meshnode("peers", "deny", PEERS[0]).err
    assert "denied " + PEERS[0] in meshnode("peers").err
    assert json.loads(meshnode("peers", "--json").out)["denied"] == [PEERS[0]]
    assert json.loads(meshnode("peers", "deny", PEERS[1], "--json").out) == {"denied": sorted(PEERS[:2])}
    assert meshnode("peers", "allow", PEERS[0]).status == 0
    assert node.denials == {PEERS[1]}
    assert meshnode("peers", "deny").status == 2
