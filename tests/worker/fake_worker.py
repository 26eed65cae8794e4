"""Builds the worker around native/fake_stage.cpp: the real process and framing, a toy in place of the engine."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

NATIVE = Path(__file__).parents[2] / "native"
HEADERS = tuple(sorted(path.name for path in NATIVE.glob("*.h")))
SOURCES = ("worker.cpp", "frames.cpp", "metered.cpp", "sample.cpp", "grammar.cpp", "fake_stage.cpp")
FLAGS = ("-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", '-DMESHNODE_ENGINE="fake"')


def compile_native(folder: Path, stem: str, sources: tuple[str, ...], flags: tuple[str, ...] = FLAGS) -> Path:
    """Compile files of native/ into folder/stem-HASH, unless that very thing is there already."""
    digest = hashlib.sha256(repr((sources, flags)).encode())
    for name in (*sources, *HEADERS):
        digest.update(name.encode() + (NATIVE / name).read_bytes())
    binary = folder / f"{stem}-{digest.hexdigest()[:16]}"
    if not binary.exists():
        unfinished = binary.with_suffix(f".{os.getpid()}")
        compiler = os.environ.get("CXX", "g++")
        subprocess.run([compiler, *flags, *(NATIVE / s for s in sources), "-o", unfinished], check=True)
        unfinished.rename(binary)
    return binary


def fake_worker_binary(folder: Path) -> Path:
    return compile_native(folder, "meshnode-worker-fake", SOURCES)
