"""Stop strings, however the text comes in pieces."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from meshnode.api.openai.stops import Stops

TEXTS = st.text("ab\n🙂", max_size=24)
STOPS = st.lists(st.text("ab\n🙂", min_size=1, max_size=4), max_size=3)


def by_hand(text: str, stops: list[str]) -> tuple[str, bool]:
    """Up to the stop string that is whole first; of several that are at once, the longest."""
    for end in range(len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)], True
    return text, False


@given(TEXTS, STOPS, st.lists(st.integers(0, 24), max_size=6))
def test_text_is_cut_before_the_first_stop_whatever_the_pieces(text: str, stops: list[str], cuts: list[int]) -> None:
    filter_, shown = Stops(stops), ""
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for begin, end in pairwise(borders):
        shown += filter_.feed(text[begin:end])
        assert by_hand(text, stops)[0].startswith(shown)  # nothing leaks, not even for a while
    shown += "" if filter_.found else filter_.rest()
    assert (shown, filter_.found) == by_hand(text, stops)
    assert filter_.shown == len(shown)


def test_only_what_may_become_a_stop_is_held_back() -> None:
    stops = Stops(["\n\nUser:"])
    assert stops.feed("Hello\n") == "Hello"
    assert stops.feed("\n") == ""
    assert stops.feed("Us") == ""
    assert stops.feed("ually\n\nUser") == "\n\nUsually"
    assert stops.feed(": no") == ""
    assert stops.found
    assert stops.feed("more") == ""
