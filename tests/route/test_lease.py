"""The table of leases, and the book."""

import copy
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnode.config import LEASE_IDLE_S
from meshnode.errors import MeshError
from meshnode.ids import PeerId, SessionId
from meshnode.route.lease import FIRST_PUSH_S, Event, LeaseBook, State, after

ENTRY = PeerId("entry")
A, B = (ENTRY, SessionId(b"a" * 16), 0), (ENTRY, SessionId(b"b" * 16), 0)
ALLOWED = {
    (State.RESERVED, Event.SIGN): State.READY,
    (State.READY, Event.PUSH): State.RUNNING,
    (State.READY, Event.RENEW): State.READY,
    (State.RUNNING, Event.PUSH): State.RUNNING,
    (State.RUNNING, Event.RENEW): State.RUNNING,
    (State.RESERVED, Event.LAPSE): State.CLOSED,
    (State.READY, Event.LAPSE): State.CLOSED,
    (State.RUNNING, Event.LAPSE): State.CLOSED,
    (State.RESERVED, Event.CLOSE): State.CLOSED,
    (State.READY, Event.CLOSE): State.CLOSED,
    (State.RUNNING, Event.CLOSE): State.CLOSED,
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_the_table_is_whole_and_nothing_else_is_allowed(state: State, event: Event) -> None:
    if (state, event) in ALLOWED:
        assert after(state, event) is ALLOWED[state, event]
    else:
        with pytest.raises(MeshError):
            after(state, event)


def code(call: object, *args: object, **kwargs: object) -> str:
    with pytest.raises(MeshError) as refused:
        call(*args, **kwargs)  # type: ignore[operator]
    return refused.value.code


def test_places_are_counted_and_given_back() -> None:
    book = LeaseBook(1, ttl=30)
    book.reserve(A, 1, 0.0, within=5)
    assert book.free == 0
    assert code(book.reserve, B, 1, 0.0, within=5) == "busy"
    book.apply(A, 1, Event.CLOSE, 1.0)
    book.reserve(B, 1, 1.0, within=5)


def test_an_epoch_that_has_run_is_never_leased_again() -> None:
    book = LeaseBook(2, ttl=30)
    book.reserve(A, 2, 0.0, within=5)
    book.apply(A, 2, Event.SIGN, 0.0)
    book.apply(A, 2, Event.PUSH, 0.0)
    book.apply(A, 2, Event.CLOSE, 0.0)
    for epoch in (1, 2):
        assert code(book.reserve, A, epoch, 1.0, within=5) == "stale_epoch"
        assert code(book.find, A, epoch) == "stale_epoch"
    book.reserve(A, 3, 1.0, within=5)
    assert code(book.find, B, 1) == "unknown_session"


def test_an_attempt_that_was_given_up_may_be_made_again() -> None:
    book = LeaseBook(2, ttl=30)
    book.reserve(A, 1, 0.0, within=5)
    assert book.idle(A) is None
    book.apply(A, 1, Event.SIGN, 0.0)
    assert book.idle(A)
    book.apply(A, 1, Event.LAPSE, 0.0)
    book.reserve(A, 1, 0.0, within=5)


def test_time_runs_out_without_prefill_and_without_renewal() -> None:
    book = LeaseBook(2, ttl=30)
    book.reserve(A, 1, 0.0, within=5)
    assert [held.key for held in book.lapsed(5.0)] == [A]
    book.apply(A, 1, Event.SIGN, 1.0)
    assert not book.lapsed(LEASE_IDLE_S + 0.9)
    assert book.lapsed(LEASE_IDLE_S + 1.0)
    book.apply(A, 1, Event.PUSH, 2.0)
    assert not book.lapsed(31.9)
    book.apply(A, 1, Event.PUSH, 20.0)  # pushes alone do not keep a session whose entry node is gone
    assert book.lapsed(32.0)
    book.apply(A, 1, Event.RENEW, 31.0)
    assert not book.lapsed(60.9)
    assert book.lapsed(61.0)


def test_renewals_do_not_hold_a_place_for_ever_on_which_nothing_comes() -> None:
    book = LeaseBook(2, ttl=30)
    book.reserve(A, 1, 0.0, within=5)
    book.apply(A, 1, Event.SIGN, 0.0)
    for now in range(5, int(FIRST_PUSH_S), 5):
        book.apply(A, 1, Event.RENEW, float(now))
    assert not book.lapsed(FIRST_PUSH_S - 0.1)
    assert book.lapsed(FIRST_PUSH_S)


def test_another_entry_node_cannot_name_a_session() -> None:
    book = LeaseBook(2, ttl=30)
    thief = (PeerId("thief"), *A[1:])
    book.reserve(A, 1, 0.0, within=5)
    book.reserve(thief, 1 << 31, 0.0, within=5)
    for key, epoch in ((A, 1), (thief, 1 << 31)):
        book.apply(key, epoch, Event.SIGN, 0.0)
        book.apply(key, epoch, Event.PUSH, 0.0)
    book.apply(thief, 1 << 31, Event.CLOSE, 0.0)
    assert book.find(A, 1)


def test_a_session_goes_on_in_a_later_epoch_in_its_place() -> None:
    book = LeaseBook(1, ttl=30)
    book.reserve(A, 1, 0.0, within=5)
    assert code(book.advance, A, 1, 2, 0.0) == "unknown_session"  # nothing is there to go on with
    book.apply(A, 1, Event.SIGN, 0.0)
    book.apply(A, 1, Event.PUSH, 0.0)
    for late in (0, 1):
        assert code(book.advance, A, 1, late, 0.0) == "stale_epoch"
    book.advance(A, 1, 3, 20.0)
    for event in Event:
        assert code(book.apply, A, 1, event, 21.0) == "stale_epoch"
    assert book.find(A, 3).state is State.RUNNING
    assert not book.lapsed(49.0)
    assert book.lapsed(50.0)


def test_a_route_may_come_by_twice() -> None:
    book, again = LeaseBook(2, ttl=30), (*A[:2], 4)
    for key in (A, again):
        book.reserve(key, 2, 0.0, within=5)
        book.apply(key, 2, Event.SIGN, 0.0)
        book.apply(key, 2, Event.PUSH, 0.0)
    book.apply(again, 2, Event.CLOSE, 0.0)
    assert code(book.reserve, again, 2, 0.0, within=5) == "stale_epoch"
    assert code(book.reserve, (*A[:2], 5), 1, 0.0, within=5) == "stale_epoch"


KEYS = (A, B, (*A[:2], 4))
SAID = st.tuples(st.sampled_from(KEYS), st.integers(0, 6), st.sampled_from([*Event, "reserve", "advance"]))


@given(st.lists(SAID, max_size=60))
def test_whatever_is_said_no_epoch_runs_twice_and_a_refusal_changes_nothing(said: list[tuple[Any, int, Any]]) -> None:
    book, run, now = LeaseBook(2, ttl=30), dict[Any, int](), 0.0
    for key, epoch, what in said:
        now += 1.0
        before = copy.deepcopy(book)
        held = book._held.get(key)
        try:
            if what == "reserve":
                book.reserve(key, epoch, now, within=5)
                assert epoch >= max((run[k] for k in run if k[:2] == key[:2]), default=-1)
                assert epoch > run.get(key, -1)
            elif what == "advance":
                book.advance(key, epoch, epoch + 1, now)
                assert held is not None
                assert held.state is not State.RESERVED
                run[key] = epoch + 1
            else:
                state = book.apply(key, epoch, what, now)
                if state is State.RUNNING:
                    run[key] = epoch
        except MeshError as refused:
            assert refused.code in ("stale_epoch", "unknown_session", "busy")  # noqa: PT017
            assert book == before
        assert 0 <= book.free <= book.places
        assert len(book._held) == book.places - book.free
