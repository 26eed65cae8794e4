"""A mesh of many processes: nodes of the net floor alone, forked from one that has imported all of it.

With thirty nodes in one process a look-up waits for the other twenty-nine; so what it costs is measured here. Each node
takes commands as lines of JSON and answers each by one; it ends when its stdin does.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import trio

from meshnode.errors import MeshError
from meshnode.keys import NodeKey
from meshnode.mesh import Mesh
from meshnode.net import Network, open_network

MESH = Mesh("crowd", bytes(32))
LISTEN = ("/ip4/127.0.0.1/tcp/0",)
ECHO = "/crowd/echo/1"
ECHO_S = 2.0  # for a found peer to answer: as a node's offers have
FIND_S = 5.0
ANSWER_S = 30.0


class Peer:
    """A node in a process of its own, as the one that forked it sees it."""

    def __init__(
        self,
        bootstrap: Sequence[str],
        others: Sequence[Peer],
        key: NodeKey | None = None,
        listen: Sequence[str] = LISTEN,
    ) -> None:
        there, self._write = os.pipe()
        self._read, here = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                for other in (self, *(other for other in others if other.alive)):
                    os.close(other._write)  # else their stdin would not end with the parent
                    os.close(other._read)
                trio.run(_live, key or NodeKey.generate(), tuple(listen), tuple(bootstrap), there, here)
                status = 0
            finally:
                os._exit(status)
        os.close(there)
        os.close(here)
        self._buffer = b""
        self.alive = True

    def wait_ready(self) -> None:
        hello = self.answer()
        self.id: str = hello["peer"]
        self.addresses: list[str] = hello["addresses"]

    def say(self, **command: Any) -> None:
        os.write(self._write, json.dumps(command).encode() + b"\n")

    def answer(self, timeout: float = ANSWER_S) -> dict[str, Any]:
        ends = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            if not select.select([self._read], [], [], max(0.0, ends - time.monotonic()))[0]:
                raise TimeoutError(f"process {self.pid} does not answer")
            data = os.read(self._read, 1 << 16)
            if not data:
                raise EOFError(f"process {self.pid} has ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, **command: Any) -> dict[str, Any]:
        self.say(**command)
        return self.answer()

    def kill(self) -> None:
        if self.alive:
            self.alive = False
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            os.close(self._write)
            os.close(self._read)


@contextlib.contextmanager
def crowd() -> Iterator[list[Peer]]:
    """An empty one, whose processes end with the block."""
    peers: list[Peer] = []
    try:
        yield peers
    finally:
        for peer in peers:
            peer.kill()


def join(peers: list[Peer], bootstrap: Sequence[str] = ()) -> Peer:
    """One more, through the first that lives unless other addresses are given."""
    first = next((peer for peer in peers if peer.alive), None)
    peer = Peer(bootstrap or (first.addresses if first is not None else ()), peers)
    peers.append(peer)
    peer.wait_ready()
    return peer


def ask_all(peers: Sequence[Peer], **command: Any) -> list[dict[str, Any]]:
    """The answers of all, who work at once."""
    for peer in peers:
        peer.say(**command)
    return [peer.answer() for peer in peers]


async def _live(key: NodeKey, listen: Sequence[str], bootstrap: Sequence[str], stdin: int, stdout: int) -> None:
    async def echo(_: str, request: bytes) -> bytes:
        return request

    async with open_network(key, MESH, listen=listen, bootstrap=bootstrap) as network:
        network.serve(ECHO, echo)
        with contextlib.suppress(MeshError):  # the first has nobody to join
            await network.wait_joined()
        _print(stdout, peer=network.peer, addresses=network.addresses)
        async with trio.lowlevel.FdStream(stdin) as commands:
            buffer = b""
            while data := await commands.receive_some():
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    _print(stdout, **await _do(network, **json.loads(line)))


def _print(stdout: int, **answer: Any) -> None:
    os.write(stdout, json.dumps(answer).encode() + b"\n")


async def _do(network: Network, do: str, keys: Sequence[str] = ()) -> dict[str, Any]:
    start = time.perf_counter()
    if do == "provide":
        async with trio.open_nursery() as nursery:
            for key in keys:
                nursery.start_soon(network.provide, key.encode())
        return {"s": time.perf_counter() - start}
    if do == "connected":
        return {"peers": [info.peer for info in network.connected()]}
    found = await network.find(keys[0].encode(), timeout=FIND_S)
    took = time.perf_counter() - start
    answered: list[str] = []

    async def ask(peer: str) -> None:
        try:
            if peer == network.peer or await network.call(peer, ECHO, b"x", timeout=ECHO_S) == b"x":
                answered.append(peer)
        except MeshError:
            pass  # a record is a hint

    if do == "reach":
        async with trio.open_nursery() as nursery:
            for peer in found:
                nursery.start_soon(ask, peer)
    return {"found": found, "find_s": took, "answered": answered, "s": time.perf_counter() - start}
