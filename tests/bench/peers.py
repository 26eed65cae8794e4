"""Builds what we compare with, from the engine's pinned source as it is upstream: llama-bench, llama-server, RPC."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from meshnode.config import cache_dir
from meshnode.worker.build import LAYOUT, Builder, Pin, Tools, _digest, _unpack

PROGRAMS = ("llama-bench", "llama-server", "ggml-rpc-server")
SETTINGS = {"LLAMA_BUILD_COMMON": "ON", "LLAMA_BUILD_TOOLS": "ON", "LLAMA_BUILD_SERVER": "ON", "GGML_RPC": "ON"}


@dataclass
class Peers(Builder):
    @classmethod
    def here(cls) -> Peers:
        report = partial(print, file=sys.stderr)
        return cls("worker", cache_dir() / "engine", Pin.load(), Tools.find(), (), report)

    @property
    def folder(self) -> Path:
        settings = sorted((self.pin.cmake | SETTINGS).items())
        made_by = self.tools.identity("native")
        return self.root / f"peers-{_digest([LAYOUT, self.pin.sha256, settings, made_by])[:16]}"

    def build(self) -> Path:
        self._once(self.folder, self._build_peers)
        return self.folder

    def _build_peers(self, out: Path) -> None:
        source, made = out.parent / "source", out.parent / "build"
        _unpack(self._sdist(), self.pin.source, source)
        self._cmake("peers", source, made, self.pin.cmake | SETTINGS, PROGRAMS)
        for name in PROGRAMS:
            shutil.copy2(made / "bin" / name, out / name)


def build() -> Path:
    """The folder of the three programs, built first if need be (a quarter of an hour). Raises MeshError."""
    return Peers.here().build()


if __name__ == "__main__":
    print(build())
