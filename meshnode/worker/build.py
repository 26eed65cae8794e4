"""Builds the worker from the pinned engine and our sources, once a machine.

    python -m meshnode.worker.build [--target worker|tests|sweep|upstream|asan] [--variant LEVEL] [--print-path]

Two levels lie in the cache, `engine/` below config.cache_dir(), each folder named by a hash of all that decides its
content: the engine's static libraries (pin, patches, flags, compiler, CPU features), and what is linked with them
(that, and our sources). So another checkout does not compile again, and a change of ours does not compile the engine.
A folder appears whole, by a rename; a lock a folder lets the second of two builders wait for the first.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..artifact import architectures
from ..config import cache_dir
from ..errors import MeshError
from . import variants
from .patch import PatchError, apply
from .tools import Percent, Progress, Tools, output, run

NATIVE = Path(__file__).resolve().parents[2] / "native"
LAYOUT = 1  # of the folders in the cache
LIBRARIES = ("libllama.a", "libggml.a", "libggml-cpu.a", "libggml-base.a")  # every build has these
FURTHER_LIBRARIES = "libggml-*.a"  # of the backends that were asked for
HEADERS = ("include/*.h", "ggml/include/*.h", "src/llama-ext.h")  # flat in include/ of the built engine
TARGETS = {  # what is built: executables, whether the engine is patched
    "worker": (("meshnode-worker",), True),
    "tests": (("test_exact", "test_company", "test_stage", "test_probe", "greedy"), True),
    "sweep": (("test_exact", "test_requantize", "make_models"), True),
    "upstream": (("parity_upstream",), False),
    "asan": (("meshnode-worker",), True),
}
# The engine and ours under AddressSanitizer, for what is fed with hostile files: four times as slow, never served with.
SANITIZED = {f"CMAKE_{kind}_FLAGS": "-fsanitize=address -fno-omit-frame-pointer" for kind in ("C", "CXX")}
NOT_THE_WORKER = ("test_", "fake_", "greedy", "parity_")  # sources whose change leaves the worker as it is
FOR_BOTH = ("CMAKE_BUILD_TYPE", "CMAKE_C_FLAGS", "CMAKE_CXX_FLAGS")  # the engine's options that what links it takes too


@dataclass(frozen=True)
class Pin:
    """native/pin.toml: the engine's source and how it is configured."""

    package: str
    version: str
    sha256: str
    source: str
    cmake: dict[str, str]

    @classmethod
    def load(cls, native: Path = NATIVE) -> Pin:
        """With the options of MESHNODE_CMAKE_ARGS over the file's. Raises MeshError: build_failed, bad_config."""
        try:
            pin = cls(**tomllib.loads((native / "pin.toml").read_text()))
            return replace(pin, cmake=pin.cmake | cmake_options(os.environ.get("MESHNODE_CMAKE_ARGS", "")))
        except FileNotFoundError as error:
            hint = "run from a checkout, installed with `pip install -e .`"
            raise MeshError("build_failed", "the worker's sources are not beside the package", hint=hint) from error


def cmake_options(text: str) -> dict[str, str]:
    """`-DGGML_CUDA=ON -D...` as settings of the engine's build. Raises MeshError bad_config."""
    hint = "write MESHNODE_CMAKE_ARGS as -DNAME=VALUE, parted by spaces"
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise MeshError("bad_config", f"the CMake options cannot be read: {error}", hint=hint) from None
    found = [re.fullmatch(r"-D([A-Za-z_]\w*)(?::[A-Z]+)?=(.*)", word, re.DOTALL) for word in words]
    for word, match in zip(words, found, strict=True):
        if match is None:
            raise MeshError("bad_config", f"{word[:80]!r} is no CMake option", hint=hint)
    return {match[1]: match[2] for match in found if match}


def worker_path(*, progress: Progress | None = None) -> Path:
    """The worker's executable: the one that came with this installation, else built first if need be (minutes).

    progress: gets lines such as "engine: 40 %". Raises MeshError: missing_tool, build_failed, unsupported_cpu.
    """
    if came_with := variants.bundled():
        return came_with
    return build("worker", progress=progress) / "meshnode-worker"


def find_worker() -> Path | None:
    """The worker's executable if it is there already; nothing is built."""
    if came_with := variants.bundled():
        return came_with
    path = Builder.make("worker", None).folder / "meshnode-worker"
    return path if path.exists() else None


def build(target: str, *, variant: str | None = None, progress: Progress | None = None) -> Path:
    """The folder that holds a target's executables (TARGETS), built first if need be. Raises MeshError as above.

    variant: a level of VARIANTS, for every machine that has it and no library beside glibc; None: for this machine.
    """
    return Builder.make(target, progress, variant).build()


@dataclass
class Builder:
    target: str
    root: Path  # of this cache
    pin: Pin
    tools: Tools
    patches: tuple[Path, ...]
    report: Progress
    variant: str | None = None

    @classmethod
    def make(cls, target: str, progress: Progress | None, variant: str | None = None) -> Builder:
        patches = tuple(sorted((NATIVE / "patches").glob("*.patch"))) if TARGETS[target][1] else ()
        pin = Pin.load()
        if target == "asan":
            pin = replace(pin, cmake=pin.cmake | SANITIZED)
        if variant is not None:
            pin = replace(pin, cmake=pin.cmake | variants.settings(variant))
        root = cache_dir() / "engine"
        return cls(target, root, pin, Tools.find(), patches, progress or (lambda line: None), variant)

    @property
    def patches_digest(self) -> str:
        return _digest([path.read_text(encoding="utf-8") for path in self.patches])

    @property
    def engine(self) -> Path:
        pin = [self.pin.sha256, self.pin.source, sorted(self.pin.cmake.items())]
        key = _digest([LAYOUT, pin, self.patches_digest, self.tools.identity(self.variant or "native")])
        return self.root / f"engine-{key[:16]}"

    @property
    def folder(self) -> Path:
        names = sorted(p for p in NATIVE.iterdir() if p.suffix in (".cpp", ".h") or p.name == "CMakeLists.txt")
        if self.target in ("worker", "asan"):
            names = [p for p in names if not p.name.startswith(NOT_THE_WORKER)]
        sources = [(p.name, p.read_text(encoding="utf-8")) for p in names]
        sources.append(("certificates.inc", architectures.header()))
        if self.target == "sweep":
            sources += [(p.name, p.read_text(encoding="utf-8")) for p in sorted((NATIVE / "generator").glob("*.h"))]
        return self.root / f"{self.target}-{_digest([LAYOUT, self.engine.name, self.target, sources])[:16]}"

    @property
    def engine_build(self) -> str:
        """What else fixes the engine's numbers, for its recipe: compiler and options; the CPU's features it knows."""
        options = _digest(sorted(self.pin.cmake.items()))[:16]
        level = f", {self.variant}" if self.variant else ""
        return f"{output(self.tools.cxx, '--version').splitlines()[0]}{level}, options {options}"

    def _portable(self) -> dict[str, str]:
        """So that a variant needs nothing of the machine it runs on but glibc: a compiler's own libraries go in."""
        if self.variant is None:
            return {}
        gomp = output(self.tools.cxx, "-print-file-name=libgomp.a").strip()
        return {"OpenMP_gomp_LIBRARY": gomp, "CMAKE_EXE_LINKER_FLAGS": "-static-libgcc -static-libstdc++ -s"}

    def build(self) -> Path:
        engine, folder = self.engine, self.folder
        if not folder.exists():
            self._once(engine, self._build_engine)
            self._once(folder, self._build_target)
        return folder

    def _once(self, folder: Path, fill: Callable[[Path], None]) -> None:
        """Lets fill(temporary folder) make what becomes folder, unless it is there or another process makes it."""
        self.root.mkdir(parents=True, exist_ok=True)
        with _lock(self.root / f"{folder.name}.lock"):
            if folder.exists():
                return
            for left in self.root.glob(f".{folder.name}.*"):  # of a builder that was killed
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=self.root) as name:
                made = Path(name) / "out"
                made.mkdir()
                fill(made)
                made.rename(folder)

    def _build_engine(self, out: Path) -> None:
        self._unpack_patched(source := out.parent / "source")
        made = out.parent / "build"
        self._cmake("engine", source, made, self.pin.cmake, ("llama",))
        (out / "lib").mkdir()
        (out / "include").mkdir()
        found = {path.name: path for pattern in (*LIBRARIES, FURTHER_LIBRARIES) for path in made.rglob(pattern)}
        for name in sorted({*LIBRARIES, *found}):
            shutil.copy2(found[name], out / "lib" / name)
        for pattern in HEADERS:
            for header in source.glob(pattern):
                shutil.copy2(header, out / "include" / header.name)

    def _unpack_patched(self, source: Path) -> None:
        _unpack(self._sdist(), self.pin.source, source)
        for path in self.patches:
            try:
                apply(path.read_text(encoding="utf-8"), source)
            except PatchError as error:
                raise MeshError("build_failed", f"{path.name} does not apply: {error}") from error

    def _build_target(self, out: Path) -> None:
        executables = TARGETS[self.target][0]
        made = out.parent / "build"
        (out.parent / "certificates.inc").write_text(architectures.header(), encoding="utf-8")
        settings = {
            "CERTIFICATES": str(out.parent),
            "ENGINE": str(self.engine),
            "ENGINE_PIN": f"{self.pin.package} {self.pin.version} {self.pin.sha256[:16]}",
            "ENGINE_PATCHES": self.patches_digest[:16],
            "ENGINE_BUILD": self.engine_build,
            **{name: value for name, value in self.pin.cmake.items() if name in FOR_BOTH},
            **self._portable(),
        }
        if self.target == "sweep":  # the engine's generator of test models is no part of its libraries
            self._unpack_patched(source := out.parent / "source")
            settings["ENGINE_SOURCE"] = str(source)
        self._cmake(self.target, NATIVE, made, settings, executables)
        for name in executables:
            shutil.copy2(made / name, out / name)
        if self.target == "sweep":
            names = re.findall(r'\{ LLM_ARCH_\w+,\s*"([^"(]+)"', (source / "src" / "llama-arch.cpp").read_text())
            (out / "architectures.txt").write_text("\n".join(names) + "\n")

    def _sdist(self) -> Path:
        """The pinned source distribution, verified; kept in the cache because it is long."""
        kept = self.root / f"{self.pin.package}-{self.pin.version}.tar.gz"
        with _lock(self.root / f"{kept.name}.lock"):
            if not kept.exists() or _file_digest(kept) != self.pin.sha256:
                self.report(f"engine: fetching {self.pin.package} {self.pin.version}")
                with tempfile.TemporaryDirectory(prefix=".sdist.", dir=self.root) as name:
                    self._download(Path(name)).rename(kept)
        return kept

    def _download(self, folder: Path) -> Path:
        # With the hash among the requirements pip refuses other bytes before it looks into them.
        requirement = folder / "requirements.txt"
        requirement.write_text(f"{self.pin.package}=={self.pin.version} --hash=sha256:{self.pin.sha256}\n")
        pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--no-binary=:all:"]
        run([*pip, "--dest", str(folder), "--requirement", str(requirement)], "pip cannot fetch the engine's source")
        for path in folder.glob("*.tar.gz"):
            if _file_digest(path) == self.pin.sha256:
                return path
        raise MeshError("build_failed", "the engine's source is not the pinned one", hint="check native/pin.toml")

    def _cmake(self, name: str, source: Path, made: Path, settings: dict[str, str], targets: Sequence[str]) -> None:
        self.report(f"{name}: configuring")
        settings = {"CMAKE_C_COMPILER": self.tools.cc, "CMAKE_CXX_COMPILER": self.tools.cxx, **settings}
        flags = [f"-D{key}={value}" for key, value in settings.items()]
        failure = f"the {name} cannot be built"
        run([self.tools.cmake, "-S", str(source), "-B", str(made), "-G", self.tools.generator, *flags], failure)
        jobs = str(len(os.sched_getaffinity(0)))
        command = [self.tools.cmake, "--build", str(made), "--parallel", jobs, "--target", *targets]
        run(command, failure, Percent(name, self.report))


def _unpack(sdist: Path, inner: str, to: Path) -> None:
    """Extracts one folder of a source distribution, whose files all lie in one folder NAME-VERSION/."""
    with tarfile.open(sdist) as tar:
        for member in tar:
            _, _, path = member.name.partition("/")
            if path.startswith(inner + "/") and (member.isfile() or member.isdir()):
                member.name = path.removeprefix(inner + "/")
                tar.extract(member, to, filter="data")


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m meshnode.worker.build", description="Builds the worker.")
    parser.add_argument("--target", choices=sorted(TARGETS), default="worker")
    parser.add_argument("--variant", choices=variants.VARIANTS, help="for every machine of a level, not for this one")
    parser.add_argument("--print-path", action="store_true", help="print the folder of the executables when done")
    args = parser.parse_args(argv)
    try:
        folder = build(args.target, variant=args.variant, progress=on_stderr)
    except MeshError as error:
        print(f"{error}\n{error.hint}", file=sys.stderr)
        return error.exit_status
    if args.print_path:
        print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
