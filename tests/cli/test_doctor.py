import json
import os
import socket
from pathlib import Path

import pytest

from meshnode.cli import checks
from meshnode.config import Home
from meshnode.worker import variants
from tests.api.fake_node import FakeNode

from .conftest import Meshnode


@pytest.fixture(autouse=True)
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "worker"
    program.write_text("#!/bin/sh\necho hello\n")
    program.chmod(0o700)
    monkeypatch.setenv("MESHNODE_WORKER", str(program))
    return program


def told(meshnode: Meshnode, *arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    ended = meshnode("doctor", *arguments, "--json")
    document = json.loads(ended.out)
    assert document["healthy"] == (ended.status == 0)
    found = {finding["code"]: finding for finding in document["findings"]}
    assert all(finding["mend"] for finding in found.values() if finding["state"] != "ok")
    return ended.status, found


def test_a_sound_machine(meshnode: Meshnode, tiny_model: Path) -> None:
    status, found = told(meshnode, str(tiny_model))
    assert status == 0
    assert {"installed", "worker", "isa", "home_new", "disk", "model", "no_node", "port"} <= set(found)
    assert found.keys() & {"clock", "clock_free"}


def test_it_tells_people_too(meshnode: Meshnode, home: Home) -> None:
    home.create()
    home.path.chmod(0o755)
    ended = meshnode("doctor")
    assert ended.status == 1
    assert f"FAULT\thome_open\tothers can read {home.path}\n" in ended.out
    assert f"mend\thome_open\tchmod go= {home.path}\n" in ended.out


def test_a_key_that_others_read(meshnode: Meshnode, home: Home) -> None:
    home.create()
    home.key_path.touch(mode=0o644)
    status, found = told(meshnode)
    assert status == 1
    assert os.system(found["home_open"]["mend"]) == 0  # what it names mends it
    assert told(meshnode)[0] == 0


@pytest.mark.parametrize("script", ["exit 3", "true"])
def test_a_worker_that_says_nothing(meshnode: Meshnode, worker: Path, script: str) -> None:
    worker.write_text(f"#!/bin/sh\n{script}\n")
    status, found = told(meshnode)
    assert (status, found["worker_broken"]["state"]) == (1, "fault")


def test_a_cpu_that_is_too_old(meshnode: Meshnode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "cpu_flags", lambda: frozenset({"sse"}))
    assert "isa_too_low" in told(meshnode)[1]
    monkeypatch.setattr(variants, "cpu_flags", lambda: variants.VARIANTS["x86-64-v2"].flags)
    status, found = told(meshnode)
    assert (status, found["isa_slow"]["state"]) == (0, "note")


def test_a_port_that_is_taken(meshnode: Meshnode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, found = told(meshnode, "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert (status, found["port_in_use"]["state"]) == (1, "fault")


def test_files_that_cannot_be_served(meshnode: Meshnode, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    status, found = told(meshnode, str(tmp_path / "bad.gguf"), str(tmp_path / "none.gguf"))
    assert status == 1
    assert {"bad_gguf", "not_found"} <= set(found)


def test_no_room(meshnode: Meshnode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "DISK_BYTES", 1 << 60)
    assert "disk_low" in told(meshnode)[1]


def test_a_clock_of_long_ago() -> None:
    assert [finding.code for finding in checks.clock(now=0)] == ["clock_wrong"]


def test_a_package_that_differs(meshnode: Meshnode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.metadata, "requires", lambda name: ["trio==0.1", "no-such-package-here==1"])
    status, found = told(meshnode)
    assert status == 1
    assert "instead of 0.1" in found["packages_differ"]["message"]
    assert "no-such-package-here is missing" in found["packages_differ"]["message"]


def test_a_running_node(meshnode: Meshnode, node: FakeNode) -> None:
    node.holdings.append({"artifact": "sha256:00", "name": "m", "layers": [0, 1], "n_layer": 1, "state": "ready"})
    status, found = told(meshnode)
    assert status == 1  # the fake listens nowhere, and its models are not this one
    assert {"node", "not_listening", "not_public", "peers", "not_announced"} <= set(found)
    assert "port" not in found


def test_a_holding_that_failed() -> None:
    error = {"code": "worker_died", "message": "the worker ended", "hint": "ask again"}
    status = {
        "state": "degraded",
        "addresses": [],
        "holdings": [{"artifact": "a", "name": "m", "state": "failed", "error": error}],
    }
    model = {"artifact": "b", "name": "n", "missing": [[3, 4]]}
    found = {finding.code: finding for finding in checks.running(status, [], [model])}
    assert found["worker_died"].mend == "ask again"
    assert found["layers_missing"].message == "nobody holds 3-4 of n"
    assert found["alone"].state == "note"
