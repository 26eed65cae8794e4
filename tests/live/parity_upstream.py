"""Does our worker say what the engine says as it is upstream? Greedy tokens and logits of prompts drawn from a seed.

python -m tests.live.parity_upstream --seed 1 --prompts 20      (make parity-upstream SEED=1)

Builds the unpatched engine with the same flags, runs whole prompts through it and through our stage with the whole
range, in both kinds of numerics. Prompts are token ids: no tokenizer stands between the two.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import fetch_model
from meshnode.artifact.identity import describe, open_artifact
from meshnode.worker.build import build

TOKENS = 48
LENGTHS = (1, 2, 7, 64, 65, 130, 300)  # around the chunk of 64, and beyond several


def draw(seed: int, count: int, n_vocab: int) -> list[str]:
    chance = random.Random(seed)
    return [" ".join(str(chance.randrange(n_vocab)) for _ in range(chance.choice(LENGTHS))) for _ in range(count)]


def said(program: Path, model: Path, numerics: str, prompts: Sequence[str]) -> list[list[str]]:
    """Each prompt's greedy tokens, and after them the hash of all its logits."""
    asked = "".join(f"{prompt}\n" for prompt in prompts)
    command = [str(program), str(model), numerics, str(TOKENS)]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or len(lines) != len(prompts):
        raise SystemExit(f"{program.name} ended with {done.returncode}: {(done.stdout + done.stderr)[-500:]}")
    return [line.split() for line in lines]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=20)
    options = parser.parse_args(arguments)

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    ours = build("tests", progress=progress) / "greedy"
    upstream = build("upstream", progress=progress) / "parity_upstream"
    model = fetch_model.fetch("smollm2")
    with open_artifact(model) as artifact:
        prompts = draw(options.seed, options.prompts, describe(artifact).n_vocab)
    different: dict[str, dict[str, int]] = {}
    for numerics in ("invariant", "fast"):
        pairs = list(zip(said(ours, model, numerics, prompts), said(upstream, model, numerics, prompts), strict=True))
        different[numerics] = {
            "tokens": sum(a[:-1] != b[:-1] for a, b in pairs),
            "logits": sum(a[-1] != b[-1] for a, b in pairs),
        }
        equal = len(pairs) - different[numerics]["tokens"]
        print(f"{numerics}: greedy tokens of {equal} of {len(pairs)} prompts equal", flush=True)
    print(json.dumps({"seed": options.seed, "prompts": len(prompts), "tokens": TOKENS, "different": different}))
    return 1 if any(d["tokens"] for d in different.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
