"""From a path to a holding that is served: identify, check, load, prove by one step, and again when the worker dies."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import trio

from ..artifact.catalogue import Catalogue, Entry
from ..artifact.gguf import Summary
from ..artifact.identity import OpenArtifact
from ..artifact.policy import Policies, Policy
from ..config import NodeConfig
from ..errors import CODES, MeshError
from ..ids import ArtifactId, Layers
from ..route.lease import LeaseBook
from ..stage import Holding, Stage
from ..worker import ChatTemplate, LoadSpec, Sampling, Worker, WorkerCrashed, open_template, open_worker
from ..worker.build import worker_path
from .quarantine import Quarantine, program_key

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 60.0  # before a worker is started again; doubles from one to the other
LONG_LIFE_S = 60.0  # a worker that lived so long did not die of what it was started with
PROBE_STEPS = 4  # decode steps timed before a holding is offered; the first, which reads the weights, is left out


@dataclass(frozen=True)
class ServeModel:
    """What an operator asks to serve. layers None: all of them; policy: where its bytes may come from."""

    path: Path
    layers: Layers | None = None
    policy: Policy = Policy.LOCAL_REQUIRED


class Loading:
    """One model on its way to being served, and while it is.

    MeshError of its file, not_available or bad_layers when it is made: before anything is bound. policies: of the
    node's loads; quarantine: what crashed a worker.
    """

    def __init__(
        self,
        model: ServeModel,
        config: NodeConfig,
        catalogue: Catalogue,
        policies: Policies | None = None,
        quarantine: Quarantine | None = None,
    ) -> None:
        model.policy.check_available()
        self.policy = model.policy
        self._policies = policies or Policies()
        self._quarantine = quarantine or Quarantine(None)
        self._path = model.path
        self._config = config
        self._catalogue = catalogue
        self.summary: Summary = catalogue.describe(model.path, now_ns=time.time_ns())
        self.layers = (model.layers or Layers(0, self.summary.n_layer)).within(self.summary.n_layer)
        self.artifact: ArtifactId | None = None
        self.state = "hashing"
        self.progress = 0.0
        self.error: MeshError | None = None
        self.worker: Worker | None = None
        self._changed = trio.Event()

    def view(self) -> dict[str, Any]:
        seen: dict[str, Any] = {
            "artifact": self.artifact,
            "name": self.summary.name,
            "layers": [self.layers.begin, self.layers.end],
            "n_layer": self.summary.n_layer,
            "policy": self.policy.value,
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

    async def serve(self, stage: Stage, on_ready: Callable[[], None], worker: Path | None = None) -> None:
        """Serves until cancelled, or until the bytes are no longer those identified: then it is only shown as failed.

        MeshError when it cannot be loaded at first. A worker that dies later is started again, ever more seldom.
        """
        try:
            await self._identify()
            binary = worker if worker is not None else await trio.to_thread.run_sync(worker_path)
            assert self.artifact is not None
            with self._policies.registered(self.artifact, self.policy):
                await self._keep_serving(stage, on_ready, binary, await trio.to_thread.run_sync(program_key, binary))
        except MeshError as error:
            self.state, self.error = "failed", error
            raise

    async def _keep_serving(self, stage: Stage, on_ready: Callable[[], None], binary: Path, program: str) -> None:
        assert self.artifact is not None
        if not self._config.retry_crashed:
            self._quarantine.check(self.artifact, program)
        artifact, pause, ready_once = self.artifact, FIRST_PAUSE_S, False

        def ready() -> None:
            self._quarantine.lift(artifact, program)
            on_ready()

        while not self._changed.is_set():
            began = trio.current_time()
            try:
                fault = await self._serve_once(stage, ready, binary)
                ready_once = True
            except MeshError as error:
                if not ready_once:
                    if isinstance(error, WorkerCrashed):  # in loading, or in the steps that prove that it computes
                        self._quarantine.add(self.artifact, program, f"{error.message} on loading layers {self.layers}")
                    raise
                fault = error  # what has served once is tried again, whatever becomes of it; the node stays up
            self.state, self.error = "failed", fault
            log.error("layers %s: %s", self.layers, fault)
            pause = FIRST_PAUSE_S if trio.current_time() - began > LONG_LIFE_S else min(2 * pause, LAST_PAUSE_S)
            with trio.move_on_after(pause):
                await self._changed.wait()

    async def _serve_once(self, stage: Stage, on_ready: Callable[[], None], binary: Path) -> MeshError:
        """Until the worker dies, or the file has changed; the reason why it ended."""
        self.state, self.error = "loading", None
        assert self.artifact is not None
        open_again = partial(self._catalogue.open, self.artifact, now_ns=time.time_ns())
        with await trio.to_thread.run_sync(open_again) as file:
            async with (
                open_worker(binary, self._spec(file), step_timeout=self._config.hop_timeout_s) as running,
                _template(running) as template,
            ):
                holding = await self._hold(running, template)
                stage.hold(holding)
                try:
                    self.state, self.worker = "ready", running
                    on_ready()
                    await self._over(running)
                finally:
                    self.worker = None
                    with trio.CancelScope(shield=True):
                        await stage.let_go(holding, self.error)
                if self.error is not None:
                    return self.error
                return running.fault or MeshError("worker_died", "the worker ended")

    async def _over(self, running: Worker) -> None:
        """Returns when the worker has died or the file has changed."""

        async def wait_for(event: trio.Event) -> None:
            await event.wait()
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_for, running.died)
            nursery.start_soon(wait_for, self._changed)

    async def verify(self) -> None:
        """MeshError identity_changed when the bytes are not those identified; the holding is then withdrawn."""
        assert self.artifact is not None
        check = partial(self._catalogue.verify, self.artifact, now_ns=time.time_ns())
        try:
            await trio.to_thread.run_sync(check)
        except MeshError as error:
            self.error = error
            self._changed.set()
            raise

    async def _identify(self) -> None:
        stop = False

        def progress(done: int, size: int) -> None:
            self.progress = done / size

        def work() -> Entry:
            add = self._catalogue.add
            return add(self._path, now_ns=time.time_ns(), progress=progress, cancelled=lambda: stop)

        try:
            entry = await trio.to_thread.run_sync(work, abandon_on_cancel=True)  # type: ignore[call-arg]
        except MeshError as error:  # status and logs show what becomes of it, and no path
            raise MeshError(error.code, f"{self.summary.name!r}: {CODES[error.code][1]}", hint=error.hint) from error
        finally:
            stop = True  # a thread cannot be cancelled; this ends it within one chunk
        self.artifact, self.summary = entry.identity, entry.summary

    def _spec(self, file: OpenArtifact) -> LoadSpec:
        config = self._config
        return LoadSpec(
            files=file.files,
            layers=(self.layers.begin, self.layers.end),
            n_sessions=config.max_sessions,
            n_ctx=config.context_of(self.summary.n_ctx_train),
            max_step=config.chunk,
            n_threads=config.worker_threads,
            numerics=config.numerics,
        )

    async def _hold(self, worker: Worker, template: ChatTemplate | None) -> Holding:
        assert self.artifact is not None
        loaded = worker.loaded
        return Holding(
            artifact=self.artifact,
            name=self.summary.name,
            worker=worker,
            book=LeaseBook(loaded.n_sessions, self._config.lease_ttl_s),
            verify=self.verify,
            token_us=await _probe(worker),
            template=template,
        )


@asynccontextmanager
async def _template(worker: Worker) -> AsyncIterator[ChatTemplate | None]:
    if worker.loaded.layers[0] > 0 or not worker.loaded.has_template:
        yield None
        return
    async with open_template(await worker.chat_facts()) as template:
        yield template


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
