"""What a load does when its source changes: noticed at each of the four checks, and nothing takes its place."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

import make_fixtures
from meshnode.api.requests import RunRequest
from meshnode.artifact.catalogue import Catalogue
from meshnode.artifact.policy import Policies, Policy
from meshnode.errors import MeshError
from meshnode.mesh import Mesh
from meshnode.node import Node, ServeModel, load, open_node
from meshnode.node.load import Loading
from tests.artifact.changes import CHANGES, flip

from .conftest import CONFIG, open_mesh

pytestmark = pytest.mark.usefixtures("settled")  # so that stamps have to tell what bytes told else


class Stage:
    """As much of a stage as a load needs: what is offered now."""

    def __init__(self) -> None:
        self.holdings: list[Any] = []
        self.offered = 0

    def hold(self, holding: Any) -> None:
        self.holdings.append(holding)
        self.offered += 1

    async def let_go(self, holding: Any, why: MeshError | None = None) -> None:
        self.holdings.remove(holding)


class Serving:
    """A load in a task of its own. outcome: what ended it, once it has ended."""

    def __init__(self, model: ServeModel, worker: Path) -> None:
        self.stage, self.policies = Stage(), Policies()
        self.loading = Loading(model, CONFIG, Catalogue(), self.policies)
        self.ready, self.over = trio.Event(), trio.Event()
        self.outcome: MeshError | None = None
        self._worker = worker

    async def run(self) -> None:
        try:
            await self.loading.serve(self.stage, self.ready.set, self._worker)  # type: ignore[arg-type]
        except MeshError as error:
            self.outcome = error
        finally:
            self.over.set()


@asynccontextmanager
async def serving(path: Path, worker: Path) -> AsyncIterator[Serving]:
    made = Serving(ServeModel(path), worker)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.run)
            yield made
            nursery.cancel_scope.cancel()


async def ready(made: Serving) -> None:
    """MeshError when it ended instead."""
    async with trio.open_nursery() as nursery:

        async def or_over() -> None:
            await made.over.wait()
            nursery.cancel_scope.cancel()

        nursery.start_soon(or_over)
        await made.ready.wait()
        nursery.cancel_scope.cancel()
    if made.outcome:
        raise made.outcome


async def withdrawn(made: Serving) -> None:
    """Returns once the load has ended as changed, its policy gone with it, and nothing offered any more."""
    await made.over.wait()
    error = made.outcome or made.loading.error
    assert error is not None
    assert error.code == "identity_changed"
    assert made.stage.holdings == []
    assert made.loading.artifact is not None
    assert made.policies.of(made.loading.artifact) is None


def linked(path: Path, change: str) -> Path:
    """Where the model is named, as this change needs it."""
    if change != "link swapped":
        return path
    link = path.with_name("link.gguf")
    link.symlink_to(path.name)
    return link


@pytest.mark.parametrize("change", CHANGES)
async def test_after_hashing(toy: Path, fake_worker: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    path, real = linked(toy, change), Catalogue.add

    def add(catalogue: Catalogue, *args: Any, **options: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()  # where the event loop runs
        entry = real(catalogue, *args, **options)
        CHANGES[change](path)
        return entry

    monkeypatch.setattr(Catalogue, "add", add)
    async with serving(path, fake_worker) as made:
        await withdrawn(made)
    assert made.stage.offered == 0


@pytest.mark.parametrize("change", CHANGES)
async def test_after_advertising(toy: Path, fake_worker: Path, change: str) -> None:
    path = linked(toy, change)
    async with serving(path, fake_worker) as made:
        await ready(made)
        [holding] = made.stage.holdings
        assert made.policies.of(holding.artifact) is Policy.LOCAL_REQUIRED
        await holding.verify()
        CHANGES[change](path)
        with pytest.raises(MeshError) as caught:
            await holding.verify()
        assert caught.value.code == "identity_changed"
        await withdrawn(made)


@pytest.mark.parametrize("change", CHANGES)
async def test_before_the_spawn(toy: Path, fake_worker: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """The worker notices; or it has the descriptor of the old bytes, and the next check finds others under the path."""
    path, real = linked(toy, change), load.open_worker

    def spawn(*args: Any, **options: Any) -> Any:
        CHANGES[change](path)
        return real(*args, **options)

    monkeypatch.setattr(load, "open_worker", spawn)
    async with serving(path, fake_worker) as made:
        if change == "link swapped":
            await ready(made)
            with pytest.raises(MeshError):
                await made.stage.holdings[0].verify()
        await withdrawn(made)
    assert made.stage.offered == (change == "link swapped")


@pytest.mark.parametrize("change", CHANGES)
async def test_after_the_lease_and_before_the_next(toy: Path, fake_worker: Path, change: str) -> None:
    """What is leased ends with the next announcement, and is told why; nothing more is leased."""
    path, changed = linked(toy, change), False
    async with open_mesh(path, fake_worker, "0-6") as mesh:
        model, [node] = await mesh.ready(), mesh.nodes
        with pytest.raises(MeshError) as leased:
            async with mesh.entry.run(RunRequest(model, prompt="hello", max_tokens=240)) as events:
                async for event in events:
                    if event["event"] == "token" and not changed:
                        changed = True
                        CHANGES[change](path)
                        node._announce_now.set()
        assert leased.value.code == "hop_failed"
        assert "identity_changed" in leased.value.message
        with pytest.raises(MeshError) as refused:
            await mesh.ask(model, max_tokens=2)
        assert refused.value.code in ("no_route", "unknown_model")
        assert node.status()["holdings"][0]["error"]["code"] == "identity_changed"
        assert node.status()["state"] == "degraded"


@pytest.mark.parametrize("change", CHANGES)
async def test_a_lease_on_changed_bytes_is_refused_by_name(
    toy: Path, fake_worker: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    async def silent(node: Node) -> None:
        """Announcing would notice it first; who is connected is asked anyway."""
        await trio.sleep_forever()

    monkeypatch.setattr(Node, "_announce", silent)
    path = linked(toy, change)
    async with open_mesh(path, fake_worker, "0-6") as mesh:
        model = await mesh.ready()
        CHANGES[change](path)
        with pytest.raises(MeshError) as refused:
            await mesh.ask(model, max_tokens=2)
        assert "identity_changed" in refused.value.message


SPOILED: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "incomplete": lambda path: os.truncate(path, path.stat().st_size - 1),
    "changed": flip,
    "another's": lambda path: make_fixtures.write("q8_0-other", path.parent)[0].rename(path) and None,
}


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setenv("MESHNODE_FAKE_SHAPE", "6 64 320")
    return make_fixtures.write("q8_0-shards", tmp_path / "set")


@pytest.mark.parametrize("spoiled", SPOILED)
@pytest.mark.parametrize("sharded", [False, True], ids=["file", "shards"])
async def test_a_worker_that_is_started_again_gets_no_other_bytes(
    toy: Path, shards: list[Path], fake_worker: Path, sharded: bool, spoiled: str
) -> None:
    """The retry after a crash. Nothing stands in for the source, though a sound model lies beside it."""
    path = shards[0] if sharded else toy
    spare = path.with_name("spare.gguf")
    spare.write_bytes(path.read_bytes())
    async with serving(path, fake_worker) as made:
        await ready(made)
        SPOILED[spoiled](shards[1] if sharded else toy)
        assert made.loading.worker is not None
        os.kill(made.loading.worker.pid, signal.SIGKILL)
        while made.loading.error is None or made.loading.error.code != "identity_changed":
            await trio.sleep(0.01)
        assert made.stage.holdings == []
        assert made.stage.offered == 1


@pytest.mark.parametrize("spoiled", SPOILED)
async def test_a_spoiled_source_fails_before_anything_is_bound(
    shards: list[Path], fake_worker: Path, spoiled: str
) -> None:
    """On the main path; what is another's is a model of its own, and has no identity but its own."""
    SPOILED[spoiled](shards[1])
    if spoiled in ("changed", "another's"):
        whole = make_fixtures.shard_bytes(make_fixtures.RECIPES["q8_0-shards"][0], 3)
        assert shards[1].read_bytes() != whole[1]
        return
    with pytest.raises(MeshError) as caught:
        Loading(ServeModel(shards[0]), CONFIG, Catalogue())
    assert caught.value.code in ("bad_shards", "bad_gguf")


async def test_a_projector_is_no_model_and_is_not_loaded_beside_one(toy: Path, fake_worker: Path) -> None:
    meta = [m for m in make_fixtures.metadata(make_fixtures.Tiny()) if not m.key.startswith("llama.")]
    projector = toy.with_name("mmproj-tiny.gguf")
    for kind in (meta[0]._replace(value="clip"), make_fixtures.Meta("general.type", "str", "mmproj")):
        rest = [m for m in meta if m.key != kind.key]
        projector.write_bytes(make_fixtures.encode([kind, *rest], []))
        with pytest.raises(MeshError) as caught:
            Loading(ServeModel(projector), CONFIG, Catalogue())
        assert (caught.value.code, "projector" in caught.value.message) == ("unsupported_architecture", True)
    async with serving(toy, fake_worker) as made:
        await ready(made)
        assert made.loading.worker is not None
        opened = [os.readlink(fd) for fd in Path(f"/proc/{made.loading.worker.pid}/fd").iterdir()]
        assert [path for path in opened if path.endswith(".gguf")] == [str(toy)]


async def test_a_policy_that_is_not_available_is_refused_before_anything_is_bound(toy: Path) -> None:
    with pytest.raises(MeshError) as caught:
        async with open_node(
            None, CONFIG, mesh=Mesh.private(), models=[ServeModel(toy, policy=Policy.FETCH_ALLOWED)], ephemeral=True
        ):
            pass
    assert caught.value.code == "not_available"


def test_a_policy_is_gone_with_its_load() -> None:
    policies = Policies()
    one, other = make_ids()
    with policies.registered(one, Policy.LOCAL_REQUIRED):
        assert policies.of(one) is Policy.LOCAL_REQUIRED
        assert policies.of(other) is None  # a load of another model is not bound by it
        with policies.registered(one, Policy.LOCAL_REQUIRED):
            pass
        assert policies.of(one) is Policy.LOCAL_REQUIRED  # two ranges of one model: the first is still there
        with pytest.raises(MeshError) as caught, policies.registered(other, Policy.FETCH_ALLOWED):
            pass
        assert caught.value.code == "not_available"
        assert policies.of(other) is None
    assert policies.of(one) is None


def make_ids() -> tuple[Any, Any]:
    return "sha256:" + "1" * 64, "sha256:" + "2" * 64
