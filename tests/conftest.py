"""What several floors' tests share."""

from pathlib import Path

import pytest

from fake_worker import fake_worker_binary


@pytest.fixture(scope="session")
def fake_worker(pytestconfig: pytest.Config) -> Path:
    """The real worker program around a toy model: see native/fake_stage.cpp."""
    assert pytestconfig.cache is not None
    return fake_worker_binary(pytestconfig.cache.mkdir("native"))
