"""meshnode models [PATH ...]"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from ..api.connect import Control
from ..artifact.catalogue import Catalogue, Entry
from ..artifact.shards import shard_name
from ..config import Home
from ..errors import MeshError
from . import progress, show
from .endings import Told
from .identify import known_files
from .options import common, home_of, path_of


@click.command("models")
@click.argument("paths", nargs=-1, metavar="[PATH ...]")
@common
def command(paths: tuple[str, ...], home: str | None, as_json: bool) -> None:
    """List the models known in the mesh, and which layers are missing; or, with PATHs, those in files and folders.

    Files are checked and identified: what is refused is listed with the reason, and several paths of the same bytes
    are one model. A PATH that is itself refused decides the exit status; what a folder holds does not.
    """
    if paths:
        return _show_files(look_through(list(map(path_of, paths)), home_of(home)), paths, as_json)
    with Control(home_of(home)) as node:
        models = node.models()
    if as_json:
        return show.as_json({"models": models})
    rows = [
        (
            model["name"],
            model["artifact"],
            model["architecture"],
            model["n_layer"],
            _size(model["bytes"]),
            "complete" if not model["missing"] else "missing " + show.ranges(model["missing"]),
            show.count(len({holder["peer"] for holder in model["holders"]}), "holder"),
            "here" if model["local"] else "",
        )
        for model in models
    ]
    nothing = "No model is known in the mesh. Hold one: meshnode serve MODEL.gguf"
    show.table(("name", "identity", "architecture", "layers", "size", "covered", "held by", ""), rows, nothing=nothing)
    return None


def look_through(paths: Sequence[Path], home: Home) -> Catalogue:
    """A catalogue of these files and of every GGUF file in these folders, whether sound or refused."""
    with known_files(home) as cache, progress.bars() as bars:
        catalogue = Catalogue(cache)
        for path in _files(paths):
            name = f"hashing {path.name}"

            def report(done: int, size: int, name: str = name) -> None:
                bars.show(name, done / size)

            with suppress(MeshError):  # it is kept among the refusals
                catalogue.add(path, now_ns=time.time_ns(), progress=report)
            bars.drop(name)
    return catalogue


def _files(paths: Sequence[Path]) -> list[Path]:
    """Of a set of shards the first that is there: it leads to the others."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        sets = set()
        for file in sorted(entry for entry in path.rglob("*.gguf")):
            name = shard_name(os.fspath(file))
            if name is not None and name.count > 1:
                if (name.prefix, name.count) in sets:
                    continue
                sets.add((name.prefix, name.count))
            found.append(file)
    return found


def _show_files(catalogue: Catalogue, named: Sequence[str], as_json: bool) -> None:
    entries, refusals = catalogue.entries(), catalogue.refusals()
    _list_files(entries, refusals, as_json)
    for path in map(os.fspath, map(path_of, named)):
        if path in refusals:
            raise Told(refusals[path])


def _list_files(entries: Sequence[Entry], refusals: Mapping[str, MeshError], as_json: bool) -> None:
    if as_json:
        refused = [
            {"path": path, "code": error.code, "message": error.message, "hint": error.hint}
            for path, error in sorted(refusals.items())
        ]
        return show.as_json({"models": list(map(_entry, entries)), "refused": refused})
    rows: list[tuple[Any, ...]] = [
        (
            entry.name,
            entry.identity,
            entry.summary.architecture,
            entry.summary.n_layer,
            _size(entry.summary.file_bytes),
            " ".join(show.line(source.path) for source in entry.sources),
        )
        for entry in entries
    ]
    rows += [
        ("refused", error.code, "", "", "", f"{show.line(path)}: {error.message}")
        for path, error in sorted(refusals.items())
    ]
    nothing = "There is no GGUF file."
    show.table(
        ("name", "identity", "architecture", "layers", "size", "where, or why it is refused"), rows, nothing=nothing
    )
    return None


def _entry(entry: Entry) -> dict[str, Any]:
    summary = entry.summary
    return {
        "artifact": entry.identity,
        "name": entry.name,
        "architecture": summary.architecture,
        "n_layer": summary.n_layer,
        "bytes": summary.file_bytes,
        "tied": summary.tied,
        "paths": [source.path for source in entry.sources],
        "warnings": list(entry.warnings),
    }


def _size(size: int | None) -> str:
    return "" if size is None else f"{size / 1e6:.1f} MB"
