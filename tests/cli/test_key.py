import json
import os
import stat
from pathlib import Path

import pytest

from meshnode.config import Home
from meshnode.keys import load_or_create

from .conftest import Meshnode


@pytest.fixture
def peer(home: Home) -> str:
    home.create()
    return load_or_create(home.key_path).peer


def test_a_key_moves_to_another_home(meshnode: Meshnode, peer: str, tmp_path: Path) -> None:
    kept, other = tmp_path / "kept", str(tmp_path / "other")
    assert meshnode("key", "export", str(kept)).status == 0
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert peer in kept.read_text()
    assert meshnode("key", "import", str(kept), "--home", other).status == 0
    assert json.loads(meshnode("key", "show", "--home", other, "--json").out)["peer"] == peer
    assert meshnode("key", "import", str(kept), "--home", other).status == 0  # once more changes nothing
    assert stat.S_IMODE(Home(Path(other)).key_path.stat().st_mode) == 0o600


def test_another_key_is_lost_only_on_request(meshnode: Meshnode, peer: str, tmp_path: Path) -> None:
    kept, other = tmp_path / "kept", Home(tmp_path / "other")
    meshnode("key", "export", str(kept))
    other.create()
    before = load_or_create(other.key_path).peer
    ended = meshnode("key", "import", str(kept), "--home", str(other.path))
    assert ended.err.startswith(f"error bad_home: this home is already {before}")
    assert json.loads(meshnode("key", "show", "--json", "--home", str(other.path)).out)["peer"] == before
    assert meshnode("key", "import", str(kept), "--home", str(other.path), "--replace").status == 0
    assert json.loads(meshnode("key", "show", "--json", "--home", str(other.path)).out)["peer"] == peer


def test_not_under_a_node_that_runs(meshnode: Meshnode, home: Home, peer: str, tmp_path: Path) -> None:
    meshnode("key", "export", str(tmp_path / "kept"))
    with home.lock():
        assert meshnode("key", "import", str(tmp_path / "kept"), "--replace").err.startswith("error home_in_use")


def test_nothing_is_written_over(meshnode: Meshnode, peer: str, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    assert meshnode("key", "export", str(tmp_path / "kept")).err.startswith("error usage")
    assert (tmp_path / "kept").read_text() == "mine"


def test_a_slip_is_found(meshnode: Meshnode, peer: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    meshnode("key", "export", str(kept))
    line = kept.read_text()
    family, secret, _ = line.split(":")
    other = "1" if secret[9] != "1" else "2"
    for wrong in (
        "",
        "\n",
        line[:-3],
        line.replace(family, "meshnode-key-9"),
        f"{family}:{secret[:9]}{other}{secret[10:]}:{peer}\n",
        "l" * 300,
        "\ud800",
        family + "::",
    ):
        kept.write_bytes(wrong.encode(errors="surrogatepass"))
        assert meshnode("key", "import", str(kept), "--replace").err.startswith("error bad_key"), wrong
    assert json.loads(meshnode("key", "show", "--json").out)["peer"] == peer


def test_what_is_no_file(meshnode: Meshnode, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert meshnode("key", "import", str(tmp_path / "nothing")).err.startswith("error not_found")
    assert meshnode("key", "import", str(tmp_path)).err.startswith("error unreadable")
    assert meshnode("key", "import", str(tmp_path / "fifo")).err.startswith("error bad_key")
    assert meshnode("key", "show").err.startswith("error bad_home: there is no key")
