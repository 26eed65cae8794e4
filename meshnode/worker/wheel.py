"""Makes the wheel that installs without a compiler: the package, a worker for each level of CPU, and their notices.

    python -m meshnode.worker.wheel [--out DIR] [--variant LEVEL ...] [--worker LEVEL=PROGRAM]

The package's own pure wheel is taken apart and put together again with the workers in it, so that nothing but this
file knows that there are two kinds. The same sources and workers give the same bytes.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import re
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import MeshError
from . import variants
from .build import NATIVE, build, on_stderr
from .tools import run

GLIBC = (2, 36)  # what platforms are promised; a worker that needs a later one is not put into a wheel
TAG = f"py3-none-manylinux_{GLIBC[0]}_{GLIBC[1]}_x86_64"
FROM_ELSEWHERE = re.compile(rb"lib(?:stdc\+\+|gomp|gcc_s)\.so")  # a fresh machine need not have them
DATE = (2020, 1, 1, 0, 0, 0)  # of every file in the archive


def make(out: Path, programs: Mapping[str, Path]) -> Path:
    """The wheel in the folder `out`. programs: a worker for each level. Raises MeshError build_failed."""
    with tempfile.TemporaryDirectory() as name:
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
        run([*pip, "--wheel-dir", name, str(NATIVE.parent)], "the package cannot be built")
        (pure,) = Path(name).glob("*.whl")
        with zipfile.ZipFile(pure) as archive:
            files = {info.filename: archive.read(info) for info in archive.infolist() if not info.is_dir()}
    info = next(path for path in files if path.endswith(".dist-info/WHEEL")).removesuffix("WHEEL")
    files[info + "WHEEL"] = _platform(files[info + "WHEEL"])
    for level, program in programs.items():
        files[f"meshnode/worker/{variants.WORKERS.name}/{level}/{variants.PROGRAM}"] = program.read_bytes()
    files[info + "RECORD"] = _record(files, info + "RECORD")
    out.mkdir(parents=True, exist_ok=True)
    wheel = out / f"{info.removesuffix('.dist-info/')}-{TAG}.whl"
    with zipfile.ZipFile(beside := wheel.with_suffix(".part"), "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(files, key=lambda path: (path.startswith(info), path)):  # the record last
            entry = zipfile.ZipInfo(path, DATE)
            mode = 0o755 if path.endswith(f"/{variants.PROGRAM}") else 0o644
            entry.external_attr = (0o100000 | mode) << 16
            archive.writestr(entry, files[path], zipfile.ZIP_DEFLATED)
    beside.rename(wheel)
    return wheel


def portable(program: Path) -> Path:
    """Itself. MeshError build_failed when it needs more of a machine than the wheel's tag promises."""
    content = program.read_bytes()
    needed = max((int(a), int(b)) for a, b in re.findall(rb"GLIBC_(\d+)\.(\d+)", content))
    if needed > GLIBC:
        message = f"the worker needs glibc {needed[0]}.{needed[1]}, the wheel promises {GLIBC[0]}.{GLIBC[1]}"
        raise MeshError("build_failed", message, hint="build on a machine with an older glibc")
    if found := FROM_ELSEWHERE.search(content):
        raise MeshError("build_failed", f"the worker needs {found[0].decode()}, which a machine may lack")
    return program


def _platform(metadata: bytes) -> bytes:
    said = metadata.decode()
    said = re.sub(r"(?m)^Root-Is-Purelib: .*$", "Root-Is-Purelib: false", said)
    return re.sub(r"(?m)^Tag: .*$", f"Tag: {TAG}", said).encode()


def _record(files: Mapping[str, bytes], own: str) -> bytes:
    lines = []
    for path, content in sorted(files.items()):
        if path != own:
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            lines.append(f"{path},sha256={digest},{len(content)}\n")
    return "".join([*lines, f"{own},,\n"]).encode()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m meshnode.worker.wheel", description="Makes the platform's wheel.")
    parser.add_argument("--out", type=Path, default=NATIVE.parent / "dist", help="the folder that gets it")
    parser.add_argument("--variant", action="append", choices=variants.VARIANTS, help="this level; else all of them")
    parser.add_argument("--worker", action="append", metavar="LEVEL=PROGRAM", help="a program as it is, for tests")
    args = parser.parse_args(argv)
    try:
        programs = {level: Path(path) for level, _, path in (given.partition("=") for given in args.worker or ())}
        for level in args.variant or (() if programs else variants.VARIANTS):
            on_stderr(f"the worker for {level}")
            programs[level] = portable(build("worker", variant=level, progress=on_stderr) / variants.PROGRAM)
        print(make(args.out, programs))
    except MeshError as error:
        print(f"{error}\n{error.hint}", file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
