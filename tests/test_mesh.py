"""Generations of a mesh's secret: how they follow each other, and how members that differ come to agree."""

import json

import pytest

from meshnode.errors import MeshError
from meshnode.mesh import MAX_GENERATIONS, MAX_LEAP, Generation, KnownMesh, Mesh, from_json, to_json

NOW = 1_000_000.0
FIRST = Mesh("m", bytes(32))


def newest(mesh: Mesh) -> Generation:
    return Generation(mesh.number, mesh.secret or b"", None, mesh.without)


def test_the_secret_before_counts_until_its_end() -> None:
    second = FIRST.rotated(NOW, 100.0)
    assert second.number == 1
    assert second.secret != FIRST.secret
    assert [g.secret for g in second.generations] == [second.secret, FIRST.secret]
    assert [g.secret for g in second.at(NOW + 99).generations] == [second.secret, FIRST.secret]
    assert [g.secret for g in second.at(NOW + 100).generations] == [second.secret]


def test_at_once_means_at_once() -> None:
    assert [g.number for g in FIRST.rotated(NOW, 0.0).generations] == [1]


def test_a_shorter_overlap_shortens_the_one_before() -> None:
    third = FIRST.rotated(NOW, 1000.0).rotated(NOW + 1, 10.0)
    assert [g.ends for g in third.generations] == [None, NOW + 11, NOW + 11]


def test_who_hears_of_it_has_the_same() -> None:
    second = FIRST.rotated(NOW, 100.0, ["evil"])
    assert FIRST.taking(newest(second), NOW, 100.0) == second
    assert second.taking(newest(second), NOW, 5.0) == second  # twice changes nothing
    assert second.taking(newest(FIRST), NOW, 100.0) == second  # nor does what is older
    assert second.without == ("evil",)


def test_members_that_rotate_at_once_end_with_one_secret() -> None:
    a, b = FIRST.rotated(NOW, 100.0), FIRST.rotated(NOW, 100.0)
    a_then_b, b_then_a = a.taking(newest(b), NOW, 100.0), b.taking(newest(a), NOW, 100.0)
    assert a_then_b.secret == b_then_a.secret == max((a, b), key=lambda m: newest(m).order).secret
    loser = a_then_b if a_then_b.secret == b.secret else b_then_a
    assert len(loser.generations) == 3  # who had the other one still lets its like in


def test_no_more_are_kept_than_fit_hello() -> None:
    mesh = FIRST
    for at in range(10):
        mesh = mesh.rotated(NOW + at, 1000.0)
    assert len(mesh.generations) == MAX_GENERATIONS
    assert mesh.number == 10


def test_nobody_leaps_to_the_last_number() -> None:
    with pytest.raises(MeshError) as fault:
        FIRST.taking(Generation(MAX_LEAP + 1, bytes([1]) * 32), NOW, 1.0)
    assert fault.value.code == "bad_frame"


def test_a_public_mesh_has_nothing_to_rotate() -> None:
    public = Mesh.public()
    with pytest.raises(MeshError):
        public.rotated(NOW, 1.0)
    assert public.taking(Generation(1, bytes(32)), NOW, 1.0) == public
    assert public.generations == ()


def test_no_secret_reaches_a_log() -> None:
    mesh = FIRST.rotated(NOW, 100.0)
    for secret in (mesh.secret, FIRST.secret):
        assert secret is not None
        for shown in (repr(mesh), repr(mesh.generations), repr(KnownMesh(mesh))):
            assert secret.hex() not in shown
            assert str(secret) not in shown


def test_it_is_written_down_whole() -> None:
    for mesh in (FIRST, FIRST.rotated(NOW, 100.0, ["x"]), Mesh.public()):
        known = KnownMesh(mesh, ("a",), ("b", "c"))
        assert from_json(json.loads(json.dumps(to_json(known))), 64) == known


@pytest.mark.parametrize(
    "change",
    [
        {"generation": "1"},
        {"generation": -1},
        {"without": "x"},
        {"older": {}},
        {"older": [{}]},
        {"older": [{"generation": 0, "secret": "00", "ends": 1.0, "without": []}]},
    ],
)
def test_what_is_damaged_is_not_half_read(change: dict[str, object]) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, MeshError)):
        from_json(to_json(KnownMesh(FIRST)) | change, 64)
