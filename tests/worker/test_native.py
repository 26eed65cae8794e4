"""The worker process by itself, fed with raw frames: what a faulty node may send."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fake_worker import compile_native
from meshnode.wire import worker as wire
from meshnode.wire import worker_messages as say

VECTORS_FILE = Path(__file__).parents[2] / "protocol" / "vectors" / "worker.json"
VECTORS: dict[str, Any] = json.loads(VECTORS_FILE.read_text())


def frame(message: say.Message, number: int) -> bytes:
    return b"".join(wire.encode(message, number))


@pytest.fixture
def load(tmp_path: Path) -> bytes:
    return load_of(tmp_path, 4, 64, 32)


def load_of(tmp_path: Path, n_sessions: int, n_ctx: int, max_step: int) -> bytes:
    path = tmp_path / "toy"
    path.write_text("meshnode-fake 6 16 300")
    s = path.stat()
    stamp = (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)
    return frame(say.Load((say.ModelFile(str(path), *stamp),), (0, -1), n_sessions, n_ctx, max_step, 1, 0), 1)


def converse(binary: Path, sent: bytes) -> tuple[int, list[tuple[int, say.Message]], str]:
    """Exit status, (request id, reply) in order, log."""
    done = subprocess.run([binary], input=sent, capture_output=True, timeout=30)
    reader, replies, out = wire.FrameReader(1 << 30), [], done.stdout
    while out:
        space = reader.space()
        n = min(len(space), len(out))
        space[:n], out = out[:n], out[n:]
        replies += [(number, wire.decode(kind, body)) for kind, number, body in reader.received(n)]
    assert not reader.partial
    assert replies[0] == (0, say.Hello(wire.VERSION, "fake"))
    return done.returncode, replies[1:], done.stderr.decode()


def test_frames_and_sampling_fit_the_vectors(pytestconfig: pytest.Config) -> None:
    """Each frame at every byte split, each wrong one refused, under the sanitizers."""
    assert pytestconfig.cache is not None
    flags = ("-std=c++20", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover", "-Wall", "-Wextra", "-Werror")
    sources = ("test_frames.cpp", "frames.cpp", "sample.cpp", "grammar.cpp")
    test = compile_native(pytestconfig.cache.mkdir("native"), "test_frames", sources, flags)
    done = subprocess.run([test, VECTORS_FILE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(" 0 failures\n")


def test_a_long_prompt_lets_others_decode_between_its_chunks(fake_worker: Path, tmp_path: Path) -> None:
    steps = [(0, 0, (271,))]  # takes 100 ms, in which all else comes, the whole prompt first
    steps += [(0, 1 + 8 * chunk, (97,) * 8) for chunk in range(8)]
    steps += [(handle, position, (98,)) for handle in range(1, 5) for position in range(8)]
    sent = load_of(tmp_path, 5, 80, 8) + b"".join(frame(say.Open(handle), 2 + handle) for handle in range(5))
    for number, (handle, first, tokens) in enumerate(steps):
        sent += frame(say.Step(handle, first, (0, 6), tokens=tokens), 100 + number)
    _, replies, _ = converse(fake_worker, sent)
    assert all(isinstance(reply, say.Stepped) for number, reply in replies if number >= 100)
    order = [steps[number - 100][0] for number, _ in replies if number >= 100]
    chunks = [n for n, handle in enumerate(order) if handle == 0]
    assert len(chunks) == 9
    for a, b in itertools.pairwise(chunks[1:]):
        assert set(order[a:b]) == set(range(5)), order


def test_grammars(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.cache is not None
    sanitized = ("-fsanitize=address,undefined", "-fno-sanitize-recover")
    flags = ("-std=c++20", "-O1", *sanitized, "-Wall", "-Wextra", "-Werror")
    sources = ("test_grammar.cpp", "grammar.cpp", "sample.cpp")
    test = compile_native(pytestconfig.cache.mkdir("native"), "test_grammar", sources, flags)
    done = subprocess.run([test], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "grammar: 0 failures\n"), done.stderr


def test_the_end_of_input_is_the_end(fake_worker: Path) -> None:
    assert converse(fake_worker, b"") == (0, [], "")


def test_nothing_before_a_load_but_a_load(fake_worker: Path, load: bytes) -> None:
    early = [say.Open(1), say.Close(1), say.Truncate(1, 0), say.Pieces(()), say.Step(1, 0, (0, 1), tokens=(1,))]
    sent = b"".join(frame(m, 10 + n) for n, m in enumerate(early))
    status, replies, _ = converse(fake_worker, sent + load + load)
    assert status == 0
    faults = dict(replies)
    codes = [faults[10 + n].code for n in range(len(early))]  # type: ignore[union-attr]
    assert codes[:2] == ["bad_frame"] * 2
    assert set(codes) <= {"bad_frame", "unknown_session"}  # steps wait until after the load
    loads = [reply for number, reply in replies if number == 1]
    assert isinstance(loads[0], say.Loaded)
    assert isinstance(loads[1], say.Error)


@pytest.mark.parametrize(("files", "code"), [(512, "unreadable"), (513, "bad_frame")])
def test_the_largest_set_fits_a_load_and_no_larger_one_does(
    fake_worker: Path, monkeypatch: pytest.MonkeyPatch, files: int, code: str
) -> None:
    monkeypatch.setattr(wire, "MAX_FILES", files)
    asked = say.Load((say.ModelFile("/proc/self/fd/1023", *(2**63 - 1,) * 5),) * files, (0, -1), 4, 64, 32, 1, 0)
    assert len(frame(asked, 1)) < wire.UNLOADED_BOUND
    status, [(number, reply)], _ = converse(fake_worker, frame(asked, 1))
    assert (status, number, isinstance(reply, say.Error) and reply.code) == (0, 1, code)


@pytest.mark.parametrize("loaded", [False, True])
def test_every_bad_frame_is_answered_and_the_next_one_read(fake_worker: Path, load: bytes, loaded: bool) -> None:
    bad = [bytes.fromhex(v["hex"]) for v in VECTORS["refused"]]
    replies_as_requests = [bytes.fromhex(v["hex"]) for v in VECTORS["frames"] if v["message"] and v["kind"] == "hello"]
    bad = [data[:8] + n.to_bytes(8, "little") + data[16:] for n, data in enumerate(bad + replies_as_requests, 100)]
    sent = (load if loaded else b"") + b"".join(bad) + frame(say.Close(1), 2)
    status, replies, log = converse(fake_worker, sent)
    assert status == 0, log
    answers = dict(replies)
    for n in range(len(bad)):
        answer = answers[100 + n]
        assert isinstance(answer, say.Error)
        assert answer.code == "bad_frame"
    assert isinstance(answers[2], say.Closed if loaded else say.Error)


@pytest.mark.parametrize("vector", VECTORS["lost"], ids=[v["name"] for v in VECTORS["lost"]])
def test_lost_framing_ends_it_with_a_word(fake_worker: Path, vector: dict[str, Any]) -> None:
    status, _, log = converse(fake_worker, bytes.fromhex(vector["hex"]))
    assert status == 3
    assert log.startswith("worker: framing lost: ")
    assert log.count("\n") == 1


@pytest.mark.parametrize("cut", [1, 15, 16, 17, 60])
def test_input_that_ends_within_a_frame(fake_worker: Path, load: bytes, cut: int) -> None:
    status, _, log = converse(fake_worker, load[:cut])
    assert status == 3
    assert "the input ends within" in log


GRAMMARS = ("", "root ::= .*", "root ::= [a-z]", "root ::= root")


def any_message(rng: random.Random, number: int) -> say.Message:
    """Mostly what could be meant, often not at the right time."""
    handle = rng.randrange(5)
    layers = (rng.choice([0] * 12 + [3, -1, 2**31 - 1]), rng.choice([6] * 9 + [3, 7, -(2**31)]))
    first = rng.choice([0, 0, 0, 1, 2, 3, 2**31 - 1, -(2**31)])
    tokens = tuple(rng.choice([1, 2, 3] * 9 + [273, 299, 300, -1]) for _ in range(rng.choice([1, 1, 1, 2, 40])))
    rows = os.urandom(64 * rng.randrange(1, 4)) if rng.random() < 0.5 else bytes(64)
    sample = rng.random() < 0.5
    return rng.choice([
        say.Open(handle, say.Sampling(rng.choice([0.0, 1.0]), seed=number), 0, tokens[:3]),
        say.Fork(handle, rng.randrange(5), rng.choice([0, 0, 1, 2, 99]), say.Sampling(grammar=rng.choice(GRAMMARS))),
        say.Step(handle, first, layers, sample, tokens=tokens),
        say.Step(handle, first, layers, sample, tokens=tokens),
        say.Step(handle, first, layers, sample, residual=rows),
        say.Truncate(handle, rng.choice([0, 1, 2**32 - 1])),
        rng.choice([say.Close(handle), say.Tokenize("x" * rng.randrange(9), True, True), say.Pieces(tokens)]),
    ])  # fmt: skip


@pytest.mark.parametrize("seed", range(10))
def test_any_order_of_requests_gets_one_answer_each(fake_worker: Path, load: bytes, seed: int) -> None:
    rng, answered, stepped = random.Random(seed), 0, 0
    reader = wire.FrameReader(1 << 30)
    with subprocess.Popen(
        [fake_worker], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        sent = 1
        while sent < 1000:
            size = rng.randrange(1, 12)  # in flight at once
            batch = [load] if sent == 1 else [frame(any_message(rng, sent + n), sent + n) for n in range(size)]
            worker.stdin.write(b"".join(batch))
            worker.stdin.flush()
            expected = set(range(sent, sent + len(batch))) | ({0} if sent == 1 else set())
            sent += len(batch)
            while expected:
                for kind, number, body in reader.received(os.readv(worker.stdout.fileno(), [reader.space()])):
                    stepped += isinstance(wire.decode(kind, body), say.Stepped)
                    expected.remove(number)
                    answered += 1
        worker.stdin.close()
        assert worker.wait(timeout=10) == 0
    assert answered == sent
    assert stepped > 10


def test_sessions_that_run_together_come_to_sit_side_by_side(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.cache is not None
    sanitized = ("-fsanitize=address,undefined", "-fno-sanitize-recover")
    flags = ("-std=c++20", "-O1", *sanitized, "-Wall", "-Wextra", "-Werror")
    test = compile_native(pytestconfig.cache.mkdir("native"), "test_places", ("test_places.cpp",), flags)
    done = subprocess.run([test], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
