"""meshnode identify FILE; and what turns a path into an identity for the other commands."""

from __future__ import annotations

from pathlib import Path

import click

from ..artifact.identity import describe, identify, open_artifact
from . import progress, show
from .options import common, is_path, path_of


@click.command("identify")
@click.argument("file")
@common
def command(file: str, home: str | None, as_json: bool) -> None:
    """Tell what a GGUF file is, and the identity of its bytes: what it is called in every mesh."""
    path = path_of(file)
    with open_artifact(path) as artifact:
        summary = describe(artifact)
    identity = identify_path(path)
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
        )
    )


def identify_path(path: Path) -> str:
    """The content identity of a file, with a bar while it is read."""
    with progress.bars() as bars, open_artifact(path) as artifact:
        return identify(artifact, lambda done, size: bars.show(f"hashing {path.name}", done / size))


def identity_of(model: str) -> str:
    """MODEL as a node takes it: a path becomes the identity of its bytes, all else stays as it is.

    It is done here, in the command's own process: an entry node never opens a model.
    """
    return identify_path(path_of(model)) if is_path(model) else model
