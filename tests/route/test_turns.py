from meshnode.ids import PeerId
from meshnode.route.turns import FAIR_TURN, MAX_A_PEER, MAX_WAITING, Ticket, next_of, turned_away


def ticket(peer: str, rank: int, since: float) -> Ticket:
    return Ticket(PeerId(peer), rank, since)


def test_those_to_whom_work_is_owed_come_first() -> None:
    waiting = [ticket("new", 0, 0.0), ticket("some", 5, 1.0), ticket("most", 9, 2.0), ticket("as much", 9, 3.0)]
    assert next_of(waiting, 1).peer == "most"


def test_a_newcomer_is_never_starved() -> None:
    """However many come that have done more, each fourth place goes to whoever has waited longest."""
    waiting = [ticket("new", 0, 0.5)]
    for turn in range(1, 2 * FAIR_TURN):
        waiting += [ticket(f"rich {turn} {n}", 100, turn + n / 10) for n in range(2)]
        chosen = next_of(waiting, turn)
        waiting.remove(chosen)
        if chosen.peer == "new":
            assert turn <= FAIR_TURN
            return
    raise AssertionError("starved")


def test_too_many_requests_turn_away_the_least() -> None:
    waiting = [ticket(f"p{n}", n, float(n)) for n in range(MAX_WAITING)]
    assert turned_away(waiting, waiting[-1]) is None
    more = ticket("x", 50, 99.0)
    assert turned_away([*waiting, more], more) is waiting[0]
    last = ticket("last", 0, 100.0)
    assert turned_away([*waiting, last], last) is last


def test_one_peer_does_not_take_all_places() -> None:
    waiting = [ticket("greedy", 9, float(n)) for n in range(MAX_A_PEER + 1)]
    assert turned_away(waiting, waiting[-1]) is waiting[-1]
