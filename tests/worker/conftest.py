from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from meshnode.artifact.files import open_file
from meshnode.worker import LoadSpec


@pytest.fixture
def spec(tmp_path: Path) -> Iterator[Callable[..., LoadSpec]]:
    """Makes a LoadSpec of a toy model: 6 layers, 16 channels, 300 tokens, unless `content` says otherwise."""
    with ExitStack() as stack:

        def make(content: str = "meshnode-fake 6 16 300", **changes: object) -> LoadSpec:
            path = tmp_path / "toy.gguf"
            path.write_text(content)
            return LoadSpec([stack.enter_context(open_file(path))], **changes)  # type: ignore[arg-type]

        yield make
