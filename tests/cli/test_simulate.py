"""meshnode lab simulate"""

import json

from .conftest import Meshnode


def test_what_became_of_the_requests_is_printed(meshnode: Meshnode) -> None:
    done = meshnode("lab", "simulate", "--seed", "3", "--runs", "2", "--json")
    said = json.loads(done.out)
    assert done.status == 0
    assert said["wrong"] == {}
    assert sum(said["requests"].values()) >= 2
    shown = meshnode("lab", "simulate", "--seed", "3", "--log").out
    assert "RouteOpen entry" in shown
    assert "events " in shown
