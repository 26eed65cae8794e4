import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshnode.config import Home
from meshnode.errors import CODES
from meshnode.wire.invite import Invite
from tests.api.fake_node import FakeNode

from .conftest import Meshnode

NOWHERE = ("--listen", "127.0.0.1:0")


@pytest.fixture(autouse=True)
def no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHNODE_WORKER", sys.executable)  # a program; it is never started here


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("MODEL", "--layers", "5-3"), "bad_layers"),
        (("MODEL", "--layers", "3-3"), "bad_layers"),
        (("MODEL", "--layers", "3"), "bad_layers"),
        (("MODEL", "--layers", "-3"), "bad_layers"),
        (("MODEL", "--layers", "0-7"), "bad_layers"),
        (("MODEL", "--layers", "0-3,3-6"), "bad_layers"),
        (("--layers", "0-3"), "usage"),
        (("MODEL", "--listen", "somewhere"), "usage"),
        (("MODEL", "--listen", "127.0.0.1:70000"), "usage"),
        (("MODEL", "--listen", "/ip4/127.0.0.1/tcp/x"), "usage"),
        (("MODEL", "--threads", "-1"), "usage"),
        (("MODEL", "--sessions", "0"), "usage"),
        (("MODEL", "--context", "0"), "usage"),
        (("MODEL", "--context", "1000000"), "usage"),
        (("MODEL", "MODEL"), "usage"),
        (("MODEL", "--join", "none"), "not_found"),
        (("MODEL", "--join", ""), "usage"),
        (("/", "--layers", "0-1"), "not_a_file"),
        (("none.gguf",), "not_found"),
        ((__file__,), "bad_gguf"),
    ],
)
def test_refused_before_anything_is_bound(
    meshnode: Meshnode, tiny_model: Path, home: Home, arguments: tuple[str, ...], code: str
) -> None:
    ended = meshnode("serve", *(str(tiny_model) if a == "MODEL" else a for a in arguments))
    assert ended.err.startswith(f"error {code}: ")
    assert ended.status == CODES[code][0]
    assert ended.out == ""
    assert not home.path.exists()


def test_a_bad_model_among_several_is_named(meshnode: Meshnode, tiny_model: Path) -> None:
    ended = meshnode("serve", str(tiny_model), __file__)
    assert ended.err.startswith(f"error bad_gguf: {__file__}: ")


def test_a_bad_number_names_its_option_and_limits(meshnode: Meshnode) -> None:
    said = meshnode("serve", "--sessions", "0").err
    assert "--sessions" in said
    assert "1<=x<=256" in said
    assert "`meshnode serve --help`" in said


def test_no_worker_program(meshnode: Meshnode, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHNODE_WORKER", "/nowhere/worker")
    assert "error not_found: there is no worker program" in meshnode("serve", str(tiny_model), *NOWHERE).err


def test_a_second_node_on_one_home(meshnode: Meshnode, node: FakeNode) -> None:
    ended = meshnode("serve", *NOWHERE)
    assert ended.status == CODES["home_in_use"][0]
    assert f"process {os.getpid()}" in ended.err


def test_a_port_in_use(meshnode: Meshnode, home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = meshnode("serve", "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert ended.err.startswith("error port_in_use: ")
    assert ended.status == CODES["port_in_use"][0]
    assert home.holder() is None


def test_an_expired_invite(meshnode: Meshnode, tmp_path: Path) -> None:
    invite = tmp_path / "invite"
    invite.write_text(Invite("mesh-1", bytes(32), (), int(time.time()) - 1).to_line())
    invite.chmod(0o600)
    assert meshnode("serve", "--join", str(invite), *NOWHERE).err.startswith("error invite_expired: ")


@contextmanager
def serving(home: Home, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    environ = {key: value for key, value in os.environ.items() if key != "MESHNODE_INVITE"}
    command = [sys.executable, "-m", "meshnode", "serve", "--home", str(home.path), *NOWHERE, *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, env=environ) as process:
        try:
            yield process
        finally:
            process.kill()


def until_ready(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        if line == "ready\n":
            return lines
        lines.append(line.rstrip())
    assert process.stderr is not None
    raise AssertionError(process.stderr.read())


def test_an_entry_node_from_start_to_stop(meshnode: Meshnode, home: Home) -> None:
    with serving(home) as process:
        [peer, mesh, address, api] = [line.split()[1] for line in until_ready(process)]
        assert api.startswith("http://127.0.0.1:")
        assert address.startswith("/ip4/127.0.0.1/tcp/")
        assert address.endswith(f"/p2p/{peer}")
        status = json.loads(meshnode("status", "--json").out)
        assert (status["peer"], status["mesh_id"], status["pid"]) == (peer, mesh, process.pid)
        assert status["holdings"] == []
        line = meshnode("invite").out
        assert mesh in meshnode("invite", "--json").out
        assert meshnode("models").status == 0
        assert meshnode("run", "nothing", "hi").err.startswith("error unknown_model: ")
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert process.stderr is not None
        assert process.stderr.read() == "stopped\n"
    assert home.holder() is None
    known = home.known_mesh()
    assert known is not None
    assert known.mesh.mesh_id == mesh
    assert line.startswith("meshnode-invite-1.")
    with serving(home, "--json", "--lifeline") as process:  # the same node in the same mesh
        assert process.stdout is not None
        assert process.stdin is not None
        status = json.loads(process.stdout.readline())
        assert (status["peer"], status["mesh_id"]) == (peer, mesh)
        process.stdin.close()
        assert process.wait(5) == 0
        assert process.stdout.read() == ""


def test_a_damaged_home(meshnode: Meshnode, home: Home) -> None:
    home.create().mesh_path.write_text("{")
    assert meshnode("serve", *NOWHERE).err.startswith("error bad_home: ")
    home.mesh_path.unlink()
    home.create().key_path.write_bytes(b"short")
    assert meshnode("serve", *NOWHERE).err.startswith("error bad_home: ")
