"""A short form of `make soak-receipts`."""

from pathlib import Path

import pytest

from .soak_receipts import run


@pytest.mark.timeout(120)
def test_nothing_is_missing_anywhere_after_a_node_was_killed(worker_binary: Path) -> None:
    figures = run(4, 24)
    assert figures["sessions"] == 8
    assert figures["restarted"] == 1
