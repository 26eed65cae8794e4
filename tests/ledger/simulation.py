"""Fifty nodes that ask each other for work, some of which lie, while nodes go and come.

python -m tests.ledger.simulation [--seeds N] [--sessions N]       prints figures, and a line of JSON at the end

Time passes in rounds of a tenth of a gossip period. Sessions, receipts, ledgers' indices, the choice of what is
audited, what lowers a peer, and what ranks a request are the product's; links and workers are not: a lie is a receipt
whose bytes no honest worker would have given. Signatures are left out here: they would be most of the time, and have
tests of their own.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass, field

from meshnode.errors import MeshError
from meshnode.ids import PeerId
from meshnode.keys import NodeKey
from meshnode.ledger import audit, balance
from meshnode.ledger.chain import DISPUTED, chains, read
from meshnode.ledger.index import Index
from meshnode.ledger.receipts import acceptances
from meshnode.ledger.rules import Filed
from meshnode.net.gossip import FANOUT
from meshnode.route.turns import Ticket, next_of
from meshnode.wire import schema
from meshnode.wire.accounts import Acceptance, Finding, Receipt
from meshnode.wire.messages import Signed

from .sessions import MESH, NOW, D, play

NODES, ROUNDS_A_PERIOD, HOPS = 50, 10, 3
LIARS = 0.05
AWAY = 0.002  # a node's chance to go away in a round
BACK = 0.05  # and to come back
LOST = 0.1  # of the batches that are pushed


@dataclass
class Peer:
    """rounds: when it is there again. fresh: what it has not passed on yet."""

    key: NodeKey
    lies: bool
    sampler: audit.Sampler
    peer: PeerId = PeerId("")
    away: bool = False
    index: Index = field(default_factory=Index)
    fresh: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.peer = self.key.peer


@dataclass
class Figures:
    sessions: int = 0
    caught_after: list[int] = field(default_factory=list)  # hops that each liar had done when it was found first
    never_caught: int = 0  # liars that did more than 39 hops and were not found
    honest_lowered: int = 0
    honest_disputed: int = 0
    periods_until_equal: float = 0.0
    farm_rank: int = 0  # of any of twenty identities that serve each other


class Mesh:
    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        liars = set(self.draw.sample(range(NODES), max(1, round(NODES * LIARS))))
        self.peers = [
            Peer(NodeKey(self.draw.randbytes(32)), number in liars, audit.Sampler(random.Random(seed * 1000 + number)))
            for number in range(NODES)
        ]
        self.auditor = self.peers[next(n for n in range(NODES) if n not in liars)]  # whose view is measured
        self.statements: dict[bytes, Receipt | Acceptance] = {}
        self.lies: set[bytes] = set()  # digests of receipts for work that was not done
        self.findings: list[Finding] = []
        self.hops: dict[PeerId, int] = {}
        self.figures = Figures()

    # -- what nodes do

    def session(self) -> None:
        there = [peer for peer in self.peers if not peer.away]
        low = audit.lowered(self.findings, {self.auditor.peer})
        entry = self.draw.choice(there)
        holders = [peer for peer in there if peer.peer not in low]
        hops = self.draw.sample(holders if len(holders) >= HOPS else there, HOPS)
        tag = self.draw.randbytes(16)
        made = play([hop.key for hop in hops], entry.key, session=tag, prompt=4, tokens=3)
        rows = [Filed(r, Signed(r.node, schema.encode(r), bytes(64))) for [r] in made.receipts]
        for hop, filed in zip(hops, rows, strict=True):
            self.hops[hop.peer] = self.hops.get(hop.peer, 0) + 1
            if hop.lies:
                self.lies.add(filed.digest)
            self._keep(hop, filed.digest, filed.receipt)
        [accepted] = acceptances([rows], made.grant, made.seen, NOW)
        self._keep(entry, Filed(accepted, Signed(entry.peer, schema.encode(accepted), bytes(64))).digest, accepted)  # type: ignore[arg-type]
        self.figures.sessions += 1

    def _keep(self, peer: Peer, digest: bytes, statement: Receipt | Acceptance | None = None) -> None:
        if statement is not None:
            self.statements[digest] = statement
        if digest in peer.index:
            return
        peer.index.add(digest)
        peer.fresh.append(digest)
        kept = self.statements[digest]
        if peer is self.auditor and isinstance(kept, Receipt) and kept.node != peer.peer:
            self._audit(peer, digest, kept)

    def _audit(self, auditor: Peer, digest: bytes, receipt: Receipt) -> None:
        if not auditor.sampler.is_due(receipt.node):
            return
        verdict = "differs" if digest in self.lies else "agrees"
        caught = {finding.node for finding in self.findings if finding.verdict == "differs"}
        if verdict == "differs" and receipt.node not in caught:
            known = [s for d, s in self.statements.items() if d in auditor.index and isinstance(s, Receipt)]
            self.figures.caught_after.append(sum(s.node == receipt.node for s in known))
        ended = NOW + len(self.findings)
        self.findings.append(Finding(digest, receipt.node, auditor.peer, verdict, 0, D, D, ended))

    # -- how statements travel

    def push(self) -> None:
        for peer in self.peers:
            fresh, peer.fresh = peer.fresh, []
            others = [other for other in self.peers if other is not peer and not other.away]
            if peer.away or not fresh:
                continue
            for other in self.draw.sample(others, min(FANOUT, len(others))):
                if self.draw.random() >= LOST:
                    for digest in fresh:
                        self._keep(other, digest)

    def pull(self, peer: Peer) -> None:
        others = [other for other in self.peers if other is not peer and not other.away]
        if peer.away or not others:
            return
        other = self.draw.choice(others)
        for bucket in peer.index.differing(other.index.marks()):
            for digest in peer.index.missing(other.index.bucket(bucket)):
                self._keep(peer, digest)

    def churn(self) -> None:
        for peer in self.peers:
            if peer is not self.auditor:
                peer.away = self.draw.random() >= BACK if peer.away else self.draw.random() < AWAY

    def round(self, number: int) -> None:
        self.push()
        for index, peer in enumerate(self.peers):
            if index % ROUNDS_A_PERIOD == number % ROUNDS_A_PERIOD:
                self.pull(peer)

    # -- the whole

    def run(self, sessions: int, a_round: int = 5) -> Figures:
        number = 0
        while self.figures.sessions < sessions:
            for _ in range(a_round):
                self.session()
            self.churn()
            self.round(number)
            number += 1
        for peer in self.peers:
            peer.away = False
        quiet = 0
        while len({peer.index.marks() for peer in self.peers}) > 1:
            self.round(number + quiet)
            quiet += 1
        self.figures.periods_until_equal = quiet / ROUNDS_A_PERIOD
        self._judge()
        return self.figures

    def _judge(self) -> None:
        honest = {peer.peer for peer in self.peers if not peer.lies}
        low = audit.lowered(self.findings, {self.auditor.peer})
        self.figures.honest_lowered = len(honest & low)
        caught = {f.node for f in self.findings if f.verdict == "differs"}
        liars = [peer for peer in self.peers if peer.lies]
        self.figures.never_caught = sum(p.peer not in caught and self.hops.get(p.peer, 0) >= 40 for p in liars)
        some = list(self.statements.items())[:2000]
        filed = [Filed(s, Signed(s.node, schema.encode(s), bytes(64))) for _, s in some if isinstance(s, Receipt)]
        found = chains(filed, [s for _, s in some if isinstance(s, Acceptance)])
        self.figures.honest_disputed = sum(chain.verdict == DISPUTED for chain in found)
        self.figures.farm_rank = self._farm(balance.credits(found))

    def _farm(self, credits: list[balance.Credit]) -> int:
        """Twenty identities of one person serve each other a thousand times what anybody did here."""
        farm = [PeerId(f"farm-{n}") for n in range(20)]
        minted = [
            balance.Credit(farm[n], farm[(n + 1) % 20], bytes([n]) * 32, 1000 * max(c.amount for c in credits))
            for n in range(20)
        ]
        ranks = balance.standing([*credits, *minted], {self.auditor.peer})
        newcomer = Ticket(PeerId("newcomer"), 0, 0.0)
        waiting = [newcomer, *(Ticket(peer, ranks.get(peer, 0), 1.0 + n) for n, peer in enumerate(farm))]
        assert next_of(waiting, 1) is newcomer  # of equals, who came first
        return max(ranks.get(peer, 0) for peer in farm)


def mutated(count: int, seed: int = 0) -> int:
    """How many of so many statements with one changed bit were taken for sound."""
    draw, accepted = random.Random(seed), 0
    keys = [NodeKey(draw.randbytes(32)) for _ in range(4)]
    signed = [s for n in range(20) for s in play(keys[1:], keys[0], session=bytes([n]) * 16).statements()]
    for _ in range(count):
        one = draw.choice(signed)
        parts = [bytearray(one.signer.encode()), bytearray(one.raw), bytearray(one.signature)]
        part = draw.choice(parts)
        part[draw.randrange(len(part))] ^= 1 << draw.randrange(8)
        try:
            read(Signed(PeerId(parts[0].decode(errors="replace")), bytes(parts[1]), bytes(parts[2])), MESH)
            accepted += 1
        except MeshError:
            pass
    return accepted


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--mutations", type=int, default=100_000)
    given = parser.parse_args()
    every = []
    for seed in range(given.seeds):
        figures = Mesh(seed).run(given.sessions)
        every.append(figures)
        print(f"seed {seed}: {figures}")
    print(
        json.dumps(
            {
                "sessions": sum(f.sessions for f in every),
                "liars_caught": sum(len(f.caught_after) for f in every),
                "caught_within": max(max(f.caught_after, default=0) for f in every),
                "never_caught": sum(f.never_caught for f in every),
                "honest_excluded": sum(f.honest_lowered for f in every),
                "honest_disputed": sum(f.honest_disputed for f in every),
                "periods_until_equal": max(f.periods_until_equal for f in every),
                "farm_rank": max(f.farm_rank for f in every),
                "mutated": given.mutations,
                "mutated_accepted": mutated(given.mutations),
            }
        )
    )


if __name__ == "__main__":
    main()
