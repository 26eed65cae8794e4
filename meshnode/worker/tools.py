"""The programs of this machine that the build uses, and how they are run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import MeshError

CMAKE_MIN = (3, 20)
LOG_TAIL = 25  # lines of a failed build's output that an error shows

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Tools:
    """Programs of this machine that the build uses, as absolute paths."""

    cmake: str
    generator: str
    cc: str
    cxx: str

    @classmethod
    def find(cls) -> Tools:
        """Raises MeshError missing_tool, naming the package to install."""
        cmake = _tool("cmake", ("cmake",), "cmake")
        found = re.search(r"(\d+)\.(\d+)", output(cmake, "--version"))
        if not found or (int(found[1]), int(found[2])) < CMAKE_MIN:
            least = ".".join(map(str, CMAKE_MIN))
            raise MeshError("missing_tool", f"cmake is older than {least}", hint=f"install cmake >= {least}")
        generator = "Ninja" if shutil.which("ninja") else "Unix Makefiles"
        if generator != "Ninja":
            _tool("make", ("make",), "ninja-build")
        cc = _tool("a C compiler", (os.environ.get("CC", ""), "cc", "gcc", "clang"), "gcc")
        cxx = _tool("a C++ compiler", (os.environ.get("CXX", ""), "c++", "g++", "clang++"), "g++")
        return cls(cmake, generator, cc, cxx)

    def identity(self, march: str) -> list[str]:
        """What decides the code that comes out: the compilers and what `march`, mostly "native", means to them."""
        out = []
        for compiler, language in ((self.cc, "c"), (self.cxx, "c++")):
            out.append(output(compiler, "--version").splitlines()[0])
            macros = output(compiler, f"-march={march}", "-dM", "-E", "-x", language, os.devnull)
            out.append("\n".join(sorted(macros.splitlines())))
        return out


class Percent:
    """Turns the output of ninja ("[3/78] ...") and make ("[ 4%] ...") into a report every ten percent."""

    def __init__(self, name: str, report: Progress) -> None:
        self.name, self.report, self.next = name, report, 10

    def __call__(self, line: str) -> None:
        found = re.match(r"\[\s*(\d+)(?:/(\d+)|%)\]", line)
        if not found:
            return
        percent = 100 * int(found[1]) // int(found[2] or 100)
        if percent >= self.next:
            self.report(f"{self.name}: {percent} %")
            self.next = percent // 10 * 10 + 10


def _tool(what: str, names: Sequence[str], package: str) -> str:
    for name in names:
        if name and (found := shutil.which(name)):
            return found
    raise MeshError("missing_tool", f"{what} is missing", hint=f"install the package {package} (apt install {package})")


def output(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
    if result.returncode != 0:
        raise MeshError("build_failed", f"{Path(command[0]).name} does not work: {result.stderr.strip()[-200:]}")
    return result.stdout


def run(command: Sequence[str], failure: str, each_line: Progress | None = None) -> None:
    """Runs a command to its end; when it fails or is interrupted nothing of it stays."""
    lines: list[str] = []
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # one group, so that the compilers end with it
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if each_line:
                each_line(line)
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)
        raise
    finally:
        process.wait()
    if process.returncode != 0:
        tail = "".join(lines[-LOG_TAIL:]).strip()
        hint = f"{Path(command[0]).name} ended with {process.returncode}:\n{tail}"
        raise MeshError("build_failed", failure, hint=hint)
