"""A short form of `python -m tests.ledger.simulation`."""

from meshnode.ledger.audit import EVERY

from .simulation import Mesh


def test_a_mesh_with_liars_and_churn() -> None:
    figures = Mesh(seed=1).run(sessions=800, a_round=5)
    assert figures.sessions >= 800
    assert figures.caught_after, "no liar did enough to be caught: the run is too short to tell"
    assert max(figures.caught_after) <= 2 * EVERY - 1
    assert (figures.never_caught, figures.honest_lowered, figures.honest_disputed) == (0, 0, 0)
    assert figures.periods_until_equal <= 3
    assert figures.farm_rank == 0
