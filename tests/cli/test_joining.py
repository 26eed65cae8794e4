"""What --join and MESHNODE_INVITE come to, with what the home knows already."""

import time
from pathlib import Path

import pytest

from meshnode.cli.joining import joining
from meshnode.config import Home
from meshnode.errors import MeshError
from meshnode.keys import NodeKey
from meshnode.mesh import KnownMesh, Mesh
from meshnode.wire.invite import Invite

A, B = (f"/ip4/127.0.0.1/tcp/{n}/p2p/{NodeKey(bytes([n]) * 32).peer}" for n in (1, 2))
LATER = int(time.time()) + 3600  # longer than any run of the tests


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def written(path: Path, invite: Invite) -> str:
    path.write_text(invite.to_line())
    path.chmod(0o600)
    return str(path)


def code_of(option: str | None, home: Home, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(MeshError) as fault:
        joining(option, home, environ or {})
    return fault.value.code


def test_a_file_a_variable_and_a_line_say_the_same(home: Home, tmp_path: Path) -> None:
    invite = Invite("m", bytes(32), (A, B), LATER, 3)
    path = written(tmp_path / "invite", invite)
    for option, environ in (
        (path, {}),
        (None, {"MESHNODE_INVITE": path}),
        (None, {"MESHNODE_INVITE": invite.to_line()}),
    ):
        joined = joining(option, home, environ)
        assert joined.mesh == Mesh("m", bytes(32), 3)
        assert joined.addresses == (A, B)


def test_addresses_of_a_public_mesh(home: Home) -> None:
    for option in (f"{A},{B}", f"{A} {B}", f"{A}, {B}"):
        joined = joining(option, home, {})
        assert (joined.mesh, joined.addresses) == (Mesh.public(), (A, B))
    assert code_of(f"{A},/ip4/127.0.0.1/tcp/3", home) == "usage"
    assert code_of(f"{A},nonsense", home) == "usage"


def test_the_freshest_address_comes_first_and_seen_members_last(home: Home) -> None:
    mesh = Mesh.private()
    home.remember(KnownMesh(mesh, (A,), (B,)))
    new = A.replace("tcp/1", "tcp/7")
    assert joining(None, home, {}).addresses == (A, B)
    assert joining(new, home, {}).addresses == (new, A, B)
    assert joining(new, home, {}).mesh == mesh


def test_of_two_generations_the_newer_counts(home: Home, tmp_path: Path) -> None:
    old = Mesh("m", bytes(32), 1)
    new = old.rotated(time.time(), 1000.0)
    to_old = written(tmp_path / "old", Invite("m", old.secret, (A,), LATER, old.number))
    to_new = written(tmp_path / "new", Invite("m", new.secret, (A,), LATER, new.number))
    home.remember(KnownMesh(old))
    found = joining(to_new, home, {}).mesh
    assert (found.secret, found.number) == (new.secret, 2)
    assert [g.secret for g in found.older] == [old.secret]  # members that have not heard of it yet let it in
    home.remember(KnownMesh(new))
    assert joining(to_old, home, {}).mesh == new


def test_what_does_not_let_in_says_why(home: Home, tmp_path: Path) -> None:
    home.remember(KnownMesh(Mesh("m", bytes(32))))
    cases = {
        "expired": (Invite("m", bytes(32), (A,), 5).to_line(), "invite_expired"),
        "torn": (Invite("m", bytes(32), (A,), LATER).to_line()[:-9], "bad_invite"),
        "foreign": (Invite("other", bytes(32), (A,), LATER).to_line(), "bad_config"),
        "public": (Invite("m", None, (A,), LATER).to_line(), "bad_config"),
        "no": ("hello", "bad_invite"),
    }
    for name, (text, code) in cases.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
        assert code_of(str(tmp_path / name), home) == code, name
    assert code_of(str(tmp_path / "missing"), home) == "not_found"
    assert code_of(None, home, {"MESHNODE_INVITE": " "}) == "usage"
