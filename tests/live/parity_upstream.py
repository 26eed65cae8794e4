"""Is our engine still the engine? Greedy tokens and hashes of all logits, beside the library as it is upstream.

python -m tests.live.parity_upstream --seed 1 --prompts 20      (make parity-upstream)

Both are built with the same flags. Under invariant numerics upstream is fed one position a call, where the kernels that
depend on the batch never run; under fast numerics both take the quickest. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import trio

import fetch_model
from meshnode.artifact.identity import open_artifact
from meshnode.worker import LoadSpec, open_worker
from meshnode.worker.build import build, worker_path

from .prompts import draw

TOKENS = 48


def tokenized(model: Path, prompts: Sequence[str]) -> list[list[int]]:
    async def ask() -> list[list[int]]:
        with open_artifact(model) as file:
            spec = LoadSpec(file.files, layers=(0, 1), n_sessions=1, n_ctx=64)
            async with open_worker(worker_path(), spec) as worker:
                return [await worker.tokenize(p, add_special=True, parse_special=True) for p in prompts]

    return trio.run(ask)


def answers(program: Path, model: Path, numerics: str, prompts: Sequence[Sequence[int]]) -> list[str]:
    lines = "".join(" ".join(map(str, ids)) + "\n" for ids in prompts)
    command = [program, model, numerics, str(TOKENS)]
    return subprocess.run(command, input=lines, capture_output=True, text=True, check=True).stdout.splitlines()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=20)
    options = parser.parse_args(arguments)
    ours, upstream = build("tests", progress=print), build("upstream", progress=print)
    model = fetch_model.fetch("smollm2")
    prompts = tokenized(model, draw(options.seed, options.prompts))
    found: dict[str, dict[str, int]] = {}
    for numerics in ("invariant", "fast"):
        mine = [line.rsplit(" ", 1) for line in answers(ours / "greedy", model, numerics, prompts)]
        theirs = [line.rsplit(" ", 1) for line in answers(upstream / "parity_upstream", model, numerics, prompts)]
        assert len(mine) == len(theirs) == len(prompts), (mine, theirs)
        found[numerics] = {
            "same_tokens": sum(a[0] == b[0] for a, b in zip(mine, theirs, strict=True)),
            "same_logits": sum(a[1] == b[1] for a, b in zip(mine, theirs, strict=True)),
        }
        print(f"{numerics}: {found[numerics]} of {len(prompts)} prompts", flush=True)
    print(json.dumps({"prompts": len(prompts), "tokens": TOKENS} | found))
    return 0 if all(f["same_tokens"] == len(prompts) for f in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
