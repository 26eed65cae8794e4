"""Stands in for `meshnode serve`: takes its arguments, serves FakeNode, and misbehaves as its environment says.

FAKE_EXIT=NAME:CODE   the node whose home is called NAME ends with an error of that code once it has its home
FAKE_SLOW=NAME        never becomes ready
FAKE_DEAF=NAME        ignores stop and SIGTERM
FAKE_GAP=1            the entry node never finds a route
FAKE_PACE=SECONDS     between tokens
"""

import argparse
import json
import os
import signal
import sys
from pathlib import Path

import trio

from meshnode.api.control import serve_control
from meshnode.config import Home
from tests.api.fake_node import ARTIFACT, FakeNode


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("serve")
    parser.add_argument("model", nargs="?")
    for option in ("--home", "--listen", "--http", "--threads", "--numerics", "--lease-ttl", "--layers", "--join"):
        parser.add_argument(option)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--lifeline", action="store_true")
    said = parser.parse_args()
    name = Path(said.home).name
    (Path(said.home) / "arguments.json").write_text(json.dumps(vars(said)))
    failing, _, code = os.environ.get("FAKE_EXIT", "").partition(":")
    if failing == name:
        print(json.dumps({"error": {"code": code, "message": "as the test wants it", "hint": "none"}}))
        sys.exit(3)
    node = FakeNode(
        home=said.home,
        peer=f"peer-{name}",
        pace_s=float(os.environ.get("FAKE_PACE", "0")),
        complete=not os.environ.get("FAKE_GAP"),
    )
    if said.layers:
        layers = [int(part) for part in said.layers.split("-")]
        state = "loading" if os.environ.get("FAKE_SLOW") == name else "ready"
        node.holdings = [{"artifact": ARTIFACT, "name": "tiny", "layers": layers, "n_layer": layers[1], "state": state}]
    if os.environ.get("FAKE_DEAF") == name:
        node.stop = lambda: None  # type: ignore[method-assign]
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    trio.run(serve, node, Home(Path(said.home)), said.lifeline)


async def serve(node: FakeNode, home: Home, lifeline: bool) -> None:
    async def until_eof() -> None:
        async with trio.lowlevel.FdStream(0) as stream:
            while await stream.receive_some():
                pass
        node.stopped.set()

    with home.lock():
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_control, node, home)
            if lifeline:
                nursery.start_soon(until_eof)
            await node.stopped.wait()
            nursery.cancel_scope.cancel()


if __name__ == "__main__":
    main()
