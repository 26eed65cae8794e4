"""What may come next at a hop, at the tail and at the entry node."""

import dataclasses

import pytest

from meshnode.errors import MeshError
from meshnode.ids import Layers, SessionId
from meshnode.keys import NodeKey
from meshnode.session import Answer, HopSession, Sampler
from meshnode.wire.messages import Lease, Push, Tokens

PEER = NodeKey(bytes(32)).peer
SESSION = SessionId(b"s" * 16)
D = b"d" * 32


def session() -> HopSession:
    lease = Lease(b"l" * 8, SESSION, 1, 1, PEER, PEER, PEER, Layers(3, 6), Layers(4, 6), D, D, D, 8, 1000, ())
    return HopSession(lease)


FIRST = Push(b"l" * 8, SESSION, 1, 0, 0, 3, 4, 0)
SECOND = Push(b"l" * 8, SESSION, 1, 1, 3, 2, 4, 3)


def test_pushes_come_in_their_order() -> None:
    hop = session()
    hop.accept(FIRST)
    hop.accept(SECOND)
    assert (hop.positions, hop.steps) == (5, 2)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"epoch": 2}, "stale_epoch"),
        ({"epoch": 0}, "stale_epoch"),
        ({"session": b"t" * 16}, "stale_epoch"),
        ({"step": 0}, "bad_step"),
        ({"step": 2}, "bad_step"),
        ({"first": 2}, "bad_step"),
        ({"first": 4}, "bad_step"),
        ({"cached": 2}, "cache_miss"),
        ({"cached": 4}, "cache_miss"),
        ({"count": 6}, "context_exceeded"),
        ({"begin": 3}, "bad_frame"),
        ({"keep": 1}, "bad_frame"),
    ],
)
def test_anything_else_is_refused_and_changes_nothing(change: dict[str, object], code: str) -> None:
    hop = session()
    hop.accept(FIRST)
    before = dataclasses.replace(hop)
    with pytest.raises(MeshError) as refused:
        hop.accept(dataclasses.replace(SECOND, **change))  # type: ignore[arg-type]
    assert refused.value.code == code
    assert hop == before
    hop.accept(SECOND)


def test_a_push_that_comes_twice_is_refused() -> None:
    hop = session()
    hop.accept(FIRST)
    with pytest.raises(MeshError):
        hop.accept(FIRST)


def test_the_ring_goes_on_where_the_prompt_ended() -> None:
    hop = session()
    hop.accept(FIRST)
    for bad in (Tokens(SESSION, 1, 2, (7,)), Tokens(SESSION, 2, 3, (7,)), Tokens(SESSION, 1, 3, ())):
        with pytest.raises(MeshError):
            hop.accept_ring(bad)
    hop.accept_ring(Tokens(SESSION, 1, 3, (7,)))
    assert hop.positions == 4


def test_a_tail_stops_at_its_limit_at_an_end_and_without_credit() -> None:
    tail = Sampler(max_tokens=3)
    tail.sampled(False)
    assert not tail.may_go_on
    tail.grant(5)
    tail.grant(2)  # late: a credit never shrinks
    assert tail.may_go_on
    tail.sampled(False)
    tail.sampled(False)
    assert (tail.finish, tail.may_go_on) == ("length", False)
    ended = Sampler(max_tokens=3, credit=9)
    ended.sampled(True)
    assert (ended.finish, ended.made) == ("stop", 0)


def take(answer: Answer, first: int, pieces: list[bytes], finish: str | None = None) -> str:
    ids = tuple(range(len(pieces)))
    return "".join(text for _, text in answer.take(Tokens(SESSION, 1, first, ids, None, tuple(pieces), finish)))


def test_text_is_whole_characters_whatever_the_token_borders() -> None:
    text = "héllo 👨‍👩‍👧 שלום"
    answer, streamed = Answer((1, 2), 100), ""
    for index, byte in enumerate(text.encode()):
        streamed += take(answer, 2 + index, [bytes([byte])])
        streamed.encode()  # never half a character
    take(answer, 2 + len(text.encode()), [], "stop")
    assert streamed == text == answer.text


def test_a_character_that_never_ends_is_shown_as_such() -> None:
    answer = Answer((1,), 2)
    assert take(answer, 1, [b"a"]) == "a"
    assert take(answer, 2, [b"\xf0\x9f"], "length") == "\N{REPLACEMENT CHARACTER}"
    assert answer.text == "a\N{REPLACEMENT CHARACTER}"


def test_tokens_out_of_place_are_refused() -> None:
    answer = Answer((1, 2), 2)
    for first, pieces in ((1, [b"a"]), (3, [b"a"]), (2, [b"a", b"b", b"c"])):
        with pytest.raises(MeshError):
            take(answer, first, pieces)
    take(answer, 2, [b"a"], "stop")
    with pytest.raises(MeshError):
        take(answer, 3, [b"a"])
