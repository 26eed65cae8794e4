"""meshnode identify FILE; and what turns a path into an identity for the other commands."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import click

from ..artifact.cache import IdentityCache
from ..artifact.catalogue import Catalogue, Entry
from ..config import Home
from . import progress, show
from .options import common, home_of, is_path, path_of


@click.command("identify")
@click.argument("file")
@common
def command(file: str, home: str | None, as_json: bool) -> None:
    """Tell what a GGUF file is, and the identity of its bytes: what it is called in every mesh."""
    entry = look_at(file, home_of(home))
    identity, summary = entry.identity, entry.summary
    if as_json:
        show.as_json(
            {
                "artifact": identity,
                "architecture": summary.architecture,
                "name": summary.name,
                "n_layer": summary.n_layer,
                "n_embd": summary.n_embd,
                "n_vocab": summary.n_vocab,
                "context": summary.n_ctx_train,
                "chat_template": summary.has_template,
                "bytes": summary.file_bytes,
                "warnings": list(entry.warnings),
            }
        )
        return
    show.facts(
        (
            ("identity", identity),
            ("name", summary.name),
            ("architecture", summary.architecture),
            ("layers", f"{summary.n_layer} (0-{summary.n_layer})"),
            ("channels", summary.n_embd),
            ("vocabulary", summary.n_vocab),
            ("context", summary.n_ctx_train),
            ("chat template", "yes" if summary.has_template else "no"),
            ("size", f"{summary.file_bytes / 1e6:.1f} MB"),
            *(("warning", warning) for warning in entry.warnings),
        )
    )


def look_at(model: str, home: Home) -> Entry:
    """Checks and identifies the model at a path, with a bar while it is read.

    What the node of this home, or an earlier command, found out about unchanged files is not read again.
    """
    path = path_of(model)
    with known_files(home) as cache, progress.bars() as bars:

        def report(done: int, size: int) -> None:
            bars.show(f"hashing {path.name}", done / size)

        return Catalogue(cache).add(path, now_ns=time.time_ns(), progress=report)


@contextmanager
def known_files(home: Home) -> Iterator[IdentityCache]:
    """The cache of this home; where there is none that can be written, one that is soon forgotten."""
    usable = home.path.is_dir() and os.access(home.path, os.W_OK)
    cache = IdentityCache(home.catalogue_path if usable else ":memory:")
    try:
        yield cache
    finally:
        cache.close()


def identity_of(model: str, home: Home) -> str:
    """MODEL as a node takes it: a path becomes the identity of its bytes, all else stays as it is.

    It is done here, in the command's own process: an entry node never opens a model.
    """
    return look_at(model, home).identity if is_path(model) else model
