"""A mesh whose nodes come and go: `python -m tests.net.churn [--seconds S] [--period S] [--starts N]`.

Twelve processes, of which one is killed and one is started every period, while the others look for what is held and ask
whoever they find. Then N times four nodes that start at once, each knowing all their addresses. Prints one line of JSON
and ends with status 1 when a look-up reached no living holder, or nodes did not become one mesh.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import sys
import time
from typing import Any

from meshnode.keys import NodeKey

from .crowd import Peer, ask_all, crowd, join

NODES = 12
GROUPS = 4  # things that are held, each by a quarter of the nodes
PAUSE_S = 0.3  # between two look-ups
KNOWN_S = 3.0  # after which everybody must find a newcomer
LATE_S = 5.0  # that a look-up may take, calls to all that it finds included
ONE_MESH_S = 20.0  # for nodes that started at once to know each other, on a machine that has other things to do


def churn(seconds: float, period: float, draw: random.Random) -> dict[str, Any]:
    with crowd() as peers:
        group: dict[Peer, int] = {}
        since: dict[Peer, float] = {}

        def add(number: int) -> None:
            living = [peer for peer in peers if peer.alive]
            peer = join(peers, draw.choice(living).addresses if living else ())  # whoever the first was, it may be gone
            peer.ask(do="provide", keys=[f"group-{number}"])
            group[peer], since[peer] = number, time.monotonic()

        for number in range(NODES):
            add(number % GROUPS)
        took: list[float] = []
        found: list[float] = []
        unanswered, incomplete, kills = 0, 0, 0
        ends, turn = time.monotonic() + seconds, time.monotonic() + period
        while time.monotonic() < ends:
            if time.monotonic() >= turn:
                turn += period
                victim = draw.choice([peer for peer in peers if peer.alive])
                victim.kill()
                kills += 1
                add(group[victim])
            living = [peer for peer in peers if peer.alive]
            number = draw.randrange(GROUPS)
            said = draw.choice(living).ask(do="reach", keys=[f"group-{number}"])
            took.append(said["s"])
            found.append(said["find_s"])
            now = time.monotonic()
            due = {peer.id for peer in living if group[peer] == number and now - since[peer] > KNOWN_S + said["s"]}
            mute, lacks = not said["answered"] or said["s"] > LATE_S, due - set(said["answered"])
            if mute or lacks:
                print(f"look-up {len(took)}: {said}; not there: {lacks}", file=sys.stderr)
            unanswered += mute
            incomplete += bool(lacks)
            time.sleep(PAUSE_S)
        living = [peer for peer in peers if peer.alive]
        known = [len(answer["peers"]) for answer in ask_all(living, do="connected")]
    return {
        "kills": kills,
        "lookups": len(took),
        "unanswered": unanswered,
        "incomplete": incomplete,
        "lookup_s": round(statistics.median(took), 3),
        "lookup_max_s": round(max(took), 3),
        "find_max_s": round(max(found), 3),
        "connected_least": min(known),
    }


def at_once(rounds: int, size: int = 4) -> dict[str, Any]:
    """Nodes that start together and know each other's addresses, of which none answers yet."""
    took = []
    for _ in range(rounds):
        keys = [NodeKey.generate() for _ in range(size)]
        listen = [f"/ip4/127.0.0.1/tcp/{port}" for port in _free_ports(size)]
        invite = [f"{address}/p2p/{key.peer}" for address, key in zip(listen, keys, strict=True)]
        with crowd() as peers:
            start = time.monotonic()
            for key, address in zip(keys, listen, strict=True):
                peers.append(Peer(invite, peers, key, [address]))
            for peer in peers:
                peer.wait_ready()
            while time.monotonic() - start < ONE_MESH_S:
                if all(len(answer["peers"]) == size - 1 for answer in ask_all(peers, do="connected")):
                    took.append(time.monotonic() - start)
                    break
                time.sleep(0.05)
    return {"starts": rounds, "one_mesh": len(took), "one_mesh_max_s": round(max(took, default=0.0), 2)}


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--period", type=float, default=10.0)
    parser.add_argument("--starts", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    found = churn(given.seconds, given.period, random.Random(given.seed)) | at_once(given.starts)
    print(json.dumps(found))
    return int(bool(found["unanswered"] or found["incomplete"] or found["one_mesh"] < found["starts"]))


if __name__ == "__main__":
    sys.exit(main())
