"""llama-server and its RPC back ends as a benchmark's peer: on loopback, with as many requests at once as slots."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter

import trio

READY_S = 60.0


@contextmanager
def _running(command: list[str | Path]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _wait(process: subprocess.Popen[bytes], ready: str, port: int) -> None:
    """Until a GET of that path succeeds, or without one until the port takes a connection."""
    until = time.monotonic() + READY_S
    while time.monotonic() < until and process.poll() is None:
        try:
            if ready:
                urllib.request.urlopen(f"http://127.0.0.1:{port}{ready}", timeout=5).close()
            else:
                socket.create_connection(("127.0.0.1", port), 5).close()
            return
        except (OSError, urllib.error.HTTPError):
            time.sleep(0.1)
    raise RuntimeError(f"{process.args!r} did not become ready")


class Server:
    def __init__(self, port: int) -> None:
        self.port = port
        self.decoded: list[float] = []  # tokens/s of each request's decode, in the last turn
        self.url = f"http://127.0.0.1:{port}/completion"

    async def rate(self, requests: int, prompt: int, count: int) -> float:
        """Generated tokens/s of that many requests at once, each with its own prompt of so many tokens."""
        return await trio.to_thread.run_sync(self._rate, requests, prompt, count)

    def _rate(self, requests: int, prompt: int, count: int) -> float:
        from .engine import ids

        made, self.decoded = [0] * requests, list[float]()

        def one(n: int) -> None:
            settings = {"n_predict": count, "ignore_eos": True, "cache_prompt": False, "temperature": 0}
            body = json.dumps({"prompt": ids(prompt, n + 1)} | settings).encode()
            request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=120) as reply:
                answer = json.load(reply)
            made[n] = answer["tokens_predicted"]
            self.decoded.append(answer["timings"]["predicted_per_second"])

        threads = [threading.Thread(target=one, args=(n,)) for n in range(requests)]
        begin = perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        spent = perf_counter() - begin
        if made != [count] * requests:
            raise RuntimeError(f"llama-server made {made} tokens, not {count} each")
        return requests * count / spent


@contextmanager
def server(
    peers: Path, model: Path, *options: str, slots: int, threads: int, port: int | None = None
) -> Iterator[Server]:
    port = port or _free_port()
    size = ("-c", str(1024 * slots), "-np", str(slots), "-t", str(threads), "-tb", str(threads), "-b", "512")
    place = ("--host", "127.0.0.1", "--port", str(port), "--no-webui")
    with _running([peers / "llama-server", "-m", model, *size, *place, *options]) as process:
        _wait(process, "/health", port)
        yield Server(port)


@contextmanager
def rpc_servers(peers: Path, count: int) -> Iterator[list[str]]:
    """Addresses of so many RPC back ends with one thread each."""
    with ExitStack() as stack:
        addresses = []
        for _ in range(count):
            port = _free_port()
            command: list[str | Path] = [peers / "ggml-rpc-server", "-H", "127.0.0.1", "-p", str(port), "-t", "1"]
            _wait(stack.enter_context(_running(command)), "", port)
            addresses.append(f"127.0.0.1:{port}")
        yield addresses
