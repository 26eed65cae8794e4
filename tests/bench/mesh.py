"""What a mesh costs over one node: single-stream decode on two and on three nodes, beside one, in one run.

python -m tests.bench.mesh [--rounds 7] [--tokens 96]          (make bench-mesh)

One lab of each size is up at a time's turn: the rounds are interleaved, one thread a worker, medians. The last line is
JSON: two_vs_one and three_vs_one are ratios of decode tokens/s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import fetch_model

from ..live.conftest import lab_of

PROMPT = "Explain in a few paragraphs how rain is made."
SIZES = {"one": 1, "two": 2, "three": 3}


def measure(rounds: int, tokens: int) -> dict[str, list[float]]:
    """Decode tokens/s of each round, by the number of nodes."""
    model, speeds = fetch_model.fetch("smollm2"), {name: list[float]() for name in SIZES}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mesh-")))
        labs = {name: stack.enter_context(lab_of(folder / name, model, nodes=n)) for name, n in SIZES.items()}
        for turn in range(rounds + 1):  # the first warms caches and counts for nothing
            for name, lab in labs.items():
                answer = lab.run(PROMPT, "--chat", "--max-tokens", str(tokens), "--temperature", "0")
                if turn:
                    speeds[name].append(answer["timing"]["decode_tok_s"])
    return speeds


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=96)
    options = parser.parse_args(arguments)
    speeds = measure(options.rounds, options.tokens)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    print(f"{'nodes':<8}{'median tok/s':>14}{'min':>9}{'max':>9}")
    for name, values in speeds.items():
        print(f"{name:<8}{medians[name]:>14.1f}{min(values):>9.1f}{max(values):>9.1f}")
    ratios = {f"{name}_vs_one": round(medians[name] / medians["one"], 3) for name in ("two", "three")}
    print(json.dumps(ratios | {"rounds": options.rounds, "tokens": options.tokens, "threads": 1}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
