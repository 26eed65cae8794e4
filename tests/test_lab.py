import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fixtures import make_fixtures
from meshnode import lab as labs
from meshnode.api.connect import Control
from meshnode.api.requests import RunRequest
from meshnode.config import Home, cores
from meshnode.errors import MeshError
from meshnode.ids import Layers, parse_layers
from meshnode.lab import lab as coming_up
from meshnode.lab import process

from .api.fake_node import ARTIFACT, WORDS

FAKE = (sys.executable, "-m", "tests.api.fake_serve")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    [path] = make_fixtures.write("q8_0-tied", tmp_path_factory.mktemp("model"))
    return path


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(process, "PROGRAM", FAKE)
    return monkeypatch


@pytest.fixture
def plan(model: Path) -> labs.Plan:
    return labs.plan(model, 2)


def code_of(act: Callable[[], object]) -> str:
    with pytest.raises(MeshError) as error:
        act()
    assert error.value.message
    return error.value.code


def say(text: str) -> None:
    pass


def gone(pid: int) -> bool:
    return process.start_time(pid) is None


class TestPlan:
    def test_an_even_share(self, model: Path) -> None:
        assert labs.plan(model).layers == (Layers(0, 2), Layers(2, 4), Layers(4, 6))
        assert labs.plan(model, 4).layers == (Layers(0, 2), Layers(2, 4), Layers(4, 5), Layers(5, 6))

    def test_given_ranges_may_overlap(self, model: Path) -> None:
        ranges = [parse_layers("0-4"), parse_layers("2-6")]
        assert labs.plan(model, None, ranges).layers == tuple(ranges)
        assert labs.plan(model, 2, ranges).layers == tuple(ranges)

    def test_threads_share_the_cores(self, model: Path) -> None:
        assert labs.plan(model, 1).threads == cores()
        assert labs.plan(model, 6).threads == max(1, cores() // 6)
        assert labs.plan(model, 6, None, 5).threads == 5

    def test_a_gap_is_named(self, model: Path) -> None:
        with pytest.raises(MeshError, match="2-3, 5-6") as error:
            labs.plan(model, None, [Layers(0, 2), Layers(3, 5)])
        assert error.value.code == "bad_layers"

    @pytest.mark.parametrize(
        ("arguments", "code"),
        [
            ((3, [Layers(0, 6)]), "bad_layers"),
            ((None, [Layers(0, 7)]), "bad_layers"),
            ((7,), "bad_layers"),
            ((0,), "usage"),
            ((-1,), "usage"),
            ((33,), "usage"),
            ((1, None, 0), "usage"),
        ],
    )
    def test_what_cannot_be(self, model: Path, arguments: tuple[object, ...], code: str) -> None:
        assert code_of(lambda: labs.plan(model, *arguments)) == code  # type: ignore[arg-type]

    def test_more_nodes_than_layers(self, model: Path) -> None:
        with pytest.raises(MeshError, match="at most 6 nodes, not 7"):
            labs.plan(model, 7)

    def test_no_model(self, tmp_path: Path) -> None:
        assert code_of(lambda: labs.plan(tmp_path / "none.gguf")) == "not_found"
        assert code_of(lambda: labs.plan(tmp_path)) == "not_a_file"
        (tmp_path / "bad.gguf").write_bytes(b"no model")
        assert code_of(lambda: labs.plan(tmp_path / "bad.gguf")) == "bad_gguf"
        os.mkfifo(tmp_path / "fifo.gguf")
        assert code_of(lambda: labs.plan(tmp_path / "fifo.gguf")) == "not_a_file"


class TestUp:
    def test_up_found_again_and_down(self, fakes: pytest.MonkeyPatch, plan: labs.Plan, tmp_path: Path) -> None:
        fakes.setenv("MESHNODE_INVITE", "an invite to elsewhere")
        folder = tmp_path / "lab"
        lab = labs.up(folder, plan, say)
        try:
            assert lab.artifact == ARTIFACT
            again = labs.find(folder)
            assert again is not None
            assert (again.plan, again.artifact) == (plan, ARTIFACT)
            assert [member.name for member in again.members] == ["node-1", "node-2", "entry"]
            status = again.status()
            assert [node["peer"] for node in status] == ["peer-node-1", "peer-node-2", "peer-entry"]
            assert [[h["layers"] for h in node["holdings"]] for node in status] == [[[0, 3]], [[3, 6]], []]
            said = {m.name: json.loads((m.home.path / "arguments.json").read_text()) for m in lab.members}
            assert said["node-1"]["join"] is None
            assert said["entry"]["model"] is None
            for name in ("node-2", "entry"):
                assert (Path(said[name]["join"]).stat().st_mode & 0o777) == 0o600
            assert {each["listen"] for each in said.values()} == {"/ip4/127.0.0.1/tcp/0"}
        finally:
            again = labs.find(folder)
            (again or lab).down()
        assert all(gone(member.pid) or member.process for member in lab.members)
        assert not any(member.alive for member in lab.members)
        assert labs.find(folder) is None
        lab.down()  # once more does nothing

    def test_a_child_that_ends_is_heard_at_once(
        self, fakes: pytest.MonkeyPatch, plan: labs.Plan, tmp_path: Path
    ) -> None:
        for name in ("node-1", "entry"):
            fakes.setenv("FAKE_EXIT", f"{name}:port_in_use")
            began = time.monotonic()
            with pytest.raises(MeshError, match=f"{name}: as the test wants it") as error:
                labs.up(tmp_path / name, plan, say)
            assert error.value.code == "port_in_use"
            assert time.monotonic() - began < 20
            assert labs.find(tmp_path / name) is None

    def test_no_route(self, fakes: pytest.MonkeyPatch, plan: labs.Plan, tmp_path: Path) -> None:
        fakes.setenv("FAKE_GAP", "1")
        fakes.setattr(coming_up, "SETTLE_S", 0.2)
        assert code_of(lambda: labs.up(tmp_path, plan, say)) == "no_route"
        assert labs.find(tmp_path) is None

    def test_ctrl_c_while_it_comes_up(self, fakes: pytest.MonkeyPatch, plan: labs.Plan, tmp_path: Path) -> None:
        fakes.setenv("FAKE_SLOW", "node-2")
        pids: list[int] = []

        def interrupt(text: str) -> None:
            if "1 loading" in text and text.count("ready"):
                lab = labs.find(tmp_path)
                assert lab is not None
                pids.extend(member.pid for member in lab.members)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            labs.up(tmp_path, plan, interrupt)
        assert len(pids) == 3
        assert all(gone(pid) for pid in pids)

    def test_a_deaf_node_is_killed(self, fakes: pytest.MonkeyPatch, plan: labs.Plan, tmp_path: Path) -> None:
        fakes.setenv("FAKE_DEAF", "node-2")
        fakes.setattr(process, "ASK_S", 0.5)
        fakes.setattr(process, "TELL_S", 0.5)
        lab = labs.up(tmp_path, plan, say)
        lab.down()
        assert all(gone(member.pid) for member in lab.members)
        assert {m.name: m.process.returncode for m in lab.members if m.process}["node-2"] == -signal.SIGKILL

    def test_a_dead_node_shows(self, fakes: pytest.MonkeyPatch, plan: labs.Plan, tmp_path: Path) -> None:
        lab = labs.up(tmp_path, plan, say)
        try:
            os.kill(lab.members[1].pid, signal.SIGKILL)
            assert lab.members[1].process is not None
            lab.members[1].process.wait()
            status = lab.status()
            assert [node["alive"] for node in status] == [True, False, True]
            assert status[1]["peer"] is None
        finally:
            lab.down()

    def test_somebody_elses_process_is_left_alone(self, tmp_path: Path, plan: labs.Plan) -> None:
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
            try:
                started = process.start_time(other.pid)
                assert started is not None
                for when, found in ((started + 1, False), (started, True)):  # a number that was used again, or not
                    member = process.Member("node-1", Home(tmp_path), other.pid, when)
                    lab = labs.Lab(tmp_path, plan, ARTIFACT, [member])
                    lab.write_down()
                    assert (labs.find(tmp_path) is not None) == found
                    if not found:
                        lab.down()
                        assert other.poll() is None
            finally:
                other.kill()

    def test_a_process_that_nobody_has_reaped_is_no_process(self) -> None:
        other = subprocess.Popen([sys.executable, "-c", ""])
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert process.start_time(other.pid) is None
        other.wait()
        assert process.start_time(os.getpid()) is not None

    def test_damaged_record(self, tmp_path: Path) -> None:
        for text in ("", "[]", "{}", '{"members": 5}'):
            (tmp_path / "lab.json").write_text(text)
            assert code_of(lambda: labs.find(tmp_path)) == "bad_home"

    def test_one_command_at_a_time(self, tmp_path: Path) -> None:
        with labs.busy(tmp_path):
            assert code_of(lambda: labs.busy(tmp_path).__enter__()) == "home_in_use"
        with pytest.raises(MeshError, match="a lab is up"), labs.busy(tmp_path):
            raise MeshError("home_in_use", "a lab is up")


class TestPassing:
    def test_for_a_block(self, fakes: pytest.MonkeyPatch, plan: labs.Plan, tmp_path: Path) -> None:
        with labs.passing(tmp_path, plan, say) as lab:
            with Control(lab.entry.home) as node:
                events = list(node.run(RunRequest(lab.artifact, "hi", max_tokens=2)))
            assert events[-1]["result"]["text"] == "".join(WORDS[:2])
            assert labs.find(tmp_path) is None  # it is nobody else's
            pids = [member.pid for member in lab.members]
        assert all(gone(pid) for pid in pids)
        assert list((tmp_path / "passing").iterdir()) == []

    def test_after_a_fault(self, fakes: pytest.MonkeyPatch, plan: labs.Plan, tmp_path: Path) -> None:
        pids = []
        with pytest.raises(RuntimeError), labs.passing(tmp_path, plan, say) as lab:
            pids = [member.pid for member in lab.members]
            raise RuntimeError
        assert len(pids) == 3
        assert all(gone(pid) for pid in pids)

    def test_killed_itself_it_takes_its_nodes_along(self, plan: labs.Plan, tmp_path: Path) -> None:
        program = (
            "import sys, time; from pathlib import Path; from meshnode import lab; from meshnode.lab import process\n"
            f"process.PROGRAM = {FAKE!r}\n"
            "with lab.passing(Path(sys.argv[1]), lab.plan(Path(sys.argv[2]), 2), lambda _: None) as up:\n"
            "    print(*[member.pid for member in up.members], flush=True); time.sleep(60)\n"
        )
        command = [sys.executable, "-c", program, str(tmp_path), str(plan.model)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as minder:
            try:
                assert minder.stdout is not None
                pids = [int(pid) for pid in minder.stdout.readline().split()]
            finally:
                minder.kill()
        assert len(pids) == 3
        ends = time.monotonic() + 10
        while not all(map(gone, pids)) and time.monotonic() < ends:
            time.sleep(0.05)
        assert all(map(gone, pids))
        [left] = (tmp_path / "passing").iterdir()
        labs.sweep(tmp_path)
        assert not left.exists()

    def test_one_that_is_up_is_not_swept(self, fakes: pytest.MonkeyPatch, plan: labs.Plan, tmp_path: Path) -> None:
        labs.sweep(tmp_path)
        with labs.passing(tmp_path, plan, say) as lab:
            labs.sweep(tmp_path)
            assert lab.folder.exists()


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    left = [pid for pid in _children_of(str(tmp_path)) if not gone(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def _children_of(folder: str) -> list[int]:
    """Processes whose command line names a test's own folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if folder.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found
