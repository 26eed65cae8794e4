import os
import shutil
import subprocess
from pathlib import Path

import pytest

from meshnode.cli.service import unit_path
from meshnode.config import Home

from .conftest import Meshnode


@pytest.fixture
def lasting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Stands for a folder that a service sees, though tests live in a temporary one."""
    monkeypatch.setattr("meshnode.cli.service.HIDDEN", (str(tmp_path / "hidden"),))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("MESHNODE_HOME", str(tmp_path / "a home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """What a systemctl of our own was called with, a line a call."""
    folder = tmp_path / "bin"
    folder.mkdir()
    log = tmp_path / "calls"
    program = folder / "systemctl"
    program.write_text(f'#!/bin/sh\necho "$@" >> {log}\n[ ! -e {tmp_path}/refuse ] || {{ echo no bus >&2; exit 1; }}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return log


def test_dry_run_shows_a_unit_and_changes_nothing(meshnode: Meshnode, lasting: Path) -> None:
    ended = meshnode(
        "service", "install", "--dry-run", "dir with space/m%$.gguf", "--join=mesh.invite", "--layers", "0-10"
    )
    assert ended.status == 0
    [command] = [line for line in ended.out.splitlines() if line.startswith("ExecStart=")]
    assert f'"{lasting}/dir with space/m%%$$.gguf" "--join={lasting}/mesh.invite" "--layers" "0-10"' in command
    assert f'"--home" "{lasting}/a home"' in command
    assert not unit_path().exists()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here to ask")
def test_systemd_takes_the_unit(meshnode: Meshnode, lasting: Path) -> None:
    path = lasting / "meshnode.service"
    path.write_text(meshnode("service", "install", "--dry-run", "a model.gguf").out)
    path.chmod(0o644)
    told = {**os.environ, "XDG_RUNTIME_DIR": str(lasting)}
    done = subprocess.run(
        ["systemd-analyze", "--user", "verify", str(path)], capture_output=True, text=True, env=told, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_install_starts_it_and_uninstall_keeps_the_home(meshnode: Meshnode, lasting: Path, calls: Path) -> None:
    assert meshnode("service", "install", "--layers", "all").status == 0
    assert "ExecStart=" in unit_path().read_text()
    home = Home(lasting / "a home")
    home.key_path.write_bytes(b"k" * 32)
    assert meshnode("service", "uninstall", "--dry-run").status == 0
    assert unit_path().exists()
    assert meshnode("service", "uninstall").status == 0
    assert not unit_path().exists()
    assert home.key_path.read_bytes() == b"k" * 32
    assert calls.read_text().splitlines() == [
        "--user daemon-reload",
        "--user enable meshnode.service",
        "--user restart meshnode.service",
        "--user disable --now meshnode.service",
        "--user daemon-reload",
    ]
    assert meshnode("service", "uninstall").err.startswith("error not_found")


def test_what_systemctl_refuses_is_said(meshnode: Meshnode, lasting: Path, calls: Path) -> None:
    (lasting / "refuse").touch()
    ended = meshnode("service", "install")
    assert ended.err.startswith("error missing_tool: systemctl daemon-reload: no bus\n")


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("--layerz", "0-10"), "No such option"),
        (("--join", "meshnode-invite-1.abc"), "an invite in a unit"),
        (("--join", "-"), "stdin is nothing"),
        (("hidden/m.gguf",), "a service does not see"),
        (("bad\nname.gguf",), "cannot be written into a unit"),
    ],
)
def test_refused(meshnode: Meshnode, lasting: Path, arguments: tuple[str, ...], fault: str) -> None:
    ended = meshnode("service", "install", "--dry-run", *arguments)
    assert ended.err.startswith("error usage: ")
    assert fault in ended.err
    assert not unit_path().exists()
