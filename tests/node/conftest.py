"""Meshes in one process: real connections, the real worker program around a toy model."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

import make_fixtures
from meshnode.api.requests import RunRequest
from meshnode.config import LOOPBACK, NodeConfig
from meshnode.ids import Layers, parse_layers
from meshnode.mesh import Mesh
from meshnode.node import Node, ServeModel, load, open_node

N_LAYER = 6
HOUR_NS = 3_600_000_000_000
TTL_S = 1.0
TEST_S = 15.0  # far above what any of these tests takes
CONFIG = NodeConfig(listen=LOOPBACK, lease_ttl_s=TTL_S, hop_timeout_s=2.0, threads=1, max_sessions=3, chunk=64)


class TestMesh:
    """A private mesh. nodes: those that serve, in the order of their layers; entry: one without weights."""

    __test__ = False

    def __init__(self, nursery: trio.Nursery, model: Path, worker: Path) -> None:
        self._nursery = nursery
        self._scopes: dict[int, trio.CancelScope] = {}
        self.model = model
        self.worker = worker
        self.mesh = Mesh.private()
        self.nodes: list[Node] = []
        self.entry: Node

    async def add(self, *layers: Layers, serve: bool = True, model: Path | None = None) -> Node:
        """A node in a task of its own, which end() can stop whatever came after it. model: its own copy."""
        node: Node = await self._nursery.start(self._run, model or self.model, layers)
        if serve:
            self.nodes.append(node)
        return node

    async def _run(self, model: Path, layers: tuple[Layers, ...], *, task_status: trio.TaskStatus[Node]) -> None:
        bootstrap = list(self.nodes[0].network.addresses) if self.nodes else []
        with trio.CancelScope() as scope:
            async with open_node(
                None,
                CONFIG,
                mesh=self.mesh,
                bootstrap=bootstrap,
                models=[ServeModel(model, part) for part in layers],
                ephemeral=True,
                worker=self.worker,
            ) as node:
                self._scopes[id(node)] = scope
                task_status.started(node)
                await trio.sleep_forever()

    def end(self, node: Node) -> None:
        self._scopes[id(node)].cancel()
        if node in self.nodes:
            self.nodes.remove(node)

    async def ready(self) -> str:
        """The artifact, once a whole route is offered."""
        with trio.fail_after(30):
            while True:
                for model in await self.entry.models():
                    if not model["missing"] and all(n.status()["state"] == "ready" for n in self.nodes):
                        return str(model["artifact"])
                await trio.sleep(0.02)

    async def ask(self, model: str, prompt: str = "hello", **options: Any) -> dict[str, Any]:
        async with self.entry.run(RunRequest(model, prompt=prompt, **options)) as events:
            async for event in events:
                if event["event"] == "done":
                    result: dict[str, Any] = event["result"]
                    return result
        raise AssertionError("an answer has an end")

    async def quiet(self, within: float) -> None:
        """Returns once no node holds a session."""
        with trio.fail_after(within):
            while any(node.status()["sessions"] for node in [*self.nodes, self.entry]):
                await trio.sleep(0.02)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour ahead, fresh files count as old, so that their stamps are trusted."""

    class Ahead:
        @staticmethod
        def time_ns() -> int:
            return time.time_ns() + HOUR_NS

    monkeypatch.setattr(load, "time", Ahead)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sound file of six layers; the toy model in the worker is told to have its shape."""
    [path] = make_fixtures.write("q8_0-tied", tmp_path)
    monkeypatch.setenv("MESHNODE_FAKE_SHAPE", f"{N_LAYER} 64 320")
    return path


@asynccontextmanager
async def open_mesh(
    model: Path, worker: Path, *ranges: str | tuple[str, ...], within_s: float = TEST_S
) -> AsyncIterator[TestMesh]:
    """A mesh of one node each range or ranges, and an entry node."""
    failure = None
    async with trio.open_nursery() as nursery:
        nursery.cancel_scope.deadline = trio.current_time() + within_s
        mesh = TestMesh(nursery, model, worker)
        for part in ranges:
            parts = (part,) if isinstance(part, str) else part
            await mesh.add(*map(parse_layers, parts))
        mesh.entry = await mesh.add(serve=False)
        try:
            yield mesh
        except Exception as error:  # as it is, not in the group that the nursery would make of it
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    assert trio.current_time() < nursery.cancel_scope.deadline, "the test took too long"


@pytest.fixture
def mesh_of(toy: Path, fake_worker: Path) -> Callable[..., Any]:
    """mesh_of("0-2", "2-6"): a context manager with that mesh and an entry node."""
    return partial(open_mesh, toy, fake_worker)
