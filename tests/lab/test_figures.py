"""The figures of the simulated mesh, a small share of each; the second half of its seeds."""

import pytest

from meshnode.lab import figures, hostile

from .seeds import check


@pytest.mark.timeout(300)
def test_the_second_half_of_a_thousand_meshes() -> None:
    check(range(500, 1000))


def test_routes_are_close_to_the_cheapest() -> None:
    found = figures.route_costs(1, 100)
    assert 1 <= found["route_cost_median"] <= 1.05
    assert found["route_cost_p99"] <= 1.25


def test_requests_succeed_while_nodes_come_and_go() -> None:
    found = figures.churn(1, 60)
    assert found["churn_success"] >= 0.98  # one of so few
    assert "wrong" not in found["churn_failed"]


def test_hostile_and_stale_messages_are_refused() -> None:
    assert hostile.messages(2, 10_000)["hostile_accepted"] == 0


def test_what_is_cancelled_touches_no_other_session() -> None:
    found = figures.cancels(1, 60)
    assert found["cancels_beside"] == 12
    assert found["cancels_touched"] == found["leaks"] == 0
