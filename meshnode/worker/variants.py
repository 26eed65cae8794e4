"""The workers of an installed wheel: one for each level of the x86-64 instruction set, the best chosen at run time.

bundled() -> Path | None      the worker of this installation that fits this CPU; None in a checkout, which builds one
settings(variant)             how the engine is configured for one level

A whole worker a level, not one that loads its kernels when it starts: what a worker's numbers depend on stays fixed
when it is built, its recipe names the level, and a fingerprint stands for one program.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import MeshError

WORKERS = Path(__file__).resolve().parent / "bin"  # VARIANT/meshnode-worker; a wheel has it, a checkout does not
PROGRAM = "meshnode-worker"
CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Variant:
    """flags: of /proc/cpuinfo, all needed; options: of ggml, which has no word for a level."""

    flags: frozenset[str]
    options: tuple[str, ...]


_V2 = frozenset({"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
VARIANTS = {  # from the least; the names are those that compilers know; a further one is 5 CPU minutes of `make wheel`
    "x86-64-v2": Variant(_V2, ("SSE42",)),
    "x86-64-v3": Variant(_V3, ("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C")),
}


def settings(variant: str) -> dict[str, str]:
    """Over those of native/pin.toml: nothing of the building machine's CPU remains in what is built."""
    march = f"-march={variant}"
    options = {f"GGML_{name}": "ON" for name in VARIANTS[variant].options}
    return {"GGML_NATIVE": "OFF", "CMAKE_C_FLAGS": march, "CMAKE_CXX_FLAGS": march} | options


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """What this CPU can; nothing when it is not told."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    found = (line.partition(":")[2] for line in lines if line.startswith("flags"))
    return frozenset(next(found, "").split())


def fitting(have: frozenset[str], among: tuple[str, ...] = tuple(VARIANTS)) -> str | None:
    """The highest level of `among` that a CPU with these flags can run."""
    return next((name for name in reversed(VARIANTS) if name in among and VARIANTS[name].flags <= have), None)


def bundled(workers: Path = WORKERS, cpuinfo: Path = CPUINFO) -> Path | None:
    """MeshError unsupported_cpu when this installation has workers, but none for this CPU."""
    there = tuple(name for name in VARIANTS if (workers / name / PROGRAM).is_file())
    if not there:
        return None
    best = fitting(cpu_flags(cpuinfo), there)
    if best is None:
        raise MeshError("unsupported_cpu", f"this CPU lacks what the least of our workers needs ({there[0]})")
    return workers / best / PROGRAM
