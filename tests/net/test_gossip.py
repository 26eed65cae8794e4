"""Ledgers of real networks: what one knows, all know, whoever was away meanwhile."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import trio

from meshnode.errors import MeshError
from meshnode.ids import PeerId
from meshnode.ledger.store import Ledger, open_ledger
from meshnode.net import Network, gossip
from meshnode.net.gossip import Gossip
from meshnode.net.links import Links
from meshnode.wire.accounts import Batch, Taken
from meshnode.wire.messages import Signed
from tests.ledger.sessions import MESH, key_of, play

from .helpers import mesh, until

NOW = int(time.time())


@dataclass
class Member:
    network: Network
    links: Links
    ledger: Ledger
    gossip: Gossip


def statements(count: int, begin: int = 0) -> list[Signed]:
    """Of so many sessions, two each."""
    said = []
    for number in range(begin, begin + count):
        said += play([key_of(5)], key_of(6), session=number.to_bytes(16, "big"), now=NOW).statements()
    return said


@asynccontextmanager
async def members(size: int) -> AsyncIterator[list[Member]]:
    async with mesh(size) as networks, trio.open_nursery() as nursery:
        found = []
        for network in networks:
            links = Links(network, nursery)
            links.start()
            ledger = open_ledger(":memory:")

            def others(network: Network = network) -> Sequence[PeerId]:
                return [PeerId(info.peer) for info in network.connected()]

            found.append(Member(network, links, ledger, Gossip(links, others, ledger, MESH)))
            nursery.start_soon(found[-1].gossip.run)
        await trio.testing.wait_all_tasks_blocked()
        yield found
        nursery.cancel_scope.cancel()


async def test_what_is_told_to_one_is_known_to_all_at_once() -> None:
    async with members(5) as all_:
        said = statements(20)
        all_[1].gossip.tell(said)
        await until(lambda: all(len(m.ledger) == len(said) for m in all_), within=4.0)


async def test_who_was_away_pulls_what_it_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossip, "FANOUT", 0)  # nothing is pushed
    async with members(3) as all_:
        all_[0].gossip.tell(statements(200))
        all_[1].gossip.tell(statements(30, begin=1000))
        await until(lambda: len(all_[0].ledger) == 400 and len(all_[1].ledger) == 60)
        joined = all_[2]
        assert await joined.gossip.pull(PeerId(all_[0].network.peer)) == 400
        assert await joined.gossip.pull(PeerId(all_[0].network.peer)) == 0
        assert await joined.gossip.pull(PeerId(all_[1].network.peer)) == 60
        await until(lambda: len(joined.ledger) == 460)


async def test_a_newcomer_pulls_as_soon_as_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossip, "FANOUT", 0)
    async with members(2) as (one, other):
        one.gossip.tell(statements(5))
        await until(lambda: len(one.ledger) == 10)
        other.gossip.joined(one.network.peer)
        await until(lambda: len(other.ledger) == 10, within=2.0)


async def test_what_does_not_hold_is_refused_and_kept_by_nobody() -> None:
    async with members(2) as (one, other):
        [receipt, acceptance] = statements(1)
        forged = Signed(receipt.signer, receipt.raw, acceptance.signature)
        peer = PeerId(other.network.peer)
        for bad in (
            forged,
            Signed(key_of(9).peer, receipt.raw, receipt.signature),
            Signed(receipt.signer, b"x", bytes(64)),
        ):
            with pytest.raises(MeshError) as refused:
                await one.links.request(peer, Batch((acceptance, bad)), Taken, timeout=2)
            assert refused.value.code in ("bad_signature", "bad_frame")
        assert len(other.ledger) == 0
        assert (await one.links.request(peer, Batch((receipt, acceptance)), Taken, timeout=2)).new == 2
        assert (await one.links.request(peer, Batch((receipt, acceptance)), Taken, timeout=2)).new == 0


async def test_a_member_pushes_only_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossip, "BURST", 10.0)
    async with members(2) as (one, other):
        batch = Batch(tuple(statements(4)))
        peer = PeerId(other.network.peer)
        await one.links.request(peer, batch, Taken, timeout=2)
        with pytest.raises(MeshError, match="more statements"):
            await one.links.request(peer, batch, Taken, timeout=2)


async def test_a_ledger_that_cannot_be_written_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossip, "RETRY_S", 0.05)
    async with members(2) as (one, other):
        one.ledger._db.execute("PRAGMA query_only = 1")
        one.gossip.tell(statements(3))
        await until(lambda: one.gossip.fault is not None)
        assert len(other.ledger) == 0  # what is not written down is not told
        one.ledger._db.execute("PRAGMA query_only = 0")
        await until(lambda: len(one.ledger) == len(other.ledger) == 6)
        assert one.gossip.fault is None
