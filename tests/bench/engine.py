"""The engine beside its peers and beside itself: pairs interleaved in one run, medians, ratios.

python -m tests.bench.engine [--rounds 5] [--only KEY ...]          (make bench-engine)

Peers are built from the same pinned source. One thread a worker and a server, and fast numerics, unless a row says
otherwise. The last line is JSON of the ratios.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter
from typing import Any

import trio

import fetch_model
from meshnode.artifact.files import open_file
from meshnode.wire.worker_messages import Sampling
from meshnode.worker.build import worker_path
from meshnode.worker.conversation import LoadSpec, Worker, open_worker

from . import peers
from .servers import Server, rpc_servers, server

PROMPT = 512  # positions of the long prompt
CHUNK = 64  # positions a step of it, where stages overlap
DECODED = 128
SHORT = 16  # positions of the prompts of many sessions
EACH = 48  # tokens of each of many sessions
BALANCED = ((0, 19), (19, 30))  # by bytes: the output matrix is worth eight layers
HALVES = ((0, 15), (15, 30))  # a prompt needs the output matrix once
THIRDS = ((0, 10), (10, 20), (20, 30))
WHOLE = (0, 30)

Measure = Callable[[], Awaitable[float]]  # tokens/s, or what the row says
Pairs = dict[str, tuple[Measure, Measure]]  # ours and the peer's, by the row's key


@dataclass(frozen=True)
class Row:
    key: str
    ours: str
    peer: str
    target: float
    at_most: bool = False


ROWS = {
    row.key: row
    for row in (
        Row("whole_decode_vs_llama_bench", "one worker, 128 tokens", "llama-bench tg128", 0.95),
        Row("whole_prefill_vs_llama_bench", "one worker, 512 positions", "llama-bench pp512", 0.95),
        Row("two_stage_vs_whole", "two stages, one stream", "one worker", 0.93),
        Row("three_stage_vs_whole", "three stages, one stream", "one worker", 0.90),
        Row("single_vs_rpc2", "two stages, one stream", "llama-server, two rpc-servers", 1.0),
        Row("sessions8_vs_rpc2", "two stages, 8 sessions", "the same, 8 slots", 1.5),
        Row(
            "sessions16_vs_llama_server", "one worker, 16 sessions, 2 threads", "llama-server, 16 slots, 2 threads", 1.0
        ),
        Row("prefill_two_stage_vs_whole", "two stages overlapped", "one worker, 2 threads", 0.85),
        Row("load_third_vs_whole", "a third ready (s)", "the whole ready (s)", 0.5, at_most=True),
        Row("rss_over_owned", "GGUF mappings of a third (MiB)", "its tensors (MiB)", 1.05, at_most=True),
        Row("scattered8_vs_adjacent8", "8 of 16 sessions, anywhere", "8 side by side", 0.9),
        Row("invariant_decode", "invariant, 2 threads, after 512", "fast", 0.92),
        Row("invariant_batch8", "invariant, 2 threads, 8 sessions", "fast", 0.95),
        Row("invariant_prefill", "invariant, 2 threads, 512 positions", "fast", 0.80),
    )
}


def ids(n: int, seed: int = 0) -> list[int]:
    """n ordinary tokens, the same on every run."""
    return [1000 + (7919 * (i + 1) + 104729 * seed) % 40000 for i in range(n)]


class Stages:
    """Workers in a row, each with one effective range; sessions are opened on all of them."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = workers
        self.layers = [worker.loaded.layers for worker in workers]

    async def open(self, handle: int, prompt: Sequence[int]) -> None:
        for worker in self.workers:
            await worker.open(handle, Sampling(), prompt)

    async def close(self, handle: int) -> None:
        for worker in self.workers:
            await worker.close(handle)

    async def push(self, handle: int, first: int, tokens: Sequence[int], *, sample: bool) -> int | None:
        residual = None
        for n, worker in enumerate(self.workers):
            last = n == len(self.workers) - 1
            stepped = await worker.step(
                handle, first, self.layers[n], tokens=None if n else tokens, residual=residual, sample=sample and last
            )
            residual = stepped.residual
        return stepped.sampled.token if stepped.sampled else None

    async def prefill(self, handle: int, tokens: Sequence[int], chunk: int) -> int:
        """Chunks follow one another: a stage computes one while the next stage computes the one before."""
        sampled: list[int] = []
        send, receive = trio.open_memory_channel[tuple[int, Sequence[int]]](1)

        async def pump(n: int, source: trio.MemoryReceiveChannel, sink: trio.MemorySendChannel | None) -> None:
            async with source:
                async for first, data, count in source:
                    is_last = first + count == len(tokens) and sink is None
                    stepped = await self.workers[n].step(
                        handle, first, self.layers[n], sample=is_last, **{"residual" if n else "tokens": data}
                    )
                    if sink:
                        await sink.send((first, stepped.residual, count))
                    elif stepped.sampled:
                        sampled.append(stepped.sampled.token)
            if sink:
                await sink.aclose()

        async with trio.open_nursery() as nursery:
            for n in range(len(self.workers)):
                last = n == len(self.workers) - 1
                sink, following = (None, None) if last else trio.open_memory_channel(1)
                nursery.start_soon(pump, n, receive, sink)
                receive = following
            for first in range(0, len(tokens), chunk):
                part = tokens[first : first + chunk]
                await send.send((first, part, len(part)))
            await send.aclose()
        return sampled[0]

    async def decode(self, handle: int, first: int, token: int, count: int) -> None:
        for position in range(first, first + count):
            token = await self.push(handle, position, [token], sample=True)


async def decode_rate(stages: Stages, prompt: int = SHORT, count: int = DECODED) -> float:
    await stages.open(1, ids(prompt))
    token = await stages.prefill(1, ids(prompt), PROMPT)
    begin = perf_counter()
    await stages.decode(1, prompt, token, count)
    rate = count / (perf_counter() - begin)
    await stages.close(1)
    return rate


async def prefill_rate(stages: Stages, chunk: int = PROMPT) -> float:
    await stages.open(1, ids(PROMPT))
    begin = perf_counter()
    await stages.prefill(1, ids(PROMPT), chunk)
    rate = PROMPT / (perf_counter() - begin)
    await stages.close(1)
    return rate


async def sessions_rate(stages: Stages, n: int) -> float:
    """All of n sessions' prompts and tokens, as a server sees n requests that come at once: generated tokens/s."""

    async def one(handle: int) -> None:
        await stages.open(handle, ids(SHORT, handle))
        token = await stages.prefill(handle, ids(SHORT, handle), PROMPT)
        await stages.decode(handle, SHORT, token, EACH - 1)
        await stages.close(handle)

    begin = perf_counter()
    async with trio.open_nursery() as nursery:
        for handle in range(1, n + 1):
            nursery.start_soon(one, handle)
    return n * EACH / (perf_counter() - begin)


async def batch_rate(stages: Stages, handles: Sequence[int], at: int, count: int = EACH) -> float:
    """Decode of sessions that are open already and hold `at` positions; they hold as many afterwards."""

    async def one(handle: int) -> None:
        await stages.decode(handle, at, 1000 + handle, count)
        for worker in stages.workers:
            await worker.truncate(handle, at)

    begin = perf_counter()
    async with trio.open_nursery() as nursery:
        for handle in handles:
            nursery.start_soon(one, handle)
    return len(handles) * count / (perf_counter() - begin)


class Bench:
    """What a group of rows runs; all of it ends with the stack."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.stack = stack
        self.model = fetch_model.fetch("smollm2")
        self.file = stack.enter_context(open_file(self.model))
        self.worker = worker_path()

    @cached_property
    def peers(self) -> Path:
        return peers.build()

    def spec(self, layers: tuple[int, int], **options: object) -> LoadSpec:
        settings: dict[str, Any] = {"numerics": "fast", "n_ctx": 1024, "max_step": PROMPT, "n_sessions": 1} | options
        return LoadSpec((self.file,), layers, **settings)

    async def stages(self, *ranges: tuple[int, int], **options: object) -> Stages:
        workers = [open_worker(self.worker, self.spec(layers, **options)) for layers in ranges or (WHOLE,)]
        return Stages([await self.stack.enter_async_context(worker) for worker in workers])

    def server(self, *options: str, slots: int, threads: int) -> Server:
        return self.stack.enter_context(server(self.peers, self.model, *options, slots=slots, threads=threads))

    async def llama_bench(self, prompt: int, decoded: int) -> float:
        counts = ("-p", str(prompt), "-n", str(decoded))
        command = [self.peers / "llama-bench", "-m", self.model, "-t", "1", "-r", "1", "-o", "json", *counts]
        done = await trio.run_process(command, capture_stdout=True, stderr=subprocess.DEVNULL)
        return float(json.loads(done.stdout)[0]["avg_ts"])

    async def ready_in(self, layers: tuple[int, int]) -> float:
        begin = perf_counter()
        async with open_worker(self.worker, self.spec(layers)):
            return perf_counter() - begin


def mapped(pid: int, name: str) -> float:
    """MiB of a file's pages in a process's memory."""
    total, ours = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = line.endswith(name)
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total / 1024


async def alone(bench: Bench) -> Pairs:
    whole = await bench.stages()
    return {
        "whole_decode_vs_llama_bench": (lambda: decode_rate(whole, 1), lambda: bench.llama_bench(0, DECODED)),
        "whole_prefill_vs_llama_bench": (lambda: prefill_rate(whole), lambda: bench.llama_bench(PROMPT, 0)),
    }


async def staged(bench: Bench) -> Pairs:
    whole, two, three = await bench.stages(), await bench.stages(*BALANCED), await bench.stages(*THIRDS)
    return {
        "two_stage_vs_whole": (lambda: decode_rate(two), lambda: decode_rate(whole)),
        "three_stage_vs_whole": (lambda: decode_rate(three), lambda: decode_rate(whole)),
    }


async def remote(bench: Bench) -> Pairs:
    options = ("--rpc", ",".join(bench.stack.enter_context(rpc_servers(bench.peers, 2))), "-ngl", "99")
    theirs = bench.server(*options, slots=1, threads=1)
    ours = await bench.stages(*BALANCED)
    return {"single_vs_rpc2": (lambda: sessions_rate(ours, 1), lambda: theirs.rate(1, SHORT, EACH))}


async def remote8(bench: Bench) -> Pairs:
    options = ("--rpc", ",".join(bench.stack.enter_context(rpc_servers(bench.peers, 2))), "-ngl", "99")
    theirs = bench.server(*options, slots=8, threads=1)
    ours = await bench.stages(*BALANCED, n_sessions=8)
    return {"sessions8_vs_rpc2": (lambda: sessions_rate(ours, 8), lambda: theirs.rate(8, SHORT, EACH))}


async def serving(bench: Bench) -> Pairs:
    ours, theirs = await bench.stages(n_sessions=16, n_threads=2), bench.server(slots=16, threads=2)
    return {"sessions16_vs_llama_server": (lambda: sessions_rate(ours, 16), lambda: theirs.rate(16, SHORT, EACH))}


async def overlapped(bench: Bench) -> Pairs:
    two, whole = await bench.stages(*HALVES), await bench.stages(n_threads=2)
    return {"prefill_two_stage_vs_whole": (lambda: prefill_rate(two, CHUNK), lambda: prefill_rate(whole))}


async def loading(bench: Bench) -> Pairs:
    stages = await bench.stages(THIRDS[1])
    third = stages.workers[0]
    await stages.open(1, ())
    await third.step(1, 0, THIRDS[1], residual=bytes(4 * third.loaded.n_embd))

    async def resident() -> float:
        return mapped(third.pid, bench.model.name)

    async def owned() -> float:
        return third.loaded.tensor_bytes / (1 << 20)

    return {
        "load_third_vs_whole": (lambda: bench.ready_in(THIRDS[1]), lambda: bench.ready_in(WHOLE)),
        "rss_over_owned": (resident, owned),
    }


async def filled(bench: Bench, sessions: int, positions: int, **options: object) -> Stages:
    """A worker whose sessions 1 to n hold that many positions each."""
    stages = await bench.stages(n_sessions=sessions, n_threads=2, **options)
    for handle in range(1, sessions + 1):
        await stages.open(handle, ids(positions, handle))
        await stages.prefill(handle, ids(positions, handle), PROMPT)
    return stages


async def scattered(bench: Bench) -> Pairs:
    side_by_side, anywhere = await filled(bench, 16, SHORT), await filled(bench, 16, SHORT)
    chance = random.Random(1)
    return {
        "scattered8_vs_adjacent8": (
            lambda: batch_rate(anywhere, chance.sample(range(1, 17), 8), SHORT),
            lambda: batch_rate(side_by_side, range(1, 9), SHORT),
        )
    }


async def invariant(bench: Bench) -> Pairs:
    modes = [await filled(bench, 8, PROMPT, numerics=numerics) for numerics in ("invariant", "fast")]
    one, many = ([partial(batch_rate, mode, handles, PROMPT) for mode in modes] for handles in ((1,), range(1, 9)))
    alone = [await bench.stages(n_threads=2, numerics=numerics) for numerics in ("invariant", "fast")]
    return {
        "invariant_decode": (one[0], one[1]),
        "invariant_batch8": (many[0], many[1]),
        "invariant_prefill": (lambda: prefill_rate(alone[0]), lambda: prefill_rate(alone[1])),
    }


GROUPS = {  # of rows that share what they run; each row belongs to one
    alone: ("whole_decode_vs_llama_bench", "whole_prefill_vs_llama_bench"),
    staged: ("two_stage_vs_whole", "three_stage_vs_whole"),
    remote: ("single_vs_rpc2",),
    remote8: ("sessions8_vs_rpc2",),
    serving: ("sessions16_vs_llama_server",),
    overlapped: ("prefill_two_stage_vs_whole",),
    loading: ("load_third_vs_whole", "rss_over_owned"),
    scattered: ("scattered8_vs_adjacent8",),
    invariant: ("invariant_decode", "invariant_batch8", "invariant_prefill"),
}


async def measure(wanted: Sequence[str], rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """Ours and the peer's figures of each row, taken in turns; the first turn warms up and counts for nothing."""
    results: dict[str, tuple[list[float], list[float]]] = {}
    for group, keys in GROUPS.items():
        here = [key for key in keys if key in wanted]
        async with AsyncExitStack() as stack:
            pairs = await group(Bench(stack)) if here else {}
            for key in here:
                pair = pairs[key]
                results[key] = ([], [])
                for turn in range(rounds + 1):
                    for side in (0, 1) if turn % 2 else (1, 0):
                        figure = await pair[side]()
                        if turn:
                            results[key][side].append(figure)
                print(line(ROWS[key], results[key]), flush=True)
    return results


def ratio(figures: tuple[list[float], list[float]]) -> float:
    return round(statistics.median(figures[0]) / statistics.median(figures[1]), 3)


def line(row: Row, figures: tuple[list[float], list[float]]) -> str:
    sides = [f"{statistics.median(side):8.2f} ({min(side):.2f}-{max(side):.2f})" for side in figures]
    met = ratio(figures) <= row.target if row.at_most else ratio(figures) >= row.target
    return (
        f"{row.key}: {ratio(figures)} ({'<=' if row.at_most else '>='} {row.target}: {'met' if met else 'not met'})\n"
        f"    {row.ours:<40}{sides[0]}\n    {row.peer:<40}{sides[1]}"
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="KEY")
    options = parser.parse_args(arguments)
    results = trio.run(measure, options.only, options.rounds)
    print(json.dumps({key: ratio(figures) for key, figures in results.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
