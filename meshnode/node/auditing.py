"""Audits in the background: of what is heard of, one hop in twenty of each peer is done again, where it can be."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import trio
import trio.lowlevel

from ..errors import MeshError
from ..ids import PeerId
from ..keys import NodeKey
from ..ledger import views
from ..ledger.audit import DIFFERS, WITHHELD, Sampler, lowered
from ..ledger.store import Entry, Ledger
from ..net.gossip import Gossip
from ..stage.auditing import Auditor
from ..stage.exhibits import KEPT_S
from ..wire import statements
from ..wire.accounts import Finding, Receipt

log = logging.getLogger(__name__)

WAITING = 64  # receipts that were drawn and not audited yet; more are let go
REST_S = 1.0  # between two audits: people come first
STANDING_S = 10.0  # how old the ranks may be


class Auditing:
    """trusted: whose findings, and whose use of others' work, count here: this node, and whom its operator names."""

    def __init__(
        self, gossip: Gossip, auditor: Auditor, key: NodeKey, mesh_id: str, trusted: Collection[PeerId]
    ) -> None:
        self._gossip = gossip
        self._auditor = auditor
        self._key = key
        self._mesh_id = mesh_id
        self._trusted = frozenset((key.peer, *trusted))
        self._sampler = Sampler(random.Random())
        self._drawn, self._due = trio.open_memory_channel[Entry](WAITING)
        self._ranks: dict[PeerId, int] = {}
        self.lowered: set[PeerId] = set()
        self.on_lowered: list[Callable[[set[PeerId]], None]] = []

    def standing(self, peer: PeerId) -> int:
        """The work that a peer did for those whom this node owes."""
        return self._ranks.get(peer, 0)

    def heard(self, entries: Sequence[Entry]) -> None:
        """Draws from what is new."""
        for entry in entries:
            receipt = entry.statement
            if isinstance(receipt, Finding):
                continue
            if not isinstance(receipt, Receipt) or receipt.node == self._key.peer or not receipt.open:
                continue
            late = time.time() - receipt.ended > KEPT_S
            if not late and self._auditor.holding_for(receipt) is not None and self._sampler.is_due(receipt.node):
                try:
                    self._drawn.send_nowait(entry)
                except trio.WouldBlock:
                    log.info("a receipt that was drawn is not audited: too many wait")

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_ranking)
            await self._look()
            async for entry in self._due:
                try:
                    await self.audit(entry)
                except MeshError as error:
                    log.info("an audit: %s", error)
                await trio.sleep(REST_S)

    async def audit(self, entry: Entry) -> Finding:
        """Does a receipt's work again, and tells everybody what came of it. MeshError as of Auditor.audit."""
        receipt = entry.statement
        assert isinstance(receipt, Receipt)
        verdict, position = await self._auditor.audit(receipt, entry.digest)
        if verdict == DIFFERS:
            log.error("%s did not compute what it signed, from position %d on", receipt.node, position)
        holding = self._auditor.holding_for(receipt)
        recipe, print_ = (holding.recipe, holding.fingerprint) if holding else (receipt.recipe, receipt.fingerprint)
        finding = Finding(
            receipt=entry.digest,
            node=receipt.node,
            auditor=self._key.peer,
            verdict=verdict,
            position=position,
            recipe=recipe,
            fingerprint=print_,
            ended=int(time.time()),
        )
        self._gossip.tell([statements.sign(self._key, self._mesh_id, finding)])
        await trio.lowlevel.checkpoint()
        if verdict in (DIFFERS, WITHHELD) or receipt.node in self.lowered:
            await self._look([finding])
        return finding

    async def audit_named(self, prefix: str) -> list[dict[str, Any]]:
        """Every receipt of a session that can be audited here, named by the beginning of its id.

        MeshError unknown_receipt, or not_available when none can be.
        """
        found = await self._gossip.use(lambda ledger: _named(ledger, prefix))
        done, faults = [], []
        for entry in found:
            receipt = entry.statement
            assert isinstance(receipt, Receipt)
            if receipt.node == self._key.peer:
                continue
            try:
                done.append(views.finding(await self.audit(entry)))
            except MeshError as error:
                faults.append(error)
        if not done:
            raise faults[0] if faults else MeshError("not_available", "only this node computed there")
        return done

    async def _look(self, more: Sequence[Finding] = ()) -> None:
        """more: findings that the ledger may not have yet."""
        found = await self._gossip.use(lambda ledger: [*ledger.findings(), *more])
        self.lowered = lowered(dict.fromkeys(found), self._trusted)
        for tell in self.on_lowered:
            tell(self.lowered)

    async def _keep_ranking(self) -> None:
        size = -1
        while True:
            now = await self._gossip.use(len)
            if now != size:
                size = now
                self._ranks = await self._gossip.use(lambda ledger: ledger.standing(self._trusted))
            await trio.sleep(STANDING_S)


def _named(ledger: Ledger, prefix: str) -> list[Entry]:
    tag = bytes.fromhex(views.show(ledger, prefix)["id"])
    return [entry for entry in ledger.entries(kind="receipt", tag=tag) if isinstance(entry.statement, Receipt)]
