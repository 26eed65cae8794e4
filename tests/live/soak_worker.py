"""Random requests to one worker, every answer held against a fresh worker's: make soak-worker OPS=10000 SEED=1

What a session holds is kept here as plain lists. A fresh worker is given that at once, in one prefill, and then asked
the very same step: under invariant numerics it has to give the same bits, the same token, or the same refusal.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import trio

import fetch_model
from meshnode.errors import MeshError
from meshnode.wire import worker_messages as say
from meshnode.worker import Sampling, Worker
from meshnode.worker.build import worker_path
from meshnode.worker.conversation import _Call

from .test_worker_live import loaded

VECTORS = Path(__file__).parents[2] / "protocol" / "vectors" / "worker.json"
SHAPE = {"n_sessions": 8, "n_ctx": 96, "max_step": 32}
HANDLES = range(10)  # more than there are places
VERIFY_EVERY = 64  # answers
FRESH_EVERY = 1024
GRAMMAR = r'root ::= ("[" [a-z0-9 ]{1,9} "]" [ \n]?){1,6}'
SAMPLINGS = (
    Sampling(),
    Sampling(logprobs=3, repeat_penalty=1.2, logit_bias=((5, 2.0), (4000, -3.0))),
    Sampling(temperature=0.9, top_k=50, typical_p=0.9, min_p=0.01, seed=5, logprobs=0),
    Sampling(temperature=1.2, top_p=0.9, frequency_penalty=0.3, seed=6, grammar=GRAMMAR, logprobs=20),
)
BAD_GRAMMARS = ("root ::= root", "root ::= [", 'root ::= "a"{99999}', "root ::= " + "(" * 200)


@dataclass
class Text:
    """What a session holds: inputs by position in the cache, and the ids that are sampled from."""

    sampling: Sampling
    inputs: list[int] = field(default_factory=list)
    history: list[int] = field(default_factory=list)
    start: int = 0


@dataclass(frozen=True)
class Asked:
    """A step, what its session held before, and the answer."""

    sampling: Sampling
    inputs: tuple[int, ...]
    history: tuple[int, ...]
    start: int
    first: int
    ids: tuple[int, ...]
    sample: bool
    answer: Any


class Soak:
    def __init__(self, worker: Worker, seed: int) -> None:
        self.worker = worker
        self.layers = worker.loaded.layers
        self.is_head, self.is_tail = self.layers[0] == 0, self.layers[1] == worker.loaded.n_layer
        self.random = random.Random(seed)
        self.texts: dict[int, Text] = {}
        self.asked: list[Asked] = []
        self.counts: Counter[str] = Counter()
        refused = json.loads(VECTORS.read_text())["refused"]
        self.bad_frames = [bytes.fromhex(v["hex"]) for v in refused if v["side"] == "request"]

    async def step(self, worker: Worker, handle: int, first: int, ids: tuple[int, ...], sample: bool) -> Any:
        """The answer as a value that can be compared."""
        try:
            if self.is_head:
                stepped = await worker.step(handle, first, self.layers, tokens=ids, sample=sample)
            else:
                rows = b"".join(row(i, worker.loaded.n_embd) for i in ids)
                stepped = await worker.step(handle, first, self.layers, residual=rows, sample=sample)
        except MeshError as error:
            return error.code
        return stepped.residual, stepped.sampled

    async def one(self) -> None:
        """One operation, or a few that are sent at once."""
        operations: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (12, self.open), (50, self.steps), (8, self.fork), (10, self.truncate), (8, self.close), (4, self.cancel),
            (8, self.bad),
        ]  # fmt: skip
        weights, calls = zip(*operations, strict=True)
        await self.random.choices(calls, weights)[0]()

    def ids(self, most: int) -> tuple[int, ...]:
        return tuple(self.random.randrange(1000) for _ in range(self.random.randint(1, most)))

    async def open(self) -> None:
        self.counts["open"] += 1
        handle, sampling = self.random.choice(HANDLES), self.random.choice(SAMPLINGS)
        prompt = list(self.ids(24)) if self.is_tail else []
        expected = "bad_frame" if handle in self.texts else "busy" if len(self.texts) == 8 else None
        code = await code_of(self.worker.open(handle, sampling, prompt))
        assert code == expected, (code, expected)
        if expected is None:
            self.texts[handle] = Text(sampling, [], prompt, len(prompt))

    async def steps(self) -> None:
        chosen = self.random.sample(sorted(self.texts), min(len(self.texts), self.random.randint(1, 4)))
        async with trio.open_nursery() as nursery:
            for handle in chosen:
                nursery.start_soon(self.step_of, handle, self.texts[handle])

    async def step_of(self, handle: int, text: Text) -> None:
        self.counts["step"] += 1
        first = len(text.inputs) + (self.random.random() < 0.04)
        room = max(1, len(text.history) - first) if self.is_tail else 8
        ids = self.ids(min(room, self.random.choice([1, 2, 16, 33])))
        if self.random.random() < 0.6 and self.is_tail:  # up to where it can be sampled
            ids = tuple(self.random.randrange(1000) for _ in range(min(room, 32)))
        reaches = first + len(ids) >= len(text.history)
        sample = self.is_tail and self.random.random() < (0.95 if reaches else 0.2)
        before = (text.sampling, tuple(text.inputs), tuple(text.history), text.start)
        answer = await self.step(self.worker, handle, first, ids, sample)
        self.asked.append(Asked(*before, first, ids, sample, answer))
        if isinstance(answer, str):
            self.counts[f"refused: {answer}"] += 1
            return
        text.inputs += ids
        if answer[1] is not None:
            text.history[len(text.inputs) :] = [answer[1].token]

    async def fork(self) -> None:
        self.counts["fork"] += 1
        handle, origin = self.random.choice(HANDLES), self.random.choice(HANDLES)
        sampling = self.random.choice(SAMPLINGS)
        text = self.texts.get(origin)
        have = len(text.inputs) if text else 0
        keep = self.random.randint(0, have + (self.random.random() < 0.1))
        more = list(self.ids(4)) if self.is_tail else []
        history = text.history[:keep] + more if text else []
        code = await code_of(self.worker.fork(handle, origin, keep, sampling, more))
        if text is None:
            expected = "unknown_session"
        elif keep > have or (more and len(text.history) < keep):
            expected = "cache_miss"
        elif handle in self.texts:
            expected = "bad_frame"
        else:
            expected = "busy" if len(self.texts) == 8 else None
        assert code == expected, (code, expected)
        if text is not None and code is None:
            self.texts[handle] = Text(sampling, text.inputs[:keep], history, keep + len(more))

    async def truncate(self) -> None:
        self.counts["truncate"] += 1
        handle = self.random.choice(HANDLES)
        text = self.texts.get(handle)
        have = len(text.inputs) if text else 0
        keep = self.random.randint(max(0, have - 9), have + 1)
        code = await code_of(self.worker.truncate(handle, keep))
        assert code == ("unknown_session" if text is None else "cache_miss" if keep > have else None)
        if text is not None and code is None:
            del text.inputs[keep:]

    async def close(self) -> None:
        self.counts["close"] += 1
        handle = self.random.choice(HANDLES)
        assert await code_of(self.worker.close(handle)) is None
        self.texts.pop(handle, None)

    async def cancel(self) -> None:
        """Closes a session while its steps wait: each is done or cancelled, and the others do not notice."""
        if not self.texts:
            return
        self.counts["cancel"] += 1
        handle = self.random.choice(sorted(self.texts))
        text, answers = self.texts.pop(handle), []

        async def push(first: int) -> None:
            answers.append(await self.step(self.worker, handle, first, (1,), False))

        async with trio.open_nursery() as nursery:
            for n in range(4):
                nursery.start_soon(push, len(text.inputs) + n)
                await trio.lowlevel.checkpoint()
            if self.texts:
                other = self.random.choice(sorted(self.texts))
                nursery.start_soon(self.step_of, other, self.texts[other])
            nursery.start_soon(self.worker.close, handle)
        codes = {answer for answer in answers if isinstance(answer, str)}
        assert codes <= {"cancelled", "unknown_session", "cache_miss", "context_exceeded"}, codes

    async def bad(self) -> None:
        self.counts["bad"] += 1
        if self.random.random() < 0.2:
            grammar = Sampling(grammar=self.random.choice(BAD_GRAMMARS))
            free = next((h for h in HANDLES if h not in self.texts), None)
            if free is not None and len(self.texts) < 8 and self.is_tail:
                assert await code_of(self.worker.open(free, grammar)) == "bad_grammar"
            return
        data, number, call = self.random.choice(self.bad_frames), next(self.worker._ids), _Call()
        self.worker._newest = number
        frame = data[:8] + number.to_bytes(8, "little") + data[16:]
        await self.worker._send([frame], number, call)
        await call.woken.wait()
        assert isinstance(call.reply, say.Error)
        assert call.reply.code == "bad_frame"

    async def verify(self, fresh: Worker) -> None:
        """Every answer since the last time, from a session that is made anew for it."""
        for n, a in enumerate(self.asked):
            await fresh.open(n, a.sampling, a.history, start=a.start)
            for first in range(0, len(a.inputs), 32):
                part = a.inputs[first : first + 32]
                assert not isinstance(await self.step(fresh, n, first, part, False), str)
            answer = await self.step(fresh, n, a.first, a.ids, a.sample)
            assert answer == a.answer, f"an answer is not a fresh worker's: {a}, {answer}"
            await fresh.close(n)
        self.asked.clear()


def row(token: int, n_embd: int) -> bytes:
    """Stands for a residual that would come of a token."""
    return (3 * np.random.default_rng(token).standard_normal(n_embd, np.float32)).tobytes()


async def code_of(call: Awaitable[None]) -> str | None:
    try:
        await call
    except MeshError as error:
        return error.code
    return None


def resident(pid: int) -> int:
    """MiB of a process that are its own, without the pages of the model."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) // 1024
    raise AssertionError("no RssAnon")


async def soak(binary: Path, model: Path, layers: tuple[int, int], ops: int, seed: int) -> dict[str, Any]:
    """ops operations on one worker; AssertionError at the first wrong answer. What was done, and memory in MiB."""
    verified, begun, warm = 0, trio.current_time(), 0
    async with loaded(binary, model, layers=layers, **SHAPE) as worker, AsyncExitStack() as stack:
        run, fresh = Soak(worker, seed), None
        over = False
        while not over:
            await run.one()
            over = sum(n for name, n in run.counts.items() if ":" not in name) >= ops
            if len(run.asked) >= VERIFY_EVERY or over:
                if fresh is None or verified // FRESH_EVERY != (verified + len(run.asked)) // FRESH_EVERY:
                    await stack.aclose()
                    fresh = await stack.enter_async_context(loaded(binary, model, layers=layers, **SHAPE))
                verified += len(run.asked)
                await run.verify(fresh)
            if not warm and sum(run.counts.values()) > ops // 5:
                warm = resident(worker.pid)
        memory = [warm, resident(worker.pid)]
        assert memory[1] <= memory[0] * 1.1 + 8, memory
        return {
            "layers": list(layers), "seed": seed, "operations": dict(run.counts), "verified": verified,
            "memory_mib": memory, "seconds": round(trio.current_time() - begun, 1),
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    model = fetch_model.fetch("smollm2")
    for layers, ops in (((27, 30), asked.ops), ((0, 3), asked.ops // 4)):
        print(json.dumps(trio.run(soak, worker_path(), model, layers, ops, asked.seed)))


if __name__ == "__main__":
    main()
