"""Bounds: whatever the bytes say, an answer comes within 2 s and 64 MiB."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.make_fixtures import Blob, Meta, Tiny, encode, metadata, model_bytes
from meshnode.artifact import cursor, header

SECONDS, BYTES = 2.0, 64 << 20


ASK = """
import resource, sys, time
from meshnode.artifact.identity import describe, open_artifact
from meshnode.errors import MeshError
before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
try:
    with open_artifact(sys.argv[1]) as artifact:
        describe(artifact)
    print("sound")
except MeshError as error:
    print(error.message)
print(time.process_time() - began, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)
"""


def answer(path: Path) -> str:
    """The verdict on a file, from a process of its own whose time and memory are counted."""
    command = [sys.executable, "-c", ASK, str(path)]
    out = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    message, _, counted = out.rstrip().rpartition("\n")
    seconds, taken = counted.split()
    assert float(seconds) < SECONDS
    assert int(taken) < BYTES
    return message


def array_of(element: int, count: int, body: bytes = b"") -> bytes:
    key = b"x.list"
    pair = struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, element, count) + body
    return b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + pair


def sparse(path: Path, start: bytes, size: int) -> Path:
    path.write_bytes(start)
    os.truncate(path, size)
    return path


@pytest.mark.parametrize("element", [0, 8, 12])
def test_list_without_end_over_a_giant_of_zeros(tmp_path: Path, element: int) -> None:
    assert answer(sparse(tmp_path / "x", array_of(element, 1 << 61), 1 << 40)) != "sound"
    assert answer(sparse(tmp_path / "x", array_of(element, 1 << 32), 1 << 40)) != "sound"


def test_as_many_texts_as_are_allowed(tmp_path: Path) -> None:
    count = cursor.MAX_STRINGS
    assert "number of" not in answer(sparse(tmp_path / "x", array_of(8, count), 8 * count + 200))
    assert f"{count + 1} elements" in answer(sparse(tmp_path / "x", array_of(8, count + 1), 1 << 40))


def test_as_many_tokens_as_are_allowed(tmp_path: Path) -> None:
    """Each of them written like a byte, which is what costs most."""
    token = struct.pack("<Q", 6) + b"<0x00>"
    key, count = header.TOKENS.encode(), cursor.MAX_STRINGS
    start = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    (tmp_path / "x").write_bytes(start + struct.pack("<IIQ", 9, 8, count) + token * count)
    assert "architecture is missing" in answer(tmp_path / "x")


def test_many_keys_and_tensors(tmp_path: Path) -> None:
    keys = b"".join(struct.pack("<Q", 8) + b"%08d" % i + struct.pack("<IB", 0, 1) for i in range(header.MAX_KEYS))
    entry = struct.pack("<IQIQ", 1, 1, 0, 0)
    table = b"".join(struct.pack("<Q", 8) + b"%08d" % i + entry for i in range(header.MAX_TENSORS))
    start = b"GGUF" + struct.pack("<IQQ", 3, header.MAX_TENSORS, header.MAX_KEYS)
    (tmp_path / "x").write_bytes(start + keys + table + bytes(1 << 20))
    assert "overlaps" in answer(tmp_path / "x")


def test_texts_that_fill_the_memory(tmp_path: Path) -> None:
    pairs = b"".join(
        struct.pack("<Q", 2) + b"%02d" % i + struct.pack("<IQ", 8, 1 << 20) + bytes(1 << 20) for i in range(20)
    )
    (tmp_path / "x").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 20) + pairs)
    assert "exceed 8 MiB" in answer(tmp_path / "x")


def test_tensor_over_a_hole_is_an_unfinished_download(tmp_path: Path) -> None:
    tiny = Tiny(n_layer=1, type="F32", n_vocab=340_000)
    blobs = [Blob("token_embd.weight", (64, 340_000), "F32", b"")]
    start = encode([m for m in metadata(tiny) if not m.type.startswith("[")], blobs)
    assert "never written" in answer(sparse(tmp_path / "x", start, len(start) + 340_000 * 256))


def test_giant_after_the_last_tensor(tmp_path: Path) -> None:
    body = model_bytes(Tiny(n_layer=1))
    assert "after the last tensor" in answer(sparse(tmp_path / "x", body, 1 << 40))


@pytest.mark.parametrize("path", ["/dev/zero", "/proc/self/mem", "/proc/kcore", "/proc/self/status"])
def test_files_that_never_end_or_are_none(path: str) -> None:
    if Path(path).exists():  # not every kernel has a kcore
        assert answer(Path(path)) != "sound"


def test_list_of_numbers_that_claims_more_than_any_vocabulary(tmp_path: Path) -> None:
    meta = [Meta("general.architecture", "str", "llama"), Meta(header.TOKEN_TYPES, "[i32]", [1] * (1 << 21))]
    (tmp_path / "x").write_bytes(encode(meta, []))
    assert answer(tmp_path / "x") != "sound"
