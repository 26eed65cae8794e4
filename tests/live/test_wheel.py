"""The wheel as a volunteer meets it: a fresh environment, no compiler, no checkout, and a mesh to join."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from pathlib import Path

import pytest

from meshnode.worker import variants, wheel

FIRST_TOKEN_S = 60.0  # from the end of the installation
BUILDERS = ("cc", "gcc", "g++", "c++", "clang", "cmake", "ninja", "make", "ld", "as")


@pytest.fixture(scope="module")
def made(worker_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with this machine's own worker under the level of its CPU: no variant is built for a test."""
    level = variants.fitting(variants.cpu_flags())
    assert level is not None
    return wheel.make(tmp_path_factory.mktemp("dist"), {level: worker_binary})


@pytest.mark.live
def test_a_wheel_has_what_it_owes(made: Path) -> None:
    assert made.name.endswith("-py3-none-manylinux_2_36_x86_64.whl")
    with zipfile.ZipFile(made) as archive:
        names = archive.namelist()
        notice = next(archive.read(name).decode() for name in names if name.endswith("licenses/native/NOTICE"))
        (program,) = (info for info in archive.infolist() if info.filename.endswith(variants.PROGRAM))
    assert "The ggml authors" in notice
    assert "GCC Runtime Library Exception" in notice
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert program.external_attr >> 16 & 0o111
    assert not [name for name in names if name.startswith(("tests/", "native/", "fixtures/"))]


@pytest.mark.live
@pytest.mark.timeout(240)
def test_it_serves_and_answers_without_a_compiler(made: Path, model: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", made], check=True, cwd=tmp_path)
    (libraries,) = environment.glob("lib/python*/site-packages")
    # What it depends on is taken from here, which saves half a minute: a path's own .pth, our checkout's, do not count.
    (libraries / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    path = tmp_path / "path"  # the system's programs without those that build
    path.mkdir()
    for name in ("sh", "env", "uname"):
        (path / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    bare = {"PATH": f"{environment / 'bin'}:{path}", "HOME": str(tmp_path), "MESHNODE_CACHE": str(tmp_path / "cache")}
    assert not any(shutil.which(name, path=bare["PATH"]) for name in BUILDERS)
    meshnode = environment / "bin" / "meshnode"

    def node(home: str, *rest: str) -> subprocess.Popen[str]:
        command = [meshnode, "serve", *rest, "--home", home, "--listen", "127.0.0.1:0", "--no-lan", "--lifeline"]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=bare, cwd=tmp_path)

    def wait_ready(running: subprocess.Popen[str]) -> None:
        assert running.stdout is not None
        for line in running.stdout:
            if line == "ready\n":
                return
        pytest.fail(f"the node ended with {running.wait()}")

    began = time.monotonic()
    with node("first") as first:
        try:
            wait_ready(first)
            invite = [meshnode, "invite", "--home", "first", "--out", "invite"]
            subprocess.run(invite, check=True, env=bare, cwd=tmp_path, capture_output=True)
            with node("second", str(model), "--join", "invite") as second:
                try:
                    wait_ready(second)
                    ask = [meshnode, "run", str(model), "The sky is", "--home", "first", "--max-tokens", "4"]
                    run = subprocess.run(ask, env=bare, cwd=tmp_path, capture_output=True, text=True)
                    assert run.returncode == 0, run.stderr
                    assert run.stdout.strip()
                    assert time.monotonic() - began < FIRST_TOKEN_S
                    assert not os.path.exists(bare["MESHNODE_CACHE"]), "nothing was built or fetched"
                finally:
                    assert second.stdin is not None
                    second.stdin.close()
        finally:
            assert first.stdin is not None
            first.stdin.close()
