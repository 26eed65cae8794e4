import pytest
import trio
import trio.testing

from meshnode.errors import MeshError
from meshnode.ids import PeerId, SessionId
from meshnode.route.lease import Event, Key, LeaseBook
from meshnode.stage.turns import WAIT_S, Turns

RANKS = {"rich": 10, "poor": 0, "middle": 5}


def key(peer: str, number: int = 0) -> Key:
    return PeerId(peer), SessionId(bytes([number]) * 16), 0


def turns_of(places: int) -> tuple[LeaseBook, Turns]:
    book = LeaseBook(places, 30.0)
    return book, Turns(book, lambda peer: RANKS.get(peer, 0))


async def test_a_free_place_is_taken_at_once(autojump_clock: trio.testing.MockClock) -> None:
    book, turns = turns_of(2)
    await turns.reserve(key("a"), 1, within=10)
    await turns.reserve(key("b"), 1, within=10)
    assert book.free == 0
    assert trio.current_time() == pytest.approx(0, abs=1)


async def test_when_full_the_one_who_is_owed_gets_the_next_place(autojump_clock: trio.testing.MockClock) -> None:
    book, turns = turns_of(1)
    await turns.reserve(key("first"), 1, within=10)
    got: list[str] = []

    async def ask(peer: str) -> None:
        try:
            await turns.reserve(key(peer, 1), 1, within=10)
            got.append(peer)
        except MeshError as error:
            got.append(f"{peer} {error.code}")

    async with trio.open_nursery() as nursery:
        for peer in ("poor", "rich", "middle"):
            nursery.start_soon(ask, peer)
        await trio.sleep(0.5)
        turns._turn = 1
        book.apply(key("first"), 1, Event.CLOSE, trio.current_time())
        await trio.sleep(0.1)
        assert got == ["rich"]
        book.apply(key("rich", 1), 1, Event.CLOSE, trio.current_time())
        await trio.sleep(0.1)
        assert got == ["rich", "middle"]
    assert got == ["rich", "middle", "poor busy"]
    assert trio.current_time() <= WAIT_S + 1


async def test_who_stops_waiting_takes_nothing(autojump_clock: trio.testing.MockClock) -> None:
    book, turns = turns_of(1)
    await turns.reserve(key("first"), 1, within=10)
    with trio.move_on_after(0.3):
        await turns.reserve(key("gone", 1), 1, within=10)
    book.apply(key("first"), 1, Event.CLOSE, trio.current_time())
    await turns.reserve(key("next", 2), 1, within=10)
    assert book.free == 0


async def test_a_session_that_is_held_already_does_not_wait(autojump_clock: trio.testing.MockClock) -> None:
    _, turns = turns_of(2)
    await turns.reserve(key("a"), 1, within=10)
    with pytest.raises(MeshError, match="held here already"):
        await turns.reserve(key("a"), 2, within=10)
