"""Prints what the net floor costs on loopback, one node a process: `python -m tests.net.measure`.

Connect (dial, Noise, Yamux, hello), the round trip of 8 KiB on an open stream, a call, and 4 MiB frames one way.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

import trio

from meshnode.keys import NodeKey
from meshnode.mesh import Mesh
from meshnode.net import PeerStream, open_network

MEMBERSHIP = Mesh("measure", bytes(32))
LISTEN = ["/ip4/127.0.0.1/tcp/0"]
ECHO, SINK, CALL = "/measure/echo/1", "/measure/sink/1", "/measure/call/1"


async def serve() -> None:
    async def echo(stream: PeerStream) -> None:
        while True:
            await stream.send(*await stream.receive())

    async def sink(stream: PeerStream) -> None:
        while True:
            header, _ = await stream.receive()
            if header == b"end":
                await stream.send(b"done")

    async def call(_: str, request: bytes) -> bytes:
        return request

    async with open_network(NodeKey.generate(), MEMBERSHIP, listen=LISTEN) as network:
        network.handle(ECHO, echo)
        network.handle(SINK, sink)
        network.serve(CALL, call)
        print(network.addresses[0], flush=True)
        await trio.sleep_forever()


async def median_ms(times: int, what) -> float:
    took = []
    for _ in range(times):
        start = time.perf_counter()
        await what()
        took.append(time.perf_counter() - start)
    return statistics.median(took) * 1e3


async def measure(address: str) -> None:
    peer = address.rsplit("/", 1)[1]

    async def connect() -> None:
        async with open_network(NodeKey.generate(), MEMBERSHIP, listen=[]) as network:
            start = time.perf_counter()
            await network.connect(peer, [address])
            connects.append((time.perf_counter() - start) * 1e3)

    connects: list[float] = []
    for _ in range(15):
        await connect()
    print(f"connect            {statistics.median(connects):8.2f} ms")

    async with open_network(NodeKey.generate(), MEMBERSHIP, listen=[]) as network:
        await network.connect(peer, [address])
        echo = await network.open(peer, ECHO)
        payload = bytes(8192)

        async def round_trip() -> None:
            await echo.send(b"h", payload)
            await echo.receive()

        await median_ms(300, round_trip)
        print(f"round trip 8 KiB   {await median_ms(2000, round_trip):8.3f} ms")

        async def call() -> None:
            await network.call(peer, CALL, b"x" * 100, timeout=5)

        print(f"call               {await median_ms(500, call):8.3f} ms")

        sink = await network.open(peer, SINK)
        block, count = bytes(4 << 20), 64
        await sink.send(b"b", block)
        start = time.perf_counter()
        for _ in range(count):
            await sink.send(b"b", block)
        await sink.send(b"end")
        await sink.receive()
        print(f"one way 4 MiB      {count * len(block) / (time.perf_counter() - start) / 1e6:8.0f} MB/s")


def main() -> None:
    if sys.argv[1:] == ["serve"]:
        trio.run(serve)
        return
    server = subprocess.Popen([sys.executable, "-m", "tests.net.measure", "serve"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        trio.run(measure, server.stdout.readline().strip())
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
