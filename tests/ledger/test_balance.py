"""Work counts when two sides of a link say so; what strangers sign each other ranks nobody."""

import dataclasses

import pytest

from meshnode.ids import PeerId
from meshnode.ledger import balance
from meshnode.ledger.balance import Credit
from meshnode.ledger.chain import chains
from meshnode.ledger.rules import Filed
from meshnode.wire import statements

from .sessions import MESH, D, Session, key_of, play

ENTRY, KEYS = key_of(1), [key_of(2), key_of(3), key_of(4)]


def credits_of(session: Session, without: tuple[int, ...] = (), accepted: bool = True) -> dict[PeerId, Credit]:
    receipts = [
        Filed(receipt, statements.sign(key, MESH, receipt))
        for hop, key in enumerate(session.keys)
        for receipt in session.receipts[hop]
        if hop not in without
    ]
    found = balance.credits(chains(receipts, session.accepted() if accepted else []))
    return {credit.node: credit for credit in found}


def test_each_hop_serves_and_the_entry_node_uses() -> None:
    session = play(KEYS, ENTRY, prompt=10, tokens=6)
    every = balance.balances(credits_of(session).values())
    assert {peer: b.served for peer, b in every.items()} == {key.peer: 15 * 2 for key in KEYS} | {ENTRY.peer: 0}
    assert every[ENTRY.peer].used == 15 * 6


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_a_dead_hop_costs_its_neighbours_nothing(dead: int) -> None:
    """The entry node countersigns what it has; its own sides of the links speak for those beside it."""
    session = play(KEYS, ENTRY, prompt=10, tokens=6)
    receipts = [[] if hop == dead else session.receipts[hop] for hop in range(3)]
    settled = session.settle(receipts)
    assert "no receipt" in str(settled.faults[0])
    found = {c.node: c for c in balance.credits(chains(settled.rows[0], session.accepted(receipts)))}
    assert {peer: c.amount for peer, c in found.items()} == {k.peer: 15 * 2 for k in KEYS if k is not KEYS[dead]}
    assert {c.entry for c in found.values()} == {ENTRY.peer}


def test_a_claim_that_the_other_end_does_not_share_is_worth_nothing() -> None:
    session = play(KEYS[:2], ENTRY)
    [old] = session.receipts[1]
    links = tuple(dataclasses.replace(link, root=D) for link in old.links)
    lie = dataclasses.replace(old, links=links)
    receipts = [
        Filed(r, statements.sign(k, MESH, r)) for k, r in zip(KEYS, (session.receipts[0][0], lie), strict=False)
    ]
    assert {credit.node for credit in balance.credits(chains(receipts, session.accepted()))} == {KEYS[0].peer}


def test_one_work_is_counted_once() -> None:
    session = play(KEYS[:1], ENTRY, prompt=10, tokens=1)
    [receipt] = session.receipts[0]
    twice = [receipt, dataclasses.replace(receipt, compute=1)]
    receipts = [Filed(r, statements.sign(KEYS[0], MESH, r)) for r in twice]
    assert [credit.amount for credit in balance.credits(chains(receipts, session.accepted()))] == [10 * 6]


def test_work_for_oneself_is_neither_served_nor_used() -> None:
    session = play([ENTRY, KEYS[0]], ENTRY)
    every = balance.balances(credits_of(session).values())
    assert (every[KEYS[0].peer].served, every[ENTRY.peer].served) == (4 * 3, 0)
    assert every[ENTRY.peer].used == 4 * 3


def test_twenty_identities_that_serve_each_other_rank_nothing() -> None:
    ring = [key_of(100 + n) for n in range(20)]
    found = []
    for number, entry in enumerate(ring):
        servers = [ring[(number + 1) % 20], ring[(number + 2) % 20]]
        found += credits_of(play(servers, entry, session=bytes([number]) * 16, prompt=200)).values()
    assert balance.balances(found)[ring[3].peer].served > 1000
    found += credits_of(play(KEYS[:1], ENTRY, prompt=5)).values()
    assert balance.standing(found, {ENTRY.peer}) == {KEYS[0].peer: 6 * 6}


def test_who_did_not_ask_cannot_say_so() -> None:
    """A stranger's countersignature takes nothing from those whom a trusted node owes."""
    session = play(KEYS, ENTRY, prompt=10)
    foreign = [dataclasses.replace(a, entry=key_of(9).peer) for a in session.accepted()]
    receipts = session.check()[0]
    found = balance.credits(chains(receipts, foreign + session.accepted()))
    assert balance.standing(found, {ENTRY.peer}) == {key.peer: 11 * 2 for key in KEYS}
