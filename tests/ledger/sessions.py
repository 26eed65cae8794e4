"""Sessions by heart: what an honest route would sign, so that it can be bent."""

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from meshnode.ids import Layers, SessionId
from meshnode.keys import NodeKey
from meshnode.ledger.account import Account, Cutter, Written, tag_of
from meshnode.ledger.receipts import Seen, Settled, acceptances, settle
from meshnode.ledger.rules import Filed
from meshnode.wire import statements
from meshnode.wire.accounts import Acceptance, Receipt
from meshnode.wire.messages import Contract, Grant, Lease, Signed

MESH = "mesh"
D = b"d" * 32
CONTRACT = Contract("sha256:" + "0" * 64, 1, "llama", "f32", "invariant", 6, 4)  # type: ignore[arg-type]
NOW = 1_800_000_000


def digest(*what: object) -> bytes:
    return hashlib.sha256(repr(what).encode()).digest()


def key_of(number: int) -> NodeKey:
    return NodeKey(number.to_bytes(32, "big"))


@dataclass
class Session:
    """One epoch that went well. keys: of the hops, the head's first."""

    entry: NodeKey
    keys: list[NodeKey]
    grant: Grant
    leases: list[Lease]
    accounts: list[Account]
    seen: Seen
    now: int

    @property
    def written(self) -> list[list[Written]]:
        return [account.written for account in self.accounts]

    @property
    def receipts(self) -> list[list[Receipt]]:
        return [[written.receipt for written in account.written] for account in self.accounts]

    def signed(self, receipts: Sequence[Sequence[Receipt]] | None = None) -> list[Signed]:
        hops = zip(self.keys, receipts or self.receipts, strict=True)
        return [statements.sign(key, MESH, receipt) for key, hop in hops for receipt in hop]

    def settle(self, receipts: Sequence[Sequence[Receipt]] | None = None) -> Settled:
        return settle(self.signed(receipts), self.leases, self.grant, self.seen, MESH)

    def check(self, receipts: Sequence[Sequence[Receipt]] | None = None) -> list[list[Filed]]:
        settled = self.settle(receipts)
        for fault in settled.faults:
            raise fault
        return settled.rows

    def accepted(self, receipts: Sequence[Sequence[Receipt]] | None = None) -> list[Acceptance]:
        return acceptances(self.settle(receipts).rows, self.grant, self.seen, self.now)

    def statements(self) -> list[Signed]:
        return self.signed() + [statements.sign(self.entry, MESH, acceptance) for acceptance in self.accepted()]


def play(
    keys: Sequence[NodeKey],
    entry: NodeKey,
    *,
    session: bytes = b"s" * 16,
    epoch: int = 1,
    prompt: int = 3,
    chunk: int = 256,
    tokens: int = 2,
    pace_s: float = 0.0,
    contract: Contract = CONTRACT,
    salt: object = "",
    now: int = NOW,
) -> Session:
    """An epoch in which nothing goes wrong: `prompt` positions in, `tokens` out, `pace_s` seconds a step."""
    n, named = len(keys), SessionId(session)
    borders = [round(i * contract.n_layer / n) for i in range(n + 1)]
    ranges = [Layers(a, b) for a, b in itertools.pairwise(borders)]
    peers = [key.peer for key in keys]
    leases = [
        Lease(
            bytes([hop]) * 8, named, epoch, hop, peers[hop], peers[hop - 1] if hop else entry.peer,
            peers[(hop + 1) % n], ranges[hop], ranges[hop], D, D, D, 1 << 16, 1000, (),
        )
        for hop in range(n)
    ]  # fmt: skip
    grant = Grant(named, epoch, entry.peer, contract, 1 << 16)
    accounts = [Account(lease, contract) for lease in leases]
    seen = Seen(named, peers[0], peers[-1], cut=True)
    cutter, clock = Cutter(n), 0.0

    def through(segment: int, first: int, count: int) -> None:
        nonlocal clock
        clock += pace_s
        for hop, account in enumerate(accounts):
            account.end_before(segment, now)
            account.step(segment, first, count, 100)
            if hop + 1 < n:
                bits = digest(salt, "rows", hop, first)
                account.link(segment, peers[hop + 1], "out", "residual").add(first, count, bits)
                accounts[hop + 1].link(segment, peers[hop], "in", "residual").add(first, count, bits)

    for first in range(0, prompt, chunk):
        count = min(chunk, prompt - first)
        segment = cutter.due(count, clock)
        cutter.count(segment, count, clock)
        seen.pushed(segment, first, count, digest(salt, "ids", first))
        accounts[0].link(segment, entry.peer, "in", "prompt").add(first, count, digest(salt, "ids", first))
        through(segment, first, count)
    for number in range(tokens):
        at, last = prompt + number, number == tokens - 1
        segment = cutter.segment if last else cutter.due(1, clock)
        bits = digest(salt, "token", at)
        accounts[-1].link(segment, entry.peer, "out", "answer").add(at, 1, bits)
        seen.took(segment, at, 1, bits)
        if not last:
            accounts[-1].link(segment, peers[0], "out", "ring").add(at, 1, bits)
            accounts[0].link(segment, peers[-1], "in", "ring").add(at, 1, bits)
            cutter.count(segment, 1, clock)
            through(segment, at, 1)
    for account in accounts:
        account.end(now)
    assert all(account.written[-1].receipt.tag == tag_of(named) for account in accounts)
    return Session(entry, list(keys), grant, leases, accounts, seen, now)
