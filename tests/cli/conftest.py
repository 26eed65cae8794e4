"""Commands run in this process against a fake node that serves its home from a thread."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio

from fixtures import make_fixtures
from meshnode.api.control import serve_control
from meshnode.cli import main
from meshnode.config import Home
from tests.api.fake_node import FakeNode


@dataclass
class Ended:
    """status: the exit status."""

    status: int
    out: str
    err: str


Meshnode = Callable[..., Ended]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture
def meshnode(capfd: pytest.CaptureFixture[str], home: Home, monkeypatch: pytest.MonkeyPatch) -> Meshnode:
    """meshnode("run", "smollm2", "hi"): the command, in this process, on the test's home."""
    for name in ("MESHNODE_INVITE", "MESHNODE_DEBUG", "MESHNODE_LAB"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MESHNODE_HOME", str(home.path))
    monkeypatch.setenv("MESHNODE_CONFIG", str(home.path.parent / "config.toml"))

    def call(*arguments: str) -> Ended:
        capfd.readouterr()
        status = main(arguments)
        said = capfd.readouterr()
        assert "Traceback" not in said.err
        return Ended(status, said.out, said.err)

    return call


@pytest.fixture
def node(home: Home) -> Iterator[FakeNode]:
    """A fake node that runs on the test's home."""
    fake = FakeNode(home=str(home.path))
    listening = threading.Event()
    tokens: list[trio.lowlevel.TrioToken] = []

    async def serve() -> None:
        tokens.append(trio.lowlevel.current_trio_token())
        with home.lock():
            async with trio.open_nursery() as nursery:
                await nursery.start(serve_control, fake, home)
                listening.set()
                await fake.stopped.wait()
                nursery.cancel_scope.cancel()

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    assert listening.wait(10)
    yield fake
    if thread.is_alive():
        tokens[0].run_sync_soon(fake.stopped.set)
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    [path] = make_fixtures.write("q8_0-tied", tmp_path_factory.mktemp("model"))
    return path
