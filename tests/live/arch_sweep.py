"""Cut every architecture that the pinned engine has, at every layer: what stays exact is served.

    python -m tests.live.arch_sweep [--check] [--only NAME]...

For each architecture the engine's own generator writes small models of random weights; their weights are written anew
in many types; native/test_exact.cpp computes with each of them, whole and cut. Every computation is a process of its
own: what crashes or hangs is refused, with what it said. The result is meshnode/artifact/architectures.json and
docs/architectures.md; --check compares instead of writing. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshnode.artifact import architectures
from meshnode.artifact.ggml import TENSOR_TYPES
from meshnode.worker import build

SEED = "1"
SECONDS = 120  # for one computation; the longest takes about two on a core alone
FLOATS = ("F16", "BF16")
BLOCKS = (
    "Q8_0", "Q4_K", "Q4_0", "Q5_K", "IQ4_NL", "Q4_1", "Q3_K", "Q5_0", "IQ4_XS", "Q5_1", "Q2_K", "Q6_K", "MXFP4",
    "TQ2_0", "Q1_0", "TQ1_0", "Q2_0",
)  # fmt: skip
GRIDS = ("IQ3_S", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ2_S", "IQ1_M", "IQ2_XXS")  # slow to quantize: by turns
# One type at a time in these: an attention, experts, a recurrence
REPRESENTATIVES = {"dense": "llama-dense", "experts": "qwen3moe-moe", "recurrent": "mamba2-dense"}

ROUNDING = 1e-3  # between two orders of summation; what lies far beyond is another computation
WRONG = "its numbers are wrong when sessions are computed together"
NO_MODEL = "the pinned engine makes no small model of it to prove it with"
REASONS = {  # what was said -> what is said to people
    r"it does not write from left to right": "it does not write from left to right",
    r"its memory depends on something outside|its output depends on something outside": (
        "a layer reaches across the cut for more than the residual"
    ),
    r"the residual is not known|the output is not known": "its layers do not pass one residual on",
    r"has an unusual shape": "its layers pass on more than one residual stream",
}


@dataclass
class Outcome:
    """Of one computation: its exit status, its last line if that is JSON, and why it failed."""

    status: int
    said: dict[str, Any] = field(default_factory=dict)
    why: str = ""

    @property
    def exact(self) -> bool:
        return self.status == 0 and self.said["exact"] and self.said["kept"]

    @property
    def invariant(self) -> bool:
        return self.exact and self.said["invariant"]


@dataclass
class Verdict:
    """Of one architecture: a refusal, or the row of the table."""

    refused: str = ""
    truncate: str = "any"
    planes: int = 1
    kinds: set[str] = field(default_factory=set)  # of REPRESENTATIVES
    invariant: set[str] = field(default_factory=set)  # types of weights
    fast: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


class Sweep:
    def __init__(self, folder: Path, scratch: Path) -> None:
        self.folder, self.scratch = folder, scratch

    def names(self) -> list[str]:
        return (self.folder / "architectures.txt").read_text().split()

    def run(self, program: str, *arguments: str | Path) -> tuple[int, str, str]:
        """Exit status (-1: it hung), standard output, standard error."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GGML_NO_BACKTRACE": "1"}
        command = [self.folder / program, *arguments]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=SECONDS, env=environment, check=False
            )
        except subprocess.TimeoutExpired:
            return -1, "", ""
        return done.returncode, done.stdout, done.stderr

    def compute(self, model: Path, *options: str) -> Outcome:
        status, out, err = self.run("test_exact", model, "--certify", "--prompt", "40", *options)
        last = out.strip().splitlines()[-1:] or [""]
        if last[0].startswith("{"):
            return Outcome(status, json.loads(last[0]), "its bits differ when it is cut")
        return Outcome(status or 1, why=explain(status, out + err))

    def requantized(self, model: Path, types: Sequence[str]) -> Path | None:
        out = model.with_suffix(f".{types[0]}.gguf")
        status, _, _ = self.run("test_requantize", model, out, *types)
        return out if status == 0 else None

    def models(self, name: str) -> list[Path]:
        folder = self.scratch / name
        folder.mkdir()
        self.run("make_models", "-s", SEED, "-a", name, "-o", folder)
        return [path for path in sorted(folder.glob("*.gguf")) if path.stat().st_size]

    def architecture(self, name: str) -> Verdict:
        verdict = Verdict(invariant={"F32", *FLOATS, *BLOCKS}, fast={"F32", *FLOATS, *BLOCKS})
        models = self.models(name)
        if not models:
            verdict.refused = NO_MODEL
        for model in models:
            self.model(model, verdict)
            for path in model.parent.glob(model.stem + "*"):
                path.unlink()
            if verdict.refused:
                break
        said = verdict.refused or f"truncate {verdict.truncate}, planes {verdict.planes}"
        print(f"{name}: {said}{''.join(f'; {n}' for n in verdict.notes)}", flush=True)
        return verdict

    def model(self, model: Path, verdict: Verdict) -> None:
        """Narrow the verdict by one model of the architecture."""
        invariant, fast = self.compute(model), self.compute(model, "--fast")
        if not (invariant.exact and fast.exact):
            verdict.refused = invariant.why if not invariant.exact else fast.why
            return
        verdict.planes = invariant.said["certificate"]["planes"]
        verdict.truncate = "any" if invariant.said["truncates"] else "none"
        verdict.kinds.add("recurrent" if verdict.truncate == "none" else "dense")
        verdict.kinds.update({"experts"} if model.stem.endswith("-moe") else ())
        if not invariant.invariant:
            if invariant.said["drift"] > ROUNDING:
                verdict.refused = WRONG
                return
            verdict.invariant.clear()
            verdict.notes.append("not invariant")
        for types in (BLOCKS, FLOATS):
            written = self.requantized(model, types)
            for allowed, options in ((verdict.invariant, ()), (verdict.fast, ("--fast",))):
                if not allowed:
                    continue
                outcome = self.compute(written, *options) if written else Outcome(1, why="cannot be written")
                if not (outcome.exact if options else outcome.invariant):
                    allowed.difference_update(types)
                    why = outcome.why if not outcome.exact else "not invariant"
                    verdict.notes.append(f"{' '.join(options) or 'invariant'}, weights {types[0]} ...: {why}")

    def kind(self, name: str, stem: str) -> tuple[set[str], set[str]]:
        """Types with which a representative is invariant, and exact with the fast kernels."""
        folder = self.scratch / f"kind-{name}"
        folder.mkdir()
        self.run("make_models", "-s", SEED, "-a", stem.rsplit("-", 1)[0], "-o", folder)
        invariant, fast = {"F32"}, {"F32"}
        for types in [*((t,) for t in (*FLOATS, *BLOCKS)), GRIDS]:
            written = self.requantized(folder / f"{stem}.gguf", types)
            if written is None:
                continue
            if self.compute(written).invariant:
                invariant.update(types)
            if self.compute(written, "--fast").exact:
                fast.update(types)
            written.unlink()
        print(f"weights, {name}: invariant {' '.join(sorted(invariant))}; fast {' '.join(sorted(fast))}", flush=True)
        return invariant, fast


def explain(status: int, text: str) -> str:
    if status == -1:
        return "it hangs"
    for pattern, reason in REASONS.items():
        if re.search(pattern, text):
            return reason
    if status < 0 or status >= 128:
        found = re.search(r"GGML_ASSERT\((.*)\) failed", text)
        return "the pinned engine aborts" + (f": {found[1]}" if found else "")
    found = re.search(r"FAIL \w+: (.*)", text)
    return found[1][:120] if found else f"it ends with status {status}"


def table(verdicts: dict[str, Verdict], kinds: dict[str, tuple[set[str], set[str]]]) -> dict[str, Any]:
    """The content of architectures.json."""
    order = {kind.name: number for number, kind in TENSOR_TYPES.items()}
    known_types = {"F32", *FLOATS, *BLOCKS, *GRIDS}
    sets: dict[str, list[str]] = {}

    def named(types: set[str]) -> str:
        listed = sorted(types, key=order.__getitem__)
        for name, known in sets.items():
            if known == listed:
                return name
        names = {0: "none", 1: "F32", len(known_types): "all"}
        name = names.get(len(listed), f"{len(listed)} types")
        while name in sets:
            name += "*"
        sets[name] = listed
        return name

    exact = {}
    for name, verdict in sorted(verdicts.items()):
        if verdict.refused:
            continue
        columns = []
        for which, types in enumerate((verdict.invariant, verdict.fast)):
            whole = set.intersection(*(kinds[kind][which] for kind in verdict.kinds))
            # What slow quantizers write was tried in the representatives alone
            columns.append(named(types & whole | (whole & set(GRIDS) if types >= set(BLOCKS) else set())))
        exact[name] = {
            "truncate": verdict.truncate,
            "planes": verdict.planes,
            "invariant": columns[0],
            "fast": columns[1],
        }
    refused = {name: verdict.refused for name, verdict in sorted(verdicts.items()) if verdict.refused}
    return {"exact": exact, "refused": refused, "types": sets}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", action="append", default=[], help="of the architectures; writes nothing")
    options = parser.parse_args(arguments)
    folder = build.build("sweep", progress=lambda line: print(line, file=sys.stderr, flush=True))
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="sweep-") as scratch, ThreadPoolExecutor(cores) as pool:
        sweep = Sweep(folder, Path(scratch))
        names = options.only or sweep.names()
        kinds = pool.map(lambda item: sweep.kind(*item), () if options.only else REPRESENTATIVES.items())
        verdicts = dict(zip(names, pool.map(sweep.architecture, names), strict=True))
        found = table(verdicts, dict(zip(REPRESENTATIVES, kinds, strict=False))) if not options.only else None
    failed = [name for name in architectures.ARCHITECTURES if name in verdicts and verdicts[name].refused]
    for name in failed:
        print(f"FAIL {name} is listed and is no longer exact: {verdicts[name].refused}")
    if found is not None and options.check:
        listed = json.loads(architectures.SOURCE.read_text())
        for part, entries in found.items():
            for key in sorted({*entries, *listed[part]}):
                if entries.get(key) != listed[part].get(key):
                    print(f"FAIL {part}, {key}: {listed[part].get(key)} is listed, {entries.get(key)} was found")
                    failed.append(key)
    elif found is not None:
        architectures.SOURCE.write_text(json.dumps(found, indent=1) + "\n")
        subprocess.run([sys.executable, "-m", "meshnode.artifact.architectures"], check=True)  # docs/architectures.md
    exact = sum(not verdict.refused for verdict in verdicts.values())
    print(json.dumps({"bit_exact": exact, "refused": len(verdicts) - exact, "failed": len(failed)}))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
