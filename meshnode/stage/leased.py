"""The holdings of a node and the hops that run on them: one table for those who lease, and those who pass on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import trio

from .. import logs
from ..errors import MeshError
from ..ids import PeerId, SessionId
from ..keys import NodeKey
from ..ledger.account import Written
from ..route.lease import Event
from ..wire import statements
from ..wire.messages import Signed
from .exhibits import Exhibit, Exhibits
from .holding import Holding
from .hop import Hop

log = logging.getLogger(__name__)


class Leased:
    """hops: by lease id. on_receipt: called with each receipt, signed, and with what opens its leaves."""

    def __init__(self, key: NodeKey, mesh_id: str) -> None:
        self.holdings: list[Holding] = []
        self.hops: dict[bytes, Hop] = {}
        self.on_receipt: list[Callable[[Signed, Written], None]] = []
        self.exhibits = Exhibits()
        self._by_lease: dict[bytes, Holding] = {}
        self._key = key
        self._mesh_id = mesh_id

    def holding_of(self, hop: Hop) -> Holding:
        return self._by_lease[hop.lease.lease]

    def of(self, entry: PeerId, session: SessionId) -> list[Hop]:
        """The hops of a session."""
        return [hop for hop in self.hops.values() if hop.key[:2] == (entry, session)]

    def on(self, holding: Holding) -> list[Hop]:
        return [hop for hop in self.hops.values() if self.holding_of(hop) is holding]

    def add(self, hop: Hop, holding: Holding) -> None:
        """Signs a new hop in, whose place is reserved."""
        holding.book.apply(hop.key, hop.lease.epoch, Event.SIGN, trio.current_time())
        self._put(hop, holding)

    def replace(self, before: Hop, hop: Hop) -> None:
        """The same session in a later epoch. MeshError stale_epoch when another has replaced it meanwhile."""
        if self.hops.get(before.lease.lease) is not before:
            raise MeshError("stale_epoch", "the session has ended here, or gone on, while its route was opened")
        holding = self.holding_of(before)
        holding.book.advance(hop.key, before.lease.epoch, hop.lease.epoch, trio.current_time())
        del self.hops[before.lease.lease], self._by_lease[before.lease.lease]
        before.confirmed(hop.place)
        self.write(before.account.end(int(time.time())), before.kept.exhibit)
        self._put(hop, holding)

    def _put(self, hop: Hop, holding: Holding) -> None:
        self.hops[hop.lease.lease] = hop
        self._by_lease[hop.lease.lease] = holding
        lease = hop.lease
        said = "leased layers %s as hop %d of epoch %d"
        log.info(said, lease.effective, lease.hop, lease.epoch, extra=logs.of(lease.session))

    async def end(self, hop: Hop, event: Event, *, worker_ends: bool = False) -> None:
        """Stops a hop; its place is free only once the worker has let go of the session."""
        if self.hops.pop(hop.lease.lease, None) is None:
            return
        holding = self._by_lease.pop(hop.lease.lease)
        try:
            await hop.stop(worker_ends=worker_ends)
        finally:
            self.write(hop.account.end(int(time.time())), hop.kept.exhibit)
            if hop.kept.exhibit is not None:
                self.exhibits.ended(hop.kept.exhibit)
            holding.book.apply(hop.key, hop.lease.epoch, event, trio.current_time())
            of = logs.of(hop.lease.session)
            log.info("hop %d ends: %s, %d positions", hop.lease.hop, event.value, hop.computed, extra=of)

    def write(self, written: Sequence[Written], exhibit: Exhibit | None) -> None:
        """Signs receipts, and hands them on with what opens their leaves. exhibit: what shows their work."""
        for one in written:
            signed = statements.sign(self._key, self._mesh_id, one.receipt)
            if exhibit is not None and one.receipt.open:
                exhibit.receipts[statements.digest(signed)] = one
            for take in self.on_receipt:
                take(signed, one)
