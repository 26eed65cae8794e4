"""Building the worker: caching on two levels, nothing half-made, faults that name the next step. On a toy engine."""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from meshnode.errors import MeshError
from meshnode.worker import build as builder
from meshnode.worker.patch import PatchError, apply

ENGINE = {
    "CMakeLists.txt": """
        cmake_minimum_required(VERSION 3.20)
        project(toy LANGUAGES C CXX)
        add_library(llama STATIC src/llama.cpp)
        foreach(name ggml ggml-cpu ggml-base ggml-more)
            add_library(${name} STATIC src/ggml.cpp)
        endforeach()
        add_dependencies(llama ggml ggml-cpu ggml-base ggml-more)
    """,
    "include/llama.h": "int answer();\n",
    "src/llama-ext.h": "\n",
    "src/llama.cpp": "int answer() {\n    return 41;\n}\n",
    "src/ggml.cpp": "int unused;\n",
}
PATCH = """From: someone
Subject: [PATCH] one more

---
 src/llama.cpp | 2 +-

diff --git a/src/llama.cpp b/src/llama.cpp
--- a/src/llama.cpp
+++ b/src/llama.cpp
@@ -1,3 +1,3 @@
 int answer() {
-    return 41;
+    return 42;
 }
"""
NATIVE = {
    "CMakeLists.txt": """
        cmake_minimum_required(VERSION 3.20)
        project(toy_worker LANGUAGES CXX)
        add_executable(meshnode-worker EXCLUDE_FROM_ALL worker.cpp)
        target_include_directories(meshnode-worker PRIVATE ${ENGINE}/include)
        target_link_libraries(meshnode-worker PRIVATE ${ENGINE}/lib/libllama.a)
    """,
    "worker.cpp": '#include "llama.h"\nint main() { return answer(); }\n',
    "test_x.cpp": "\n",
    "patches/0001-one-more.patch": PATCH,
}

load = builder.Pin.load


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def native(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A toy engine's sdist, which pip would have fetched, and our sources around it; an empty cache."""
    sdist = tmp_path / "toy-1.tar.gz"
    with tarfile.open(sdist, "w:gz") as tar:
        for name, text in {**{f"vendor/toy/{k}": v for k, v in ENGINE.items()}, "PKG-INFO": "toy"}.items():
            member = tarfile.TarInfo(f"toy-1/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    root = tmp_path / "native"
    write(root, NATIVE)
    sha256 = hashlib.sha256(sdist.read_bytes()).hexdigest()
    (root / "pin.toml").write_text(
        f'package = "toy"\nversion = "1"\nsha256 = "{sha256}"\nsource = "vendor/toy"\n'
        '[cmake]\nCMAKE_BUILD_TYPE = "Release"\n'
    )

    def download(self: builder.Builder, folder: Path) -> Path:
        return Path(shutil.copy(sdist, folder))

    monkeypatch.setattr(builder, "NATIVE", root)
    monkeypatch.setattr(builder.Pin, "load", classmethod(lambda cls, native=root: load(native)))
    monkeypatch.setattr(builder.Builder, "_download", download)
    monkeypatch.setenv("MESHNODE_CACHE", str(tmp_path / "cache"))
    return root


def run(path: Path) -> int:
    return subprocess.run([path], check=False).returncode


def test_from_nothing_then_from_the_cache(native: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert builder.find_worker() is None
    lines: list[str] = []
    worker = builder.worker_path(progress=lines.append)
    assert run(worker) == 42, "the patch is in it"
    assert "engine: 100 %" in lines
    assert "worker: 100 %" in lines
    assert builder.find_worker() == worker

    commands: list[str] = []
    original = builder.run

    def spy(command: list[str], *rest: Any) -> None:
        commands.append(" ".join(command))
        original(command, *rest)

    monkeypatch.setattr(builder, "run", spy)
    assert builder.worker_path() == worker
    assert commands == [], "nothing is run for what is in the cache"

    (native / "worker.cpp").write_text('#include "llama.h"\nint main() { return answer() + 1; }\n')
    changed = builder.worker_path()
    assert changed != worker
    assert run(changed) == 43
    assert run(worker) == 42, "what other checkouts use stays"
    assert all("source" not in command.split() for command in commands)
    assert not any("--target llama" in command for command in commands), "the engine is not compiled again"


def test_what_decides_the_key(native: Path) -> None:
    def keys() -> tuple[str, str]:
        made = builder.Builder.make("worker", None)
        return made.engine.name, made.folder.name

    first = keys()
    (native / "test_x.cpp").write_text("// a test changes\n")
    assert keys() == first
    (native / "worker.cpp").write_text("// ours changes\n")
    engine, worker = keys()
    assert engine == first[0]
    assert worker != first[1]
    for change in (
        lambda: (native / "patches/0002.patch").write_text(PATCH),
        lambda: (native / "pin.toml").write_text((native / "pin.toml").read_text() + 'GGML_NATIVE = "ON"\n'),
    ):
        before = keys()
        change()
        assert keys()[0] != before[0]
        assert keys()[1] != before[1]
    upstream = builder.Builder.make("upstream", None)
    assert upstream.engine.name != keys()[0]
    assert upstream.patches == ()


def test_options_of_the_engine_pass_through(native: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = builder.Builder.make("worker", None)
    monkeypatch.setenv("MESHNODE_CMAKE_ARGS", "-DGGML_LLAMAFILE=OFF '-DCMAKE_CXX_FLAGS:STRING=-O1 -DNOTHING=1'")
    other = builder.Builder.make("worker", None)
    assert other.pin.cmake == {
        "CMAKE_BUILD_TYPE": "Release", "GGML_LLAMAFILE": "OFF", "CMAKE_CXX_FLAGS": "-O1 -DNOTHING=1"
    }  # fmt: skip
    assert (other.engine != usual.engine, other.folder != usual.folder) == (True, True)
    assert other.engine_build != usual.engine_build, "its recipe is another"
    commands: list[Sequence[str]] = []
    original = builder.run

    def spy(command: Sequence[str], *rest: Any) -> None:
        commands.append(command)
        original(command, *rest)

    monkeypatch.setattr(builder, "run", spy)
    assert run(builder.worker_path()) == 42
    engine, worker = [command for command in commands if "-S" in command]
    assert {"-DGGML_LLAMAFILE=OFF", "-DCMAKE_CXX_FLAGS=-O1 -DNOTHING=1"} <= set(engine)
    assert {f"-DENGINE_BUILD={other.engine_build}", "-DCMAKE_CXX_FLAGS=-O1 -DNOTHING=1"} <= set(worker)
    assert (other.engine / "lib" / "libggml-more.a").exists(), "a backend's library goes with it"


@pytest.mark.parametrize("text", ["-DX", "GGML_CUDA=ON", "--fresh", "-G Ninja", "-D", "'-DX=1"])
def test_options_that_are_none(native: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MESHNODE_CMAKE_ARGS", text)
    with pytest.raises(MeshError) as refused:
        builder.Builder.make("worker", None)
    assert refused.value.code == "bad_config"


def test_a_failed_build_leaves_nothing_and_says_why(native: Path) -> None:
    (native / "worker.cpp").write_text("int main() { return oops; }\n")
    with pytest.raises(MeshError) as caught:
        builder.worker_path()
    assert caught.value.code == "build_failed"
    assert "oops" in caught.value.hint
    assert builder.find_worker() is None
    (native / "worker.cpp").write_text(NATIVE["worker.cpp"])
    assert run(builder.worker_path()) == 42


def test_a_patch_that_does_not_fit(native: Path) -> None:
    (native / "patches/0001-one-more.patch").write_text(PATCH.replace("return 41", "return 40"))
    with pytest.raises(MeshError, match=r"0001-one-more\.patch does not apply"):
        builder.worker_path()


def test_a_source_with_other_bytes_is_fetched_again(native: Path, tmp_path: Path) -> None:
    kept = tmp_path / "cache/engine/toy-1.tar.gz"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"not it")
    assert run(builder.worker_path()) == 42


def test_the_pinned_bytes_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = builder.Builder.make("worker", None)
    seen: list[str] = []

    def run_pip(command: list[str], *rest: object) -> None:
        seen.append((tmp_path / "requirements.txt").read_text())
        (tmp_path / "x.tar.gz").write_bytes(b"other bytes")

    monkeypatch.setattr(builder, "run", run_pip)
    with pytest.raises(MeshError, match="not the pinned one"):
        made._download(tmp_path)
    assert seen == [f"{made.pin.package}=={made.pin.version} --hash=sha256:{made.pin.sha256}\n"]


def once(root: Path, fill: Callable[[Path], None]) -> Path:
    made = builder.Builder("worker", root, *([None] * 3), lambda line: None)  # type: ignore[arg-type]
    made._once(root / "folder", fill)
    return root / "folder"


def test_two_builders_at_once_build_once(tmp_path: Path) -> None:
    calls = []

    def fill(out: Path) -> None:
        calls.append(out)
        time.sleep(0.2)
        (out / "done").touch()

    threads = [threading.Thread(target=once, args=(tmp_path, fill)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert (tmp_path / "folder/done").exists()


def test_what_a_killed_builder_left_goes(tmp_path: Path) -> None:
    left = tmp_path / ".folder.abc/out"
    left.mkdir(parents=True)

    def fail(out: Path) -> None:
        raise MeshError("build_failed", "no")

    with pytest.raises(MeshError):
        once(tmp_path, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.lock"]
    once(tmp_path, lambda out: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "folder.lock"]


def test_missing_tools_name_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)

    def fault() -> tuple[str, str]:
        with pytest.raises(MeshError) as caught:
            builder.Tools.find()
        return caught.value.code, caught.value.hint

    def tool(name: str, says: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{says}'\n")
        (tmp_path / name).chmod(0o755)

    assert fault() == ("missing_tool", "install the package cmake (apt install cmake)")
    tool("cmake", "cmake version 3.19.9")
    assert fault() == ("missing_tool", "install cmake >= 3.20")
    tool("cmake", "cmake version 3.20.0")
    assert fault()[1] == "install the package ninja-build (apt install ninja-build)"
    tool("ninja", "1.0")
    assert fault()[1] == "install the package gcc (apt install gcc)"
    tool("cc", "cc 1")
    assert fault()[1] == "install the package g++ (apt install g++)"
    tool("c++", "c++ 1")
    assert builder.Tools.find().generator == "Ninja"


def test_progress_of_both_generators() -> None:
    for lines in (
        [f"[{i}/78] Building CXX object" for i in range(79)],
        [f"[{i:3d}%] Building CXX object" for i in range(101)],
    ):
        said: list[str] = []
        report = builder.Percent("engine", said.append)
        for line in [*lines, "noise", "[x/y]"]:
            report(line)
        assert said[0] == "engine: 10 %"
        assert said[-1] == "engine: 100 %"
        assert len(said) == 10


def test_the_series_is_a_series() -> None:
    names = [path.name for path in builder.Builder.make("worker", None).patches]
    assert [name[:5] for name in names] == [f"{i + 1:04d}-" for i in range(len(names))]
    for path in builder.Builder.make("worker", None).patches:
        assert "src/models/" not in path.read_text(), "architectures are not edited one by one"


def test_patch_makes_files_and_inserts_lines(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("1\n2\n")
    made = "--- /dev/null\n+++ b/new\n@@ -0,0 +1,2 @@\n+a\n+b\n"
    apply(made + "--- a/old\n+++ b/old\n@@ -1,0 +2 @@\n+between\n", tmp_path)
    assert [(tmp_path / name).read_text() for name in ("new", "old")] == ["a\nb\n", "1\nbetween\n2\n"]
    with pytest.raises(PatchError, match="is there"):
        apply(made, tmp_path)


def test_patch_keeps_what_it_does_not_name(tmp_path: Path) -> None:
    text = "".join(f"{i}\n" for i in range(1, 21)) + "no end"
    write(tmp_path, {"f": text})
    patch = "--- a/f\n+++ b/f\n@@ -2,3 +2,2 @@\n 2\n-3\n 4\n@@ -18,2 +17,3 @@\n 18\n+new\n 19\n"
    assert apply(patch, tmp_path) == [tmp_path / "f"]
    expected = text.replace("\n3\n", "\n").replace("\n18\n", "\n18\nnew\n")
    assert (tmp_path / "f").read_text() == expected


@pytest.mark.parametrize(
    ("patch", "why"),
    [
        ("--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n 1\n-x\n+y\n", "line 2 is not what"),
        ("--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n 1\n", "malformed"),
        ("--- a/f\n+++ b/f\n@@ -1,1 +1,1 @@\n-1\n*2\n", "malformed"),
        ("--- a/f\n+++ b/f\n@@ -90,1 +90,1 @@\n-1\n+2\n", "out of order"),
        ("--- a/../f\n+++ b/../f\n@@ -1,1 +1,1 @@\n-1\n+2\n", "leaves its tree"),
        ("--- a/g\n+++ b/g\n@@ -1,1 +1,1 @@\n-1\n+2\n", "not there"),
        ("hello\n", "changes nothing"),
    ],
)
def test_patch_refuses(tmp_path: Path, patch: str, why: str) -> None:
    write(tmp_path, {"f": "1\n2\n3\n"})
    with pytest.raises(PatchError, match=why):
        apply(patch, tmp_path)
    assert (tmp_path / "f").read_text() == "1\n2\n3\n"
