import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from meshnode.config import CONTEXT, Home, NodeConfig, cache_dir, write_private
from meshnode.errors import MeshError
from meshnode.mesh import KnownMesh, Mesh


def code(error: pytest.ExceptionInfo[MeshError]) -> str:
    return error.value.code


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


class TestResolve:
    def test_the_option_wins_then_the_environment_then_xdg(self, tmp_path: Path) -> None:
        environ = {"MESHNODE_HOME": str(tmp_path / "env")}
        assert Home.resolve(tmp_path / "given", environ).path == tmp_path / "given"
        assert Home.resolve(None, environ).path == tmp_path / "env"
        assert Home.resolve(None, {}).path.name == "meshnode"

    def test_nothing_is_made(self, tmp_path: Path) -> None:
        Home.resolve(tmp_path / "home")
        assert list(tmp_path.iterdir()) == []

    def test_cache(self, tmp_path: Path) -> None:
        assert cache_dir({"MESHNODE_CACHE": str(tmp_path)}) == tmp_path
        assert cache_dir({}).name == "meshnode"


class TestFolder:
    def test_made_for_its_owner_alone(self, tmp_path: Path) -> None:
        home = Home(tmp_path / "a" / "b").create()
        assert mode(home.path) == 0o700

    def test_a_file_in_its_place(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        for path in (tmp_path / "file", tmp_path / "file" / "below"):
            with pytest.raises(MeshError) as error:
                Home(path).create()
            assert code(error) == "bad_home"


HOLD = """
import sys
from pathlib import Path
from meshnode.config import Home
with Home(Path(sys.argv[1])).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


class TestLock:
    def test_a_second_node_is_told_who_has_it_and_gets_it_once_that_one_is_killed(self, tmp_path: Path) -> None:
        home = Home(tmp_path / "home")
        command = [sys.executable, "-c", HOLD, str(home.path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            try:
                assert other.stdout is not None
                assert other.stdout.readline() == b"held\n"
                assert home.holder() == other.pid
                with pytest.raises(MeshError, match=str(other.pid)) as error, home.lock():
                    pass
                assert code(error) == "home_in_use"
            finally:
                other.kill()
        assert home.holder() is None
        with home.lock():
            assert home.holder() == os.getpid()
        assert home.holder() is None

    def test_within_one_process_too(self, tmp_path: Path) -> None:
        home = Home(tmp_path)
        with home.lock(), pytest.raises(MeshError) as error, home.lock():
            pass
        assert code(error) == "home_in_use"


class TestSocket:
    def test_any_length_of_path_and_private(self, tmp_path: Path) -> None:
        home = Home(tmp_path / ("d" * 120) / ("e" * 120)).create()
        with home.bind_control() as listener:
            assert mode(home.path / "control.sock") == 0o600
            with home.connect_path() as path, socket.socket(socket.AF_UNIX) as client:
                client.connect(path)
                listener.setblocking(True)
                listener.accept()[0].close()

    def test_a_socket_left_behind_is_replaced(self, tmp_path: Path) -> None:
        home = Home(tmp_path)
        home.bind_control().close()
        home.bind_control().close()

    def test_no_home_no_node(self, tmp_path: Path) -> None:
        with pytest.raises(MeshError) as error, Home(tmp_path / "none").connect_path():
            pass
        assert code(error) == "no_node"


class TestMesh:
    def test_kept_whole_and_private(self, tmp_path: Path) -> None:
        home = Home(tmp_path / "home")
        assert home.known_mesh() is None
        for mesh in (Mesh.private(), Mesh.public()):
            known = KnownMesh(mesh, ("/ip4/1.2.3.4/tcp/5",), ("/ip4/1.2.3.4/tcp/5", "/ip4/1.2.3.4/tcp/6"))
            home.remember(known)
            assert home.known_mesh() == known
            assert known.addresses == ("/ip4/1.2.3.4/tcp/5", "/ip4/1.2.3.4/tcp/6")
        assert mode(home.mesh_path) == 0o600
        assert [path.name for path in home.path.iterdir()] == ["mesh.json"]

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "[]",
            "{}",
            "null",
            json.dumps({"mesh_id": "", "secret": None, "bootstrap": [], "peers": []}),
            json.dumps({"mesh_id": "m", "secret": "00", "bootstrap": [], "peers": []}),
            json.dumps({"mesh_id": "m", "secret": "zz", "bootstrap": [], "peers": []}),
            json.dumps({"mesh_id": "m", "secret": 5, "bootstrap": [], "peers": []}),
            json.dumps({"mesh_id": "m", "secret": None, "bootstrap": "abc", "peers": []}),
            json.dumps({"mesh_id": "m", "secret": None, "bootstrap": [1], "peers": []}),
            "[" * 100_000,
        ],
    )
    def test_damaged(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "mesh.json").write_text(text)
        with pytest.raises(MeshError) as error:
            Home(tmp_path).known_mesh()
        assert code(error) == "bad_home"

    def test_a_secret_is_not_shown(self) -> None:
        mesh = Mesh.private()
        assert mesh.secret is not None
        assert mesh.secret.hex() not in repr(mesh)
        assert str(mesh.secret) not in repr(KnownMesh(mesh))
        assert mesh.mesh_id != Mesh.private().mesh_id

    def test_a_failed_write_leaves_the_old_file_and_nothing_else(self, tmp_path: Path) -> None:
        (tmp_path / "taken").mkdir()
        (tmp_path / "taken" / "x").write_text("")
        with pytest.raises(MeshError) as error:
            write_private(tmp_path / "taken", "text")
        assert code(error) == "bad_home"
        assert [path.name for path in tmp_path.iterdir()] == ["taken"]


class TestNodeConfig:
    @pytest.mark.parametrize(
        "setting",
        [
            {"lease_ttl_s": 0},
            {"hop_timeout_s": 0},
            {"credit": 0},
            {"chunk": 0},
            {"max_sessions": 0},
            {"threads": -1},
            {"context": 0},
            {"numerics": "exact"},
        ],
    )
    def test_bounds(self, setting: dict[str, object]) -> None:
        with pytest.raises(MeshError) as error:
            NodeConfig(**setting)  # type: ignore[arg-type]
        assert code(error) == "bad_config"

    def test_the_context_is_bounded_by_the_model(self) -> None:
        assert NodeConfig().context_of(512) == 512
        assert NodeConfig().context_of(100_000) == CONTEXT
        assert NodeConfig(context=100_000).context_of(90_000) == 90_000
        assert NodeConfig(context=5).context_of(512) == 5

    def test_threads(self) -> None:
        assert NodeConfig(threads=3).worker_threads == 3
        assert NodeConfig().worker_threads == len(os.sched_getaffinity(0))
