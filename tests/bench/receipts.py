"""What receipts cost: make bench-receipts; ends with one line of JSON

cpu_a_token: CPU seconds of all processes of a mesh of three holders and an entry node, a token, with receipts over
without. Two such meshes are up, one of each kind, and are asked in turn; each answer is one sample, and the ratio is
that of their medians. verify_10000_s: `receipts verify` of a file with 10,000 receipts and their countersignatures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from meshnode.ledger.views import EXPORT
from tests.ledger.sessions import MESH, key_of, play
from tests.live.soak_receipts import Process, ask, nodes, whole

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
RECEIPTS, HOPS = 10_000, 4


def cpu_s(processes: list[Process]) -> float:
    """Of these and of the workers below them, since they started."""
    own = {process.process.pid for process in processes if process.process is not None}
    total = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                fields = Path(f"/proc/{entry.name}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(entry.name) in own or int(fields[1]) in own:
                total += int(fields[11]) + int(fields[12])
    return total * TICK_S


def cost(tokens: int, a_round: int) -> dict[str, float]:
    kinds = {"on": (), "off": ("--no-receipts",)}
    spent: dict[str, list[float]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory(prefix="meshnode-bench-") as folder, ExitStack() as stack:
        meshes = {}
        for kind, options in kinds.items():
            (Path(folder) / kind).mkdir()
            meshes[kind] = stack.enter_context(nodes(Path(folder) / kind, 4, *options))
        artifact = whole(meshes["on"])
        for number in range(-1, -(-tokens // a_round)):
            for kind in ("on", "off") if number % 2 else ("off", "on"):
                before = cpu_s(meshes[kind])
                made = len(ask(meshes[kind][-1], artifact, "Count from one to a thousand: one,", a_round)["token_ids"])
                time.sleep(1.0)  # for what follows an answer: receipts are written and told
                if number >= 0:  # the first warms up
                    spent[kind].append((cpu_s(meshes[kind]) - before) / made)
                    print(f"{kind:>4} {spent[kind][-1] * 1000:.2f} ms a token", flush=True)
    on, off = statistics.median(spent["on"]), statistics.median(spent["off"])
    return {"cpu_ms_on": round(on * 1000, 3), "cpu_ms_off": round(off * 1000, 3), "cpu_a_token": round(on / off, 4)}


def verifying() -> float:
    with tempfile.TemporaryDirectory(prefix="meshnode-bench-") as folder:
        path = Path(folder) / "receipts"
        keys = [key_of(n) for n in range(2, 2 + HOPS)]
        with path.open("w") as file:
            file.write(json.dumps({"format": EXPORT, "mesh_id": MESH}) + "\n")
            for number in range(RECEIPTS // HOPS):
                session = number.to_bytes(16, "big")
                for s in play(keys, key_of(1), session=session, prompt=40, tokens=30).statements():
                    line = {"signer": s.signer, "raw": s.raw.hex(), "signature": s.signature.hex()}
                    file.write(json.dumps(line) + "\n")
        took = []
        for _ in range(5):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-m", "meshnode", "receipts", "verify", str(path)], check=True)
            took.append(time.perf_counter() - began)
        return round(statistics.median(took), 3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=2400)
    parser.add_argument("--round", type=int, default=200)
    given = parser.parse_args()
    verified = verifying()
    print(json.dumps({**cost(given.tokens, given.round), "tokens": given.tokens, "verify_10000_s": verified}))


if __name__ == "__main__":
    main()
