"""Requests that wait for a place in a holding that is full."""

from __future__ import annotations

from collections.abc import Callable

import trio

from ..errors import MeshError
from ..ids import PeerId
from ..route.lease import Key, LeaseBook
from ..route.turns import Ticket, next_of, turned_away

WAIT_S = 3.0  # at most: whoever asks can try another holder meanwhile
WAIT_SHARE = 0.5  # of the time that is left for opening the route
LOOK_S = 0.02  # how soon a place that becomes free is seen


class Turns:
    """Of one holding. standing: the work that a peer did for those whom this node owes."""

    def __init__(self, book: LeaseBook, standing: Callable[[PeerId], int]) -> None:
        self._book = book
        self._standing = standing
        self._waiting: list[Ticket] = []
        self._turn = 0

    async def reserve(self, key: Key, epoch: int, *, within: float) -> None:
        """As LeaseBook.reserve, but waits for a place, as long as it may."""
        now = trio.current_time()
        if self._book.free > 0 and not self._waiting:
            self._book.reserve(key, epoch, now, within=within)
            return
        ticket = Ticket(key[0], self._standing(key[0]), now)
        self._waiting.append(ticket)
        away = turned_away(self._waiting, ticket)
        if away is not None:
            self._waiting.remove(away)
        try:
            with trio.move_on_after(min(WAIT_S, within * WAIT_SHARE)):
                while ticket in self._waiting:
                    if self._book.free > 0 and next_of(self._waiting, self._turn) is ticket:
                        left = within - (trio.current_time() - now)
                        self._book.reserve(key, epoch, trio.current_time(), within=left)
                        self._turn += 1
                        return
                    await trio.sleep(LOOK_S)
        finally:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
        taken = f"every session of this holding is taken ({self._book.places}), and {len(self._waiting)} wait"
        raise MeshError("busy", taken)
