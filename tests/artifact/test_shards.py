"""Sets of shards: one identity for the whole set, whichever shard is named; anything less than the set is refused."""

import hashlib
import os
import signal
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fixtures.make_fixtures import Tiny, model_bytes, shard_bytes
from meshnode.artifact import identity
from meshnode.artifact.files import open_file
from meshnode.artifact.gguf import read_header
from meshnode.artifact.identity import DOMAIN, describe, digests, identify, open_artifact
from meshnode.errors import MeshError

SHAPE = Tiny(n_layer=3, name="tiny set")
Change = Callable[[Path], None]


def name(number: int, count: int = 3) -> str:
    return f"set-{number:05d}-of-{count:05d}.gguf"


@pytest.fixture(scope="module")
def bodies() -> list[bytes]:
    return shard_bytes(SHAPE, 3)


@pytest.fixture
def folder(tmp_path: Path, bodies: list[bytes]) -> Path:
    for number in (3, 1, 2):
        (tmp_path / name(number)).write_bytes(bodies[number - 1])
    return tmp_path


def identity_of(path: Path) -> str:
    with open_artifact(path) as artifact:
        describe(artifact)
        return identify(artifact)


def test_identity_is_over_count_positions_sizes_and_digests(folder: Path, bodies: list[bytes]) -> None:
    sha = hashlib.sha256(DOMAIN + struct.pack(">I", 3))
    for position, body in enumerate(bodies):
        sha.update(struct.pack(">IQ", position, len(body)) + hashlib.sha256(body).digest())
    assert identity_of(folder / name(1)) == "shards:" + sha.hexdigest()


def test_every_shard_leads_to_the_whole_set(folder: Path) -> None:
    assert len({identity_of(folder / name(number)) for number in (1, 2, 3)}) == 1
    with open_artifact(folder / name(2)) as artifact:
        summary = describe(artifact)
        assert [Path(file.path).name for file in artifact.files] == [name(1), name(2), name(3)]
        assert len(set(artifact.fds)) == 3
    (folder / "whole.gguf").write_bytes(model_bytes(SHAPE))
    with open_artifact(folder / "whole.gguf") as artifact:
        whole = describe(artifact)
    assert (summary.layer_bytes, summary.name) == (whole.layer_bytes, "tiny set")
    assert summary.file_bytes == sum((folder / name(n)).stat().st_size for n in (1, 2, 3))


def test_links_of_other_names_lead_to_the_set(folder: Path) -> None:
    """The layout of download caches: named links to files named by their hash; and one more link to one of those."""
    (folder / "blobs").mkdir()
    (folder / "snapshot").mkdir()
    for number in (1, 2, 3):
        (folder / name(number)).rename(folder / "blobs" / f"{number:x}")
        (folder / "snapshot" / name(number)).symlink_to(f"../blobs/{number:x}")
    (folder / "my model").symlink_to("snapshot/" + name(3))
    assert identity_of(folder / "snapshot" / name(2)) == identity_of(folder / "my model")


def test_metadata_only_first_shard(tmp_path: Path) -> None:
    for i, body in enumerate(shard_bytes(SHAPE, 3, metadata_first=True)):
        (tmp_path / name(i + 1)).write_bytes(body)
    with open_artifact(tmp_path / name(3)) as artifact:
        assert describe(artifact).n_layer == 3


def test_set_of_one_is_a_single_file(tmp_path: Path) -> None:
    (body,) = shard_bytes(SHAPE, 1)
    (tmp_path / name(1, 1)).write_bytes(body)
    assert identity_of(tmp_path / name(1, 1)) == "sha256:" + hashlib.sha256(body).hexdigest()


def test_single_file_named_like_a_shard_is_a_single_file(tmp_path: Path) -> None:
    body = model_bytes(SHAPE)
    (tmp_path / name(2)).write_bytes(body)
    assert identity_of(tmp_path / name(2)) == "sha256:" + hashlib.sha256(body).hexdigest()


def test_stray_shard_is_ignored_and_named(folder: Path) -> None:
    expected = identity_of(folder / name(1))
    (folder / name(4)).write_bytes(b"stray")
    (folder / name(1, 2)).write_bytes(b"of another set")
    with open_artifact(folder / name(1)) as artifact:
        assert identify(artifact) == expected
        (warning,) = artifact.warnings
    assert name(4) in warning


def test_foreign_shard_of_the_same_shape_has_another_identity(folder: Path) -> None:
    expected = identity_of(folder / name(1))
    other = shard_bytes(Tiny(n_layer=3, seed=2, name="tiny set"), 3)
    (folder / name(2)).write_bytes(other[1])
    assert identity_of(folder / name(1)) != expected


def swap(folder: Path) -> None:
    first, second = folder / name(2), folder / name(3)
    first.rename(folder / "aside")
    second.rename(first)
    (folder / "aside").rename(second)


def cut(folder: Path) -> None:
    (folder / name(3)).write_bytes((folder / name(3)).read_bytes()[:-4096])


def other_count(folder: Path) -> None:
    (folder / name(1)).write_bytes(shard_bytes(SHAPE, 4)[0])


def wrong_total(folder: Path) -> None:
    path = folder / name(1)
    key = b"split.tensors.count"
    body = bytearray(path.read_bytes())
    at = body.index(key) + len(key) + 4
    body[at : at + 4] = struct.pack("<i", 99)
    path.write_bytes(body)


def tensors_twice(folder: Path) -> None:
    number, body = b"split.no", bytearray((folder / name(2)).read_bytes())
    at = body.index(number) + len(number) + 4
    body[at : at + 2] = struct.pack("<H", 2)
    (folder / name(3)).write_bytes(body)


SPOILED: dict[str, tuple[Change, str, str]] = {
    "missing": (lambda f: (f / name(2)).unlink(), "bad_shards", "shard 2 of 3 is missing"),
    "a directory": (lambda f: ((f / name(2)).unlink(), (f / name(2)).mkdir())[0], "not_a_file", "directory"),
    "empty": (lambda f: (f / name(2)).write_bytes(b"") and None, "bad_gguf", "empty"),
    "swapped": (swap, "bad_shards", "says that it is shard 3 of 3"),
    "the same twice": (
        lambda f: (f / name(3)).write_bytes((f / name(2)).read_bytes()) and None, "bad_shards", "shard 2 of 3"),
    "cut short": (cut, "bad_gguf", "shard 3: tensor"),
    "of a larger set": (other_count, "bad_shards", "one of 4 shards, its name says of 3"),
    "wrong total": (wrong_total, "bad_shards", "99 tensors"),
    "tensors twice": (tensors_twice, "bad_shards", "in two shards"),
    "no GGUF": (lambda f: (f / name(3)).write_bytes(b"junk" * 99) and None, "bad_gguf", "shard 3: not a GGUF"),
}  # fmt: skip


@pytest.mark.parametrize("kind", SPOILED)
def test_spoiled_set_is_refused(folder: Path, kind: str) -> None:
    spoil, code, fault = SPOILED[kind]
    spoil(folder)
    with pytest.raises(MeshError) as caught:
        identity_of(folder / name(1))
    assert (caught.value.code, fault in caught.value.message) == (code, True), caught.value.message


def test_links_to_one_file_are_no_set_and_are_not_read_one_by_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (2, 3):
        (folder / name(number)).unlink()
        (folder / name(number)).symlink_to(name(1))
    read: list[int] = []
    monkeypatch.setattr(identity, "read_header", lambda fd, size: read.append(fd) or read_header(fd, size))
    with pytest.raises(MeshError, match="says that it is shard 1 of 3"):
        identity_of(folder / name(1))
    assert len(read) <= 3  # the entered one is asked first how many there are


def test_misnamed_first_shard_is_refused(folder: Path) -> None:
    (folder / name(1)).rename(folder / "set-1-of-3.gguf")
    with pytest.raises(MeshError) as caught:
        identity_of(folder / "set-1-of-3.gguf")
    assert caught.value.code == "bad_shards"


def test_set_that_cannot_be_opened_leaves_no_descriptor_behind(folder: Path) -> None:
    (folder / name(3)).unlink()
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(MeshError):
        open_artifact(folder / name(1))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_progress_counts_all_shards_and_a_fault_in_one_stops_the_rest(folder: Path, bodies: list[bytes]) -> None:
    seen: list[tuple[int, int]] = []
    total = sum(len(body) for body in bodies)
    with open_artifact(folder / name(1)) as artifact:
        identify(artifact, lambda done, all_: seen.append((done, all_)))
        assert seen[-1] == (total, total)
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)
        with pytest.raises(MeshError) as caught:
            identify(artifact, cancelled=lambda: True)
        assert caught.value.code == "cancelled"
        (folder / name(2)).open("ab").write(b"x")
        with pytest.raises(MeshError) as caught:
            identify(artifact)
        assert caught.value.code == "identity_changed"


def test_ctrl_c_ends_the_hashing_of_a_set_at_once(tmp_path: Path) -> None:
    """Every chunk takes its time, and there are a thousand of them."""
    for name_ in ("one", "two"):
        (tmp_path / name_).touch()
        os.truncate(tmp_path / name_, 128 << 20)
    with open_file(tmp_path / "one") as one, open_file(tmp_path / "two") as two:
        threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            digests([one, two], lambda done, total: time.sleep(0.02))
        while any(thread.name.startswith("hash") for thread in threading.enumerate()):  # the process waits for them
            assert time.monotonic() - began < 1
            time.sleep(0.01)


def test_fault_in_one_shard_stops_the_others(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x")
    (tmp_path / "long").touch()
    os.truncate(tmp_path / "long", 256 << 20)
    seen: list[tuple[int, int]] = []
    with open_file(tmp_path / "short") as short, open_file(tmp_path / "long") as long:
        (tmp_path / "short").write_bytes(b"yy")
        with pytest.raises(MeshError) as caught:
            digests([short, long], lambda done, total: seen.append((done, total)))
    assert caught.value.code == "identity_changed"
    assert all(done < total for done, total in seen)
