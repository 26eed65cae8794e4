"""Content identity of single files, and how they are opened."""

import errno
import hashlib
import os
import socket
from pathlib import Path

import pytest

from meshnode.artifact.identity import CHUNK, FileStamp, identify, open_artifact
from meshnode.errors import MeshError


@pytest.fixture
def body() -> bytes:
    return os.urandom((1 << 20) + 4097)


def identity_of(path: Path) -> str:
    with open_artifact(path) as artifact:
        return identify(artifact)


def refusal(path: Path) -> MeshError:
    with pytest.raises(MeshError) as caught:
        open_artifact(path)
    return caught.value


def test_identity_is_the_sha256_of_the_bytes_under_any_name_and_date(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "a.gguf").write_bytes(body)
    odd = tmp_path / 'naïve 模型 "q"\n.gguf'
    odd.write_bytes(body)
    os.utime(odd, ns=(1, 1))
    link = tmp_path / "link.gguf"
    link.symlink_to("a.gguf")
    expected = "sha256:" + hashlib.sha256(body).hexdigest()
    assert {identity_of(path) for path in (tmp_path / "a.gguf", odd, link)} == {expected}
    odd.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
    assert identity_of(odd) != expected


def test_progress_reaches_the_total_and_cancelling_stops_early(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(body)
    seen: list[tuple[int, int]] = []
    with open_artifact(path) as artifact:
        identify(artifact, lambda done, total: seen.append((done, total)))
        assert [done for done, _ in seen] == [*range(CHUNK, len(body), CHUNK), len(body)]
        assert {total for _, total in seen} == {len(body)}
        with pytest.raises(MeshError) as caught:
            identify(artifact, cancelled=lambda: True)
    assert caught.value.code == "cancelled"


def test_descriptor_is_read_only_closed_on_exec_and_closed_once(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF")
    with open_artifact(path) as artifact:
        assert not os.get_inheritable(artifact.fd)
        assert artifact.stamp == FileStamp.of(path.stat())
        with pytest.raises(OSError, match="Bad file"):
            os.write(artifact.fd, b"x")
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(artifact.fd)
    artifact.close()  # a second time must not close a stranger's descriptor


@pytest.mark.parametrize("kind", ["directory", "fifo", "socket", "device"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.gguf"
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    else:
        path = Path("/dev/zero")
    error = refusal(path)
    assert error.code == "not_a_file"
    assert kind in error.message.lower()


def test_missing_dangling_and_looping_paths_are_not_found(tmp_path: Path) -> None:
    assert refusal(tmp_path / "missing").code == "not_found"
    assert refusal(Path(f"{tmp_path}/nul\0byte")).code == "not_found"
    (tmp_path / "dangling").symlink_to("nothing")
    assert "link to nothing" in refusal(tmp_path / "dangling").message
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert "loop" in refusal(tmp_path / "a").message


def test_empty_file_is_no_gguf_and_its_descriptor_is_closed(tmp_path: Path) -> None:
    (tmp_path / "empty\n.gguf").touch()
    before = len(os.listdir("/proc/self/fd"))
    error = refusal(tmp_path / "empty\n.gguf")
    assert error.code == "bad_gguf"
    assert "\n" not in error.message
    assert len(os.listdir("/proc/self/fd")) == before


def test_unreadable_file_is_said_to_be_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF")
    path.chmod(0)
    if os.geteuid() == 0:  # root reads everything: refuse in the kernel's stead
        real_open = os.open

        def refuse(name: str, flags: int) -> int:
            if flags & os.O_PATH:
                return real_open(name, flags)
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

        monkeypatch.setattr(os, "open", refuse)
    before = len(os.listdir("/proc/self/fd"))
    error = refusal(path)
    assert (error.code, "Permission denied" in error.message) == ("unreadable", True)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("change", ["grow", "shrink", "same-size"])
def test_change_while_hashing_is_noticed(tmp_path: Path, body: bytes, change: str) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(body)
    os.utime(path, ns=(1, 1))

    def meddle(done: int, total: int) -> None:
        if done == total:
            return
        if change == "shrink":
            os.truncate(path, len(body) - 5000)
        else:
            with path.open("r+b") as file:
                file.seek(0, os.SEEK_END if change == "grow" else os.SEEK_SET)
                file.write(b"x")

    with open_artifact(path) as artifact, pytest.raises(MeshError) as caught:
        identify(artifact, meddle)
    assert caught.value.code == "identity_changed"
