"""A network of this process's own in which every TCP connection takes some milliseconds one way, the same for all.

COMMAND runs a program in a network namespace whose loopback nobody else shares; delay() is called in there. One rule
sends each new connection through a proxy, except to the ports that are left out.
"""

from __future__ import annotations

import multiprocessing
import random
import socket
import struct
import subprocess
from collections.abc import Sequence

import trio

COMMAND = ("unshare", "--map-root-user", "--net")
MARK = 0x77  # of the proxy's own connections, which go straight on
SO_ORIGINAL_DST = 80
JITTER = 0.05  # of the delay, to either side


def delay(delay_s: float, seed: int, direct: Sequence[int]) -> multiprocessing.Process:
    """direct: ports whose connections are not delayed. The proxy ends with this process."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    left_out = "".join(f" tcp dport != {port}" for port in direct)
    port = listener.getsockname()[1]
    rules = f"""
table ip delay {{
    chain out {{
        type nat hook output priority -100; policy accept;
        ip protocol tcp{left_out} meta mark != {MARK} redirect to :{port}
    }}
}}
"""
    subprocess.run(["nft", "-f", "-"], input=rules.encode(), check=True)
    proxy = multiprocessing.get_context("fork").Process(target=_serve, args=(listener, delay_s, seed), daemon=True)
    proxy.start()
    listener.close()
    return proxy


def _serve(listener: socket.socket, delay_s: float, seed: int) -> None:
    trio.run(_accept, listener, delay_s, random.Random(seed))


async def _accept(listener: socket.socket, delay_s: float, chance: random.Random) -> None:
    source = trio.SocketListener(trio.socket.from_stdlib_socket(_non_blocking(listener)))
    await trio.serve_listeners(lambda stream: _carry(stream, delay_s, chance), [source])


def _non_blocking(listener: socket.socket) -> socket.socket:
    listener.setblocking(False)
    return listener


async def _carry(near: trio.SocketStream, delay_s: float, chance: random.Random) -> None:
    raw = near.socket.getsockopt(socket.SOL_IP, SO_ORIGINAL_DST, 16)
    port, host = struct.unpack_from("!2xH4s", raw)
    onward = trio.socket.socket()
    onward.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, MARK)
    onward.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        await onward.connect((socket.inet_ntoa(host), port))
    except OSError:
        await near.aclose()
        return
    far = trio.SocketStream(onward)
    async with near, far, trio.open_nursery() as nursery:
        nursery.start_soon(_one_way, near, far, delay_s, chance)
        nursery.start_soon(_one_way, far, near, delay_s, chance)


async def _one_way(source: trio.SocketStream, sink: trio.SocketStream, delay_s: float, chance: random.Random) -> None:
    send, receive = trio.open_memory_channel[tuple[float, bytes]](1024)

    async def deliver() -> None:
        async for due, part in receive:
            await trio.sleep_until(due)
            await sink.send_all(part)
        await sink.send_eof()

    try:
        async with trio.open_nursery() as nursery, send:
            nursery.start_soon(deliver)
            last = 0.0
            async for part in source:
                late = delay_s * chance.uniform(1 - JITTER, 1 + JITTER)
                last = max(last, trio.current_time() + late)
                await send.send((last, bytes(part)))
            await send.aclose()
    except* (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
        await trio.aclose_forcefully(sink)
