"""Frames that nobody should send, thrown at a worker: every one is answered, and the worker lives.

    python -m tests.worker.fuzz --worker PROGRAM [--model FILE.gguf] [--seconds 60] [--seed 1] [--rounds N]

Seeded, in rounds: a round is a worker of its own, so `--seed S --rounds 1` repeats the one that failed. The tests run
it on the worker around the toy engine, with sanitizers; `make fuzz` on the real one, built with them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import make_fixtures
from meshnode.wire import worker as wire
from meshnode.wire import worker_messages as say

VECTORS = Path(__file__).parents[2] / "protocol" / "vectors" / "worker.json"
BATCHES = 40  # a round
AT_ONCE = 16  # frames of a batch
BATCH_BYTES = 48 << 10  # a pipe takes that while nobody reads
PATIENCE_S = 30.0  # for an answer
NUMBERS = (0, 1, 2, 3, 7, 8, 255, 256, 2**15, 2**16 - 1, 2**24, 2**30, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
GRAMMARS = ('root ::= "a" root | "b"', "root ::= [a-z]+", "root ::= root", "root ::= (((((", 'root ::= "' + "x" * 999)
ENVIRONMENT = {"MESHNODE_FAKE_TAME": "1", "GGML_NO_BACKTRACE": "1", "ASAN_OPTIONS": "detect_leaks=0"}


class Failure(Exception):
    """What the worker did that it must not; the message is for people."""


def seeds() -> list[tuple[int, bytes]]:
    """Kind and body of the frames of the vectors, sound and refused ones, but none that ends the framing."""
    vectors = json.loads(VECTORS.read_text())
    frames = [bytes.fromhex(v["hex"]) for group in ("frames", "refused") for v in vectors[group]]
    return [(struct.unpack_from("<H", data, 4)[0], data[wire.HEADER.size :]) for data in frames]


def meant(rng: random.Random, loaded: say.Loaded) -> say.Message:
    """What a node could mean, often not at the right time."""
    handle, begin, end = rng.randrange(5), *loaded.layers
    layers = (rng.choice([begin] * 9 + [begin + 1, -1]), rng.choice([end] * 9 + [end - 1, end + 1]))
    n = rng.choice([1, 1, 1, 2, loaded.max_step, loaded.max_step + 1])
    tokens = tuple(rng.choice([1, 2, 3, loaded.n_vocab - 1, rng.randrange(-2, loaded.n_vocab + 2)]) for _ in range(n))
    values = [rng.choice([0.0, 1.0, -1e4, 1e9, float("nan"), rng.uniform(-9, 9)]) for _ in range(loaded.n_embd)]
    residual = struct.pack(f"<{loaded.n_embd}f", *values) * min(n, 4)
    sampling = say.Sampling(
        rng.choice([0.0, 1.0]), rng.randrange(9), seed=rng.randrange(9), logprobs=rng.choice([None, 3]),
        logit_bias=rng.choice([(), ((1, 5.0),)]), grammar=rng.choice(["", "", *GRAMMARS]),
    )  # fmt: skip
    first = rng.choice([0] * 9 + [1, 1, 2, 3, loaded.n_ctx, 2**31 - 1, -1])
    if rng.random() < 0.5:
        return say.Step(handle, first, layers, rng.random() < 0.5, tokens=tokens)
    return rng.choice([
        say.Open(handle, sampling, rng.randrange(4), tokens[:3]),
        say.Open(handle, prompt=(1, 2, 3)),
        say.Fork(handle, rng.randrange(5), rng.randrange(4), sampling, 0, tokens[:2]),
        say.Step(handle, first, layers, rng.random() < 0.5, residual=residual),
        say.Truncate(handle, rng.choice([0, 0, 0, 1, 2, 2**32 - 1])),
        say.Close(handle),
        say.Tokenize("x<|end|>é" * rng.randrange(99), rng.random() < 0.5, rng.random() < 0.5),
        say.Tokenize(segments=((True, "<|im_end|> "), (False, " <|im_end|>" * rng.randrange(99)))),
        say.Pieces(tokens),
        say.DescribeChat(),
    ])  # fmt: skip


def mutated(rng: random.Random, body: bytes, other: bytes) -> bytes:
    data = bytearray(body)
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(7):
            case 0:
                del data[at : at + rng.choice([1, 4, 8, 64])]
            case 1:
                data[at:at] = rng.randbytes(rng.choice([1, 4, 8, 64]))
            case 2 | 3:
                size = rng.choice([1, 2, 4, 8])
                data[at : at + size] = (rng.choice(NUMBERS) % (1 << 8 * size)).to_bytes(size, "little")
            case 4 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 5:
                data[at:] = other[at:]
            case _:
                data[at:] = data[:at] * rng.randrange(3)
    return bytes(data[: BATCH_BYTES // AT_ONCE])


class Round:
    """A worker, from its start to its end."""

    def __init__(self, binary: Path, model: Path, seed: int, tally: Counter[str]) -> None:
        self.rng, self.tally, self.number = random.Random(seed), tally, 1
        self.corpus = seeds()
        self.reader = wire.FrameReader(1 << 30)
        self.answers: dict[int, say.Message] = {}
        s = model.stat()
        file = say.ModelFile(str(model), s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)
        self.load = say.Load((file,), (0, -1), 4, 64, 32, 1, wire.INVARIANT)
        self.process = subprocess.Popen(
            [binary],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | ENVIRONMENT,
        )

    def run(self) -> None:
        try:
            self._send([self._junk() for _ in range(AT_ONCE)])
            [loaded] = self._send([b"".join(wire.encode(self.load, 0))])
            if not isinstance(loaded, say.Loaded):
                raise Failure(f"the model was not loaded: {loaded}")
            for _ in range(BATCHES):
                self._send([self._frame(loaded) for _ in range(self.rng.randrange(1, AT_ONCE))])
            assert self.process.stdin is not None
            self.process.stdin.close()
            if self.process.wait(PATIENCE_S) != 0:
                raise self._gone()
        except (BrokenPipeError, subprocess.TimeoutExpired):
            raise self._gone() from None
        finally:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
                assert pipe is not None
                pipe.close()

    def _junk(self) -> bytes:
        kind, body = self.rng.choice(self.corpus)
        kind = self.rng.choice([kind] * 9 + [self.rng.randrange(1 << 16)])
        body = mutated(self.rng, body, self.rng.choice(self.corpus)[1])
        return wire.HEADER.pack(len(body), kind, 0, 0) + body

    def _frame(self, loaded: say.Loaded) -> bytes:
        if self.rng.random() < 0.2:
            return self._junk()
        whole = b"".join(wire.encode(meant(self.rng, loaded), 0))
        if self.rng.random() < 0.6 and len(whole) < BATCH_BYTES // AT_ONCE:
            return whole
        body = mutated(self.rng, whole[wire.HEADER.size :], self.rng.choice(self.corpus)[1])
        return wire.HEADER.pack(len(body), struct.unpack_from("<H", whole, 4)[0], 0, 0) + body

    def _send(self, frames: Sequence[bytes]) -> list[say.Message]:
        """The answers, one for each."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        numbers = range(self.number, self.number + len(frames))
        self.number += len(frames)
        numbered = [data[:8] + struct.pack("<Q", n) + data[16:] for n, data in zip(numbers, frames, strict=True)]
        self.process.stdin.write(b"".join(numbered))
        self.process.stdin.flush()
        ends = time.monotonic() + PATIENCE_S
        while not all(n in self.answers for n in numbers):
            if not select.select([self.process.stdout], [], [], max(0.0, ends - time.monotonic()))[0]:
                raise Failure(f"no answer within {PATIENCE_S:g} s")
            n = os.readv(self.process.stdout.fileno(), [self.reader.space()])
            if n == 0:
                raise self._gone()
            for kind, number, body in self.reader.received(n):
                if number in self.answers or number >= self.number:
                    raise Failure(f"an answer to no request: {number}")
                self.answers[number] = reply = wire.decode(kind, body)
                if number:
                    self.tally[reply.code if isinstance(reply, say.Error) else type(reply).__name__] += 1
        return [self.answers[n] for n in numbers]

    def _gone(self) -> Failure:
        self.process.kill()
        status = self.process.wait()
        assert self.process.stderr is not None
        said = self.process.stderr.read().decode(errors="replace")
        return Failure(f"the worker ended with {status}:\n{said[-6000:]}")


def fuzz(binary: Path, model: Path, seed: int, *, seconds: float = 1e9, rounds: int = 1 << 30) -> Counter[str]:
    """How often each kind of answer came. Raises Failure, which names the seed of its round."""
    tally: Counter[str] = Counter()
    ends = time.monotonic() + seconds
    for number in range(seed, seed + rounds):
        if time.monotonic() > ends:
            break
        try:
            Round(binary, model, number, tally).run()
        except Failure as failure:
            raise Failure(f"seed {number}: {failure}") from None
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.worker.fuzz")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1 << 30)
    parser.add_argument("--worker", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="a small one of random weights if not given")
    asked = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder:
            model = asked.model or make_fixtures.write("q8_0-tied", Path(folder))[0]
            tally = fuzz(asked.worker, model, asked.seed, seconds=asked.seconds, rounds=asked.rounds)
    except Failure as failure:
        print(f"FAIL {failure}")
        return 1
    print(json.dumps({"frames": tally.total(), "failed": 0} | dict(tally.most_common())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
