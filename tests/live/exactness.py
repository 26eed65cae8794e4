"""Does a mesh say what one node says? Greedy tokens of prompts drawn from a seed, over several splits of the model.

python -m tests.live.exactness --seed 1 --prompts 20      (make exact SEED=1)
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import fetch_model

from .conftest import lab_of
from .prompts import draw

SPLITS = ("0-10,10-20,20-30", "0-1,1-29,29-30", "0-20,10-30")
TOKENS = 48


def answers(model: Path, layers: str, prompts: Sequence[str], *options: str) -> list[list[int]]:
    with tempfile.TemporaryDirectory(prefix="mesh-") as folder, lab_of(Path(folder), model, layers=layers) as lab:
        said = [lab.run(p, "--max-tokens", str(TOKENS), "--temperature", "0", *options) for p in prompts]
        assert not any(lab.sessions().values()), "a session was left"
    return [answer["token_ids"] for answer in said]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=20)
    options = parser.parse_args(arguments)
    model, prompts = fetch_model.fetch("smollm2"), draw(options.seed, options.prompts)
    whole = answers(model, "0-30", prompts)
    different = {}
    for layers in SPLITS:
        split = answers(model, layers, prompts)
        different[layers] = sum(a != b for a, b in zip(whole, split, strict=True))
        print(f"{layers}: {len(prompts) - different[layers]} of {len(prompts)} answers equal", flush=True)
    print(json.dumps({"seed": options.seed, "prompts": len(prompts), "tokens": TOKENS, "different": different}))
    return 1 if any(different.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
