"""From a path to a holding that is served: identify, check, load, prove by one step, and again when the worker dies."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from ..artifact.gguf import Summary
from ..artifact.identity import OpenArtifact, describe, identify, open_artifact
from ..config import NodeConfig
from ..errors import MeshError
from ..ids import ArtifactId, Layers
from ..route.lease import LeaseBook
from ..stage import Holding, Stage
from ..worker import LoadSpec, Sampling, Worker, open_worker
from ..worker.build import worker_path

log = logging.getLogger(__name__)

RESPAWNS = 3  # a worker that dies more often than this within RESPAWN_WINDOW_S is not started again
RESPAWN_WINDOW_S = 60.0
PROBE_STEPS = 4  # decode steps timed before a holding is offered; the first, which reads the weights, is left out


@dataclass(frozen=True)
class ServeModel:
    """What an operator asks to serve. layers None: all of them."""

    path: Path
    layers: Layers | None = None


class Loading:
    """One model on its way to being served, and while it is; `view` is what status shows of it."""

    def __init__(self, model: ServeModel, config: NodeConfig) -> None:
        self._config = config
        self.file: OpenArtifact = open_artifact(model.path)
        try:
            self.summary: Summary = describe(self.file)
            self.layers = (model.layers or Layers(0, self.summary.n_layer)).within(self.summary.n_layer)
        except BaseException:
            self.file.close()
            raise
        self.name = self.summary.name or model.path.stem
        self.artifact: ArtifactId | None = None
        self.state = "hashing"
        self.progress = 0.0
        self.error: MeshError | None = None
        self.worker: Worker | None = None

    def view(self) -> dict[str, Any]:
        seen: dict[str, Any] = {
            "artifact": self.artifact,
            "name": self.name,
            "layers": [self.layers.begin, self.layers.end],
            "n_layer": self.summary.n_layer,
            "state": self.state,
            "worker": self.worker.pid if self.worker else None,
        }
        if self.worker:
            seen |= {"tensor_bytes": self.worker.loaded.tensor_bytes, "kv_bytes": self.worker.loaded.kv_bytes}
        if self.state == "hashing":
            seen["progress"] = round(self.progress, 3)
        if self.error:
            seen["error"] = {"code": self.error.code, "message": self.error.message, "hint": self.error.hint}
        return seen

    async def serve(self, stage: Stage, on_ready: Callable[[], Awaitable[None]], worker: Path | None = None) -> None:
        """Serves until cancelled. MeshError when it cannot be loaded at first, or its worker dies again and again."""
        await self._identify()
        binary = worker if worker is not None else await trio.to_thread.run_sync(worker_path)
        started: list[float] = []
        try:
            while True:
                started = [t for t in started if t > trio.current_time() - RESPAWN_WINDOW_S] + [trio.current_time()]
                self.state = "loading"
                self.file.check_unchanged()
                async with open_worker(binary, self._spec(), step_timeout=self._config.hop_timeout_s) as running:
                    holding = await self._hold(running)
                    await stage.hold(holding)
                    try:
                        self.state, self.worker = "ready", running
                        await on_ready()
                        await running.died.wait()
                    finally:
                        self.worker = None
                        with trio.CancelScope(shield=True):
                            await stage.let_go(holding)
                fault = running.fault or MeshError("worker_died", "the worker ended")
                log.error("the worker of layers %s: %s", self.layers, fault)
                if len(started) > RESPAWNS:
                    raise fault
        except MeshError as error:
            self.state, self.error = "failed", error
            raise

    async def _identify(self) -> None:
        stop = False

        def progress(done: int, size: int) -> None:
            self.progress = done / size

        def work() -> str:
            return identify(self.file, progress, lambda: stop)

        try:
            self.artifact = ArtifactId(await trio.to_thread.run_sync(work, abandon_on_cancel=True))  # type: ignore[call-arg]  # old stubs
        finally:
            stop = True  # a thread cannot be cancelled; this ends it within one chunk

    def _spec(self) -> LoadSpec:
        config = self._config
        return LoadSpec(
            fd=self.file.fd,
            stamp=self.file.stamp,
            layers=(self.layers.begin, self.layers.end),
            n_sessions=config.max_sessions,
            n_ctx=config.context_of(self.summary.n_ctx_train),
            max_step=config.chunk,
            n_threads=config.worker_threads,
            numerics=config.numerics,
        )

    async def _hold(self, worker: Worker) -> Holding:
        assert self.artifact is not None
        loaded = worker.loaded
        return Holding(
            artifact=self.artifact,
            name=self.name,
            worker=worker,
            book=LeaseBook(loaded.n_sessions, self._config.lease_ttl_s),
            verify=self.file.check_unchanged,
            token_us=await _probe(worker),
        )


async def _probe(worker: Worker) -> int:
    """Microseconds of compute a position in decode; proves that the worker computes before it is offered."""
    loaded, handle = worker.loaded, 0
    begin, end = loaded.layers
    await worker.open(handle, Sampling())
    took = []
    for position in range(PROBE_STEPS):
        stepped = await worker.step(
            handle,
            position,
            (begin, end),
            tokens=[0] if begin == 0 else None,
            residual=bytes(4 * loaded.n_embd) if begin else None,
        )
        took.append(stepped.compute_ns // 1000)
    await worker.close(handle)
    return min(took[1:])
