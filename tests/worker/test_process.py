"""What goes wrong around the process: its start, its hello, its file, its parent."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from meshnode.artifact.files import FileStamp
from meshnode.errors import MeshError
from meshnode.wire import worker as wire
from meshnode.wire import worker_messages as say
from meshnode.worker import LoadSpec, Sampling, open_worker
from meshnode.worker.process import describe_exit, environment

Spec = Callable[..., LoadSpec]


async def failure(binary: Path, spec: LoadSpec, **options: float) -> MeshError:
    with pytest.raises(MeshError) as raised:
        async with open_worker(binary, spec, **options):
            pass
    return raised.value


def script(folder: Path, body: str) -> Path:
    """A worker of a few lines of Python; `say(bytes)` writes them out."""
    path = folder / "worker.py"
    start = "import os, sys, time\ndef say(data): os.write(1, data)\n"
    path.write_text(f"#!{sys.executable} -I\n{start}{body}\n")
    path.chmod(0o755)
    return path


def hello(version: int = wire.VERSION) -> str:
    return repr(b"".join(wire.encode(say.Hello(version, "toy"), 0)))


def answer(data: list[int]) -> str:
    """To the first request."""
    return f"say({hello()}); os.read(0, 999); say(bytes({data})); time.sleep(9)"


@pytest.mark.parametrize("field", ["device", "inode", "size", "mtime_ns", "ctime_ns"])
async def test_another_state_of_the_file_is_refused(fake_worker: Path, spec: Spec, field: str) -> None:
    asked = spec()
    [file] = asked.files
    stamp = dataclasses.replace(file.stamp, **{field: getattr(file.stamp, field) + 1})
    changed = dataclasses.replace(file, stamp=stamp)
    for files in ([changed], [file, changed, file]):
        error = await failure(fake_worker, dataclasses.replace(asked, files=files))
        assert error.code == "identity_changed"


async def test_a_write_in_place_is_refused_a_rename_is_not_seen(fake_worker: Path, spec: Spec, tmp_path: Path) -> None:
    asked = spec()
    other = tmp_path / "other"
    other.write_text("meshnode-fake 9 16 300")
    os.rename(other, tmp_path / "toy.gguf")
    [file] = asked.files
    file.stamp = FileStamp.of(os.fstat(file.fd))  # a rename over the path changes the old inode's ctime alone
    async with open_worker(fake_worker, asked) as worker:
        assert worker.loaded.n_layer == 6
    asked = spec()
    with os.fdopen(os.open(tmp_path / "toy.gguf", os.O_WRONLY), "w") as writer:
        writer.write("meshnode-fake 7")
    assert (await failure(fake_worker, asked)).code == "identity_changed"


@pytest.mark.parametrize(
    ("content", "layers", "expected"),
    [
        ("meshnode-fake 0 16 300", None, "bad_model"),
        ("meshnode-fake 6 16 300", (3, 7), "bad_layers"),
        ("meshnode-fake 6 16 300", (4, 4), "bad_layers"),
        ("meshnode-fake 6 16 300", (5, 2), "bad_layers"),
        ("meshnode-fake 6 16 300", (-3, 2), "bad_layers"),
    ],
)
async def test_what_cannot_be_loaded(
    fake_worker: Path, spec: Spec, content: str, layers: tuple[int, int] | None, expected: str
) -> None:
    assert (await failure(fake_worker, spec(content, layers=layers))).code == expected


async def test_a_spec_that_makes_no_sense_starts_nothing(tmp_path: Path, spec: Spec) -> None:
    assert (await failure(tmp_path / "none", spec(numerics="exact"))).code == "bad_config"
    assert (await failure(script(tmp_path, f"say({hello()}); time.sleep(9)"), spec(n_sessions=0))).code == "bad_frame"


async def test_no_such_binary_and_no_program(tmp_path: Path, spec: Spec) -> None:
    before = os.listdir("/proc/self/fd")
    asked = spec()
    for binary in (tmp_path / "none", tmp_path, tmp_path / "toy.gguf"):
        error = await failure(binary, asked)
        assert (error.code, str(tmp_path) in error.message) == ("worker_died", False)
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1


@pytest.mark.parametrize(
    ("body", "expected", "words"),
    [
        ("", "worker_died", "status 0"),
        ("sys.exit(9)", "worker_died", "status 9"),
        ("os.kill(os.getpid(), 11)", "worker_died", "SIGSEGV"),
        ("say(b'usage: worker [OPTION]...\\n'); time.sleep(9)", "worker_died", "no reply"),
        (f"say({hello(version=1)}); time.sleep(9)", "version_mismatch", "version 1"),
        (f"say({hello()[:-3]}'); os.close(1); time.sleep(9)", "worker_died", "closed its output"),
        (f"say({hello()}); say({hello()}); time.sleep(9)", "worker_died", "no request"),
        (answer([0, 0, 0, 0, 0x82, 0, 0, 0, 1] + [0] * 7), "worker_died", "another's kind"),
        (answer([0, 0, 0, 0, 0x90, 0, 0, 0, 1] + [0] * 7), "worker_died", "unknown kind"),
        (answer([0, 0, 0, 0, 0x82, 0, 0, 0, 2] + [0] * 7), "worker_died", "no request"),
        (answer([255] * 16), "worker_died", "no reply"),
        (f"say({hello()}); time.sleep(60)", "worker_hung", "did not load"),
        ("time.sleep(60)", "worker_hung", "did not load"),
    ],
)  # fmt: skip
async def test_a_worker_that_is_none(tmp_path: Path, spec: Spec, body: str, expected: str, words: str) -> None:
    began = trio.current_time()
    patience = 1.0 if expected == "worker_hung" else 20.0
    error = await failure(script(tmp_path, body), spec(), load_timeout=patience)
    assert error.code == expected
    assert words in error.message
    assert trio.current_time() - began < 5


async def test_its_log_is_kept_and_goes_to_debug(tmp_path: Path, spec: Spec, caplog: pytest.LogCaptureFixture) -> None:
    body = f"say({hello()})\nfor n in range(50): os.write(2, b'line %d \\xff\\n' % n)\nos.write(2, b'x' * 20000)"
    with caplog.at_level(logging.DEBUG, "meshnode.worker"):
        error = await failure(script(tmp_path, body), spec())
    assert "line" not in error.message
    assert any("line 49 �" in record.message for record in caplog.records)
    assert all(
        record.levelno == logging.DEBUG for record in caplog.records if record.name.startswith("meshnode.worker")
    )
    assert max(len(record.message) for record in caplog.records) < 9000


def test_exits_are_described() -> None:
    assert describe_exit(-9) == "the worker was ended by SIGKILL"
    assert describe_exit(-7) == "the worker was ended by SIGBUS"
    assert describe_exit(-63).endswith("signal 63")
    assert describe_exit(3).endswith("status 3: it could not read its input")


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.setenv("KEPT", "1")
    made = environment()
    assert "OMP_NUM_THREADS" not in made
    assert (made["GOMP_SPINCOUNT"], made["GGML_NO_BACKTRACE"], made["KEPT"]) == ("5000", "1", "1")


async def test_it_does_not_end_when_a_helper_thread_does(
    fake_worker: Path, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker dies with the thread that started it; trio's helper threads end when idle, here sooner than in 10 s."""
    monkeypatch.setattr("trio._core._thread_cache.IDLE_TIMEOUT", 0.05)
    async with open_worker(fake_worker, spec()) as worker:
        await trio.to_thread.run_sync(lambda: None)
        await trio.sleep(0.3)
        await worker.open(1, Sampling())


def test_it_dies_with_its_parent(fake_worker: Path, tmp_path: Path) -> None:
    (tmp_path / "toy").write_text("toy")
    parent = f"""
import trio
from pathlib import Path
from meshnode.artifact.files import open_file
from meshnode.worker import LoadSpec, Sampling, open_worker
async def main():
    file = open_file({str(tmp_path / "toy")!r})
    async with open_worker(Path({str(fake_worker)!r}), LoadSpec([file])) as worker:
        await worker.open(1, Sampling())
        print(worker.pid, flush=True)
        await worker.step(1, 0, (0, 6), tokens=[272])  # hangs: its input is not read any more
trio.run(main)
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = process.stdout.readline().strip().decode()
        assert pid in os.listdir("/proc")
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 2
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(pid)


def alive(pid: str) -> bool:
    """Not even as a zombie that its new parent has not reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
