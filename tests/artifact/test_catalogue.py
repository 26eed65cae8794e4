"""The catalogue: names are labels, and no changed byte gets past a check."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.make_fixtures import Tiny, model_bytes, shard_bytes
from meshnode.artifact.cache import IdentityCache, KnownFile
from meshnode.artifact.catalogue import Catalogue
from meshnode.artifact.files import FileStamp
from meshnode.artifact.identity import OpenArtifact, identify, open_artifact
from meshnode.errors import MeshError

from .changes import CHANGES, flip


def code_of(caught: pytest.ExceptionInfo[MeshError]) -> str:
    return caught.value.code


@pytest.fixture
def catalogue() -> Catalogue:
    return Catalogue()


def test_artifact_is_found_by_identity_prefix_and_name(catalogue: Catalogue, tiny_file: Path, now_ns: int) -> None:
    entry = catalogue.add(tiny_file, now_ns=now_ns)
    with open_artifact(tiny_file) as artifact:
        assert entry.identity == identify(artifact)
    assert (entry.name, entry.layers.end, entry.summary.n_layer) == ("tiny", 2, 2)
    digits = entry.identity.removeprefix("sha256:")
    for text in (entry.identity, entry.identity[:20], digits[:6], digits[:6].upper(), "tiny", "TINY"):
        assert catalogue.resolve(text) is entry
    assert catalogue.entries() == [entry]


def test_one_name_of_two_artifacts_is_refused_with_the_list(catalogue: Catalogue, tmp_path: Path, now_ns: int) -> None:
    entries = []
    for seed in (1, 2):
        path = tmp_path / f"{seed}.gguf"
        path.write_bytes(model_bytes(Tiny(n_layer=1, seed=seed, name="twin")))
        entries.append(catalogue.add(path, now_ns=now_ns))
    with pytest.raises(MeshError) as caught:
        catalogue.resolve("twin")
    assert code_of(caught) == "ambiguous_model"
    assert all(entry.identity in caught.value.message for entry in entries)
    assert catalogue.resolve("2") is entries[1]  # the file's own name still tells them apart
    with pytest.raises(MeshError) as caught:
        catalogue.resolve("triplet")
    assert (code_of(caught), "twin" in caught.value.message) == ("unknown_model", True)


def test_copies_are_one_artifact_and_stand_in_for_each_other(
    catalogue: Catalogue, tiny_file: Path, now_ns: int
) -> None:
    copy = tiny_file.with_name("copy.gguf")
    copy.write_bytes(tiny_file.read_bytes())
    entry = catalogue.add(tiny_file, now_ns=now_ns)
    both = catalogue.add(copy, now_ns=now_ns)
    assert both.identity == entry.identity
    assert [source.path for source in both.sources] == [str(tiny_file), str(copy)]
    flip(tiny_file)
    with catalogue.open(entry.identity, now_ns=now_ns) as artifact:
        assert artifact.path == str(copy)
    copy.unlink()
    with pytest.raises(MeshError) as caught:
        catalogue.verify(entry.identity, now_ns=now_ns)
    assert code_of(caught) == "identity_changed"
    assert str(tiny_file.parent) not in str(caught.value)


def test_path_with_new_bytes_is_a_new_artifact_and_the_old_one_is_gone(
    catalogue: Catalogue, tiny_file: Path, now_ns: int
) -> None:
    old = catalogue.add(tiny_file, now_ns=now_ns)
    flip(tiny_file)
    new = catalogue.add(tiny_file, now_ns=now_ns)
    assert new.identity != old.identity
    assert catalogue.resolve("tiny") is new
    assert catalogue.entries() == [new]


def test_refusal_is_remembered_until_the_path_is_sound(
    catalogue: Catalogue, tiny_file: Path, now_ns: int, tiny_bytes: bytes
) -> None:
    os.truncate(tiny_file, 1000)
    with pytest.raises(MeshError):
        catalogue.add(tiny_file, now_ns=now_ns)
    assert catalogue.refusals()[str(tiny_file)].code == "bad_gguf"
    assert catalogue.entries() == []
    tiny_file.write_bytes(tiny_bytes)
    catalogue.add(tiny_file, now_ns=now_ns)
    assert catalogue.refusals() == {}


def test_cancelled_identification_leaves_nothing(catalogue: Catalogue, tiny_file: Path, now_ns: int) -> None:
    with pytest.raises(MeshError) as caught:
        catalogue.add(tiny_file, now_ns=now_ns, cancelled=lambda: True)
    assert code_of(caught) == "cancelled"
    assert (catalogue.entries(), catalogue.refusals()) == ([], {})


@pytest.mark.parametrize("settled", [True, False], ids=["settled", "fresh"])
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_noticed_at_the_next_check(
    catalogue: Catalogue, tiny_file: Path, now_ns: int, change: str, settled: bool
) -> None:
    path = tiny_file
    if change == "link swapped":
        path = tiny_file.with_name("link.gguf")
        path.symlink_to(tiny_file.name)
    if not settled:
        now_ns = tiny_file.stat().st_ctime_ns
    entry = catalogue.add(path, now_ns=now_ns)
    assert [source.settled for source in entry.sources] == [settled]
    assert catalogue.verify(entry.identity, now_ns=now_ns).identity == entry.identity
    CHANGES[change](path)
    with pytest.raises(MeshError) as caught:
        catalogue.verify(entry.identity, now_ns=now_ns)
    assert code_of(caught) == "identity_changed"


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_after_opening_is_noticed_or_does_not_matter(
    catalogue: Catalogue, tiny_file: Path, tiny_bytes: bytes, now_ns: int, change: str
) -> None:
    """The worker gets the descriptor: it still reads the bytes that were identified, or the change is noticed."""
    path = tiny_file
    if change == "link swapped":
        path = tiny_file.with_name("link.gguf")
        path.symlink_to(tiny_file.name)
    entry = catalogue.add(path, now_ns=now_ns)
    with catalogue.open(entry.identity, now_ns=now_ns) as artifact:
        CHANGES[change](path)
        if os.pread(artifact.fd, len(tiny_bytes) + 1, 0) != tiny_bytes:
            with pytest.raises(MeshError) as caught:
                artifact.check_unchanged()
            assert code_of(caught) == "identity_changed"


def test_disk_that_fails_is_not_taken_for_a_change(
    catalogue: Catalogue, tiny_file: Path, now_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = catalogue.add(tiny_file, now_ns=now_ns)
    with monkeypatch.context() as patched:

        def fail(*_: object) -> OpenArtifact:
            raise MeshError("unreadable", "too many open files")

        patched.setattr("meshnode.artifact.catalogue.open_artifact", fail)
        with pytest.raises(MeshError) as caught:
            catalogue.verify(entry.identity, now_ns=now_ns)
    assert code_of(caught) == "unreadable"
    assert caught.value.message == "'tiny' cannot be read"
    assert catalogue.verify(entry.identity, now_ns=now_ns) == entry


def test_restored_bytes_have_to_be_identified_again(catalogue: Catalogue, tiny_file: Path, now_ns: int) -> None:
    entry = catalogue.add(tiny_file, now_ns=now_ns)
    flip(tiny_file)
    flip(tiny_file)
    with pytest.raises(MeshError):
        catalogue.verify(entry.identity, now_ns=now_ns)
    assert catalogue.add(tiny_file, now_ns=now_ns).identity == entry.identity
    assert catalogue.verify(entry.identity, now_ns=now_ns).identity == entry.identity


def test_file_open_for_writing_is_read_at_every_check(catalogue: Catalogue, tiny_file: Path, now_ns: int) -> None:
    with tiny_file.open("r+b"):
        entry = catalogue.add(tiny_file, now_ns=now_ns)
        assert not entry.sources[0].settled
    assert catalogue.verify(entry.identity, now_ns=now_ns).sources[0].settled


def test_file_in_memory_is_read_at_every_check(catalogue: Catalogue, tiny_bytes: bytes, now_ns: int) -> None:
    """Writing to it through a map leaves no trace in its stamp."""
    fd = os.memfd_create("tiny")
    try:
        os.write(fd, tiny_bytes)
        path = Path(f"/proc/{os.getpid()}/fd/{fd}")
        entry = catalogue.add(path, now_ns=now_ns)
        assert not entry.sources[0].settled
        CHANGES["through a map"](path)
        with pytest.raises(MeshError) as caught:
            catalogue.verify(entry.identity, now_ns=now_ns)
    finally:
        os.close(fd)
    assert code_of(caught) == "identity_changed"


def test_set_of_shards_is_served_like_a_file(catalogue: Catalogue, tmp_path: Path, now_ns: int) -> None:
    paths = [tmp_path / f"set-{i + 1:05d}-of-00003.gguf" for i in range(3)]
    for path, body in zip(paths, shard_bytes(Tiny(n_layer=3, name=""), 3), strict=True):
        path.write_bytes(body)
    entry = catalogue.add(paths[1], now_ns=now_ns)
    assert entry.identity.startswith("shards:")
    assert catalogue.resolve("set") is entry
    with catalogue.open(entry.identity, now_ns=now_ns) as artifact:
        assert len(artifact.fds) == 3
    flip(paths[2])
    with pytest.raises(MeshError) as caught:
        catalogue.verify(entry.identity, now_ns=now_ns)
    assert code_of(caught) == "identity_changed"


# --- across runs -----------------------------------------------------------------------------------------------------


class Reads:
    """Counts what is hashed and checked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from meshnode.artifact import catalogue

        self.hashed = self.checked = 0
        real_digests, real_check = catalogue.digests, catalogue.check

        def digests(files, *rest):  # type: ignore[no-untyped-def]
            self.hashed += len(files)
            return real_digests(files, *rest)

        def check(artifact):  # type: ignore[no-untyped-def]
            self.checked += 1
            return real_check(artifact)

        monkeypatch.setattr(catalogue, "digests", digests)
        monkeypatch.setattr(catalogue, "check", check)


def test_known_file_is_neither_read_nor_checked_again(
    tmp_path: Path, tiny_file: Path, now_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch)
    entries = [Catalogue(IdentityCache(tmp_path / "c.sqlite")).add(tiny_file, now_ns=now_ns) for _ in range(2)]
    assert (reads.hashed, reads.checked) == (1, 1)
    assert entries[0] == entries[1]
    known = Catalogue(IdentityCache(tmp_path / "c.sqlite"))
    assert known.describe(tiny_file, now_ns=now_ns) == entries[0].summary
    assert (reads.hashed, reads.checked) == (1, 1)
    flip(tiny_file)
    assert known.describe(tiny_file, now_ns=now_ns) == entries[0].summary  # a weight: the header says the same
    assert (reads.hashed, reads.checked) == (1, 2)
    assert Catalogue(IdentityCache(tmp_path / "c.sqlite")).add(tiny_file, now_ns=now_ns).identity != entries[0].identity
    assert (reads.hashed, reads.checked) == (2, 3)


def test_file_that_just_changed_is_not_kept(tmp_path: Path, tiny_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    ctime = tiny_file.stat().st_ctime_ns
    for age in (0, 1_999_999_999, -1_000_000_000):  # the last: a clock that was set back
        Catalogue(IdentityCache(tmp_path / "c.sqlite")).add(tiny_file, now_ns=ctime + age)
    assert reads.hashed == 3
    for _ in range(2):
        Catalogue(IdentityCache(tmp_path / "c.sqlite")).add(tiny_file, now_ns=ctime + 2_000_000_000)
    assert reads.hashed == 4


def test_a_file_s_name_is_a_label_here_and_shown_nowhere(tmp_path: Path, now_ns: int) -> None:
    body = model_bytes(Tiny(n_layer=1, name=""))
    shown = set()
    for name in ("one", "two"):
        (tmp_path / f"{name}.gguf").write_bytes(body)
        catalogue = Catalogue(IdentityCache(tmp_path / "c.sqlite"))
        entry = catalogue.add(tmp_path / f"{name}.gguf", now_ns=now_ns)
        assert catalogue.resolve(name) is entry
        shown.add(entry.name)
    assert shown == {f"llama {entry.identity[7:15]}"}


def test_numbers_of_64_bits_are_kept() -> None:
    cache = IdentityCache(":memory:")
    stamp = FileStamp((1 << 64) - 1, 1 << 63, 5, -1, 7)
    cache.store_file(stamp, KnownFile(b"d" * 32, 2))
    assert cache.file(stamp) == KnownFile(b"d" * 32, 2)
    assert cache.file(replace(stamp, ctime_ns=8)) is None


def test_damaged_cache_starts_anew(tmp_path: Path, tiny_file: Path, now_ns: int) -> None:
    path = tmp_path / "c.sqlite"
    for junk in (b"junk" * 500, b"SQLite format 3\0" + b"\xff" * 5000):
        path.write_bytes(junk)
        entry = Catalogue(IdentityCache(path)).add(tiny_file, now_ns=now_ns)
        assert Catalogue(IdentityCache(path)).add(tiny_file, now_ns=now_ns) == entry


def test_full_disk_costs_the_cache_not_the_answer(
    tiny_file: Path, now_ns: int, caplog: pytest.LogCaptureFixture
) -> None:
    cache = IdentityCache(":memory:")
    cache._db.execute("PRAGMA query_only = ON")
    entry = Catalogue(cache).add(tiny_file, now_ns=now_ns)
    assert entry.name == "tiny"
    assert "cannot be written" in caplog.text
    assert str(tiny_file.parent) not in caplog.text
