"""How fast artifacts are identified: python -m tests.artifact.bench [MODEL.gguf]; the last line is JSON.

cold_vs_hashlib   median time of hashlib.file_digest over that of identify(), one file, dropped from the page cache
warm_1000_s       seconds to look up 1,000 known files: each opened, its stamp taken, its digest found
start_50_s        seconds that 50 known artifacts add to the start of a node
"""

import contextlib
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fixtures.make_fixtures import Tiny, model_bytes
from meshnode.artifact.cache import IdentityCache
from meshnode.artifact.catalogue import Catalogue
from meshnode.artifact.files import open_file
from meshnode.artifact.identity import digests, identify, open_artifact

ROUNDS = 15
COLD_BYTES = 96 << 20  # of the file that is made when none is given
HOUR_NS = 3_600_000_000_000  # ahead: what was just written counts as settled


def cold_vs_hashlib(path: Path) -> float:
    def ours() -> None:
        with open_artifact(path) as artifact:
            identify(artifact)

    def theirs() -> None:
        with path.open("rb") as file:
            hashlib.file_digest(file, "sha256")

    took: dict[Callable[[], None], list[float]] = {ours: [], theirs: []}
    for round_ in range(ROUNDS):
        for run in (ours, theirs) if round_ % 2 else (theirs, ours):
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
            began = time.perf_counter()
            run()
            took[run].append(time.perf_counter() - began)
    return statistics.median(took[theirs]) / statistics.median(took[ours])


def shards_vs_hashlib(folder: Path) -> float:
    """Of a set of four files, which are read at once, over one after the other; both from the page cache."""
    paths = [folder / f"shard{i}" for i in range(4)]
    for path in paths:
        path.write_bytes(os.urandom(COLD_BYTES // 4))
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open_file(path)) for path in paths]
        began = time.perf_counter()
        digests(files)
        ours = time.perf_counter() - began
    began = time.perf_counter()
    for path in paths:
        with path.open("rb") as file:
            hashlib.file_digest(file, "sha256")
    return (time.perf_counter() - began) / ours


def known_files(folder: Path) -> tuple[float, float]:
    body = bytearray(model_bytes(Tiny(n_layer=1)))
    paths = [folder / f"{i}.gguf" for i in range(1000)]
    for i, path in enumerate(paths):
        body[-8:] = i.to_bytes(8, "little")
        path.write_bytes(body)
    now_ns, cache_path = time.time_ns() + HOUR_NS, folder / "cache.sqlite"
    first = Catalogue(IdentityCache(cache_path))
    for path in paths:
        first.add(path, now_ns=now_ns)
    cache = IdentityCache(cache_path)
    began = time.perf_counter()
    for path in paths:
        with open_file(path) as file:
            if cache.file(file.stamp) is None:
                raise SystemExit("a known file was not known")
    warm = time.perf_counter() - began
    began = time.perf_counter()
    again = Catalogue(IdentityCache(cache_path))
    for path in paths[:50]:
        again.describe(path, now_ns=now_ns)  # before anything is bound
        again.add(path, now_ns=now_ns)
    return warm, time.perf_counter() - began


def main(arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = Path(arguments[0]) if arguments else folder / "cold.gguf"
        if not arguments:
            model.write_bytes(os.urandom(COLD_BYTES))
        ratio = cold_vs_hashlib(model)
        print(f"a set of four shards at {shards_vs_hashlib(folder):.2f} times the speed of one after the other")
        warm, start = known_files(folder)
    figures = {"cold_vs_hashlib": round(ratio, 3), "warm_1000_s": round(warm, 4), "start_50_s": round(start, 4)}
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1:])
