"""How long it takes to find who holds something in a mesh of many processes: `python -m tests.net.finding [SIZE]`.

Prints one line of JSON: find_s, the median of look-ups by every node; find_after_kill_s, the slowest once a third was
killed, with the share of look-ups that found every living holder.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

from .crowd import Peer, crowd, join

SIZE = 28
KEYS = 8  # things that are held, each by a third of the nodes


def measure(size: int = SIZE) -> dict[str, Any]:
    with crowd() as peers:
        for _ in range(size):
            join(peers)
        held = {f"key-{k}": [p for n, p in enumerate(peers) if n % 3 == k % 3] for k in range(KEYS)}
        for peer in peers:
            peer.ask(do="provide", keys=[key for key, holders in held.items() if peer in holders])
        before, _ = _look(peers, held)
        killed = peers[::3]
        for peer in killed:
            peer.kill()
        living = [peer for peer in peers if peer.alive]
        after, right = _look(living, held)
        return {
            "nodes": size,
            "find_s": round(statistics.median(before), 4),
            "find_max_s": round(max(before), 4),
            "find_after_kill_s": round(max(after), 4),
            "find_after_kill_success": right,
        }


def _look(peers: list[Peer], held: dict[str, list[Peer]]) -> tuple[list[float], float]:
    """Each node looks for one thing in its turn: how long that took, and the share that found all it should."""
    took, right = [], 0
    for number, peer in enumerate(peers):
        key = f"key-{number % KEYS}"
        said = peer.ask(do="reach", keys=[key])
        took.append(said["s"])
        right += {p.id for p in held[key] if p.alive} <= set(said["answered"])
    return took, right / len(peers)


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]) if len(sys.argv) > 1 else SIZE)))
