"""The short form of `make soak-members`."""

from __future__ import annotations

import json
import subprocess
import sys


def test_a_mesh_whose_nodes_come_and_go_keeps_answering() -> None:
    command = [sys.executable, "-m", "tests.net.churn", "--seconds", "10", "--period", "2", "--starts", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["kills"] >= 3
    assert found["one_mesh"] == 3
