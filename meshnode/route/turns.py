"""Whose request comes next when a holding is full: those to whom work is owed, and nobody is starved. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..ids import PeerId

MAX_WAITING = 32  # requests; more would only wait for their deadline
MAX_A_PEER = 4  # of these
FAIR_TURN = 4  # each fourth place goes to whoever has waited longest, however little it has done


@dataclass(frozen=True, eq=False)
class Ticket:
    """A request that waits. rank: the work that its entry node did for those whom this node owes."""

    peer: PeerId
    rank: int
    since: float


def next_of(waiting: Sequence[Ticket], turn: int) -> Ticket:
    """Who gets place number `turn`. waiting: not empty."""
    if turn % FAIR_TURN == 0:
        return min(waiting, key=lambda ticket: ticket.since)
    return max(waiting, key=lambda ticket: (ticket.rank, -ticket.since))


def turned_away(waiting: Sequence[Ticket], newest: Ticket) -> Ticket | None:
    """Who has to go so that `newest`, which is among them, may wait too; None when there is room for all."""
    if Counter(ticket.peer for ticket in waiting)[newest.peer] > MAX_A_PEER:
        return newest
    if len(waiting) <= MAX_WAITING:
        return None
    return min(waiting, key=lambda ticket: (ticket.rank, -ticket.since))
