"""What it takes to do a session's work again, kept for auditors where its entry node consented."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import trio

from ..errors import MeshError
from ..ledger.account import LinkLog, Written, blind
from ..wire.audits import MAX_LEAVES, MAX_PART, MAX_POSITIONS, AuditCase, AuditPart, AuditRows, Leaf
from ..wire.messages import Sampling
from .retained import Retained

KEPT_S = 600.0  # after a session's end: an auditor has heard of its receipts within seconds
MAX_EXHIBITS = 64  # sessions; the oldest goes
ID_BYTES = 4  # a token's


@dataclass
class Exhibit:
    """One session at one hop. Its rows are in a file without a name, which is gone with it.

    outputs: kept under fast numerics alone, where bits need not be the same.
    """

    width: int  # bytes of a residual's row
    inputs: Retained
    outputs: Retained | None
    ids_in: bool  # of a head: what comes in are ids
    sampling: Sampling | None = None  # of a tail
    prompt: tuple[int, ...] = ()
    positions: int = 0
    spoilt: bool = False  # more positions came than an auditor would compute, or in another order
    ends: float = float("inf")
    receipts: dict[bytes, Written] = field(default_factory=dict)

    def came(self, first: int, count: int, rows: bytes) -> None:
        if first != self.positions or first + count > MAX_POSITIONS:
            self.spoilt = True
        if not self.spoilt:
            self.inputs.add(first, rows)
            self.positions = first + count

    def went(self, first: int, rows: bytes) -> None:
        if self.outputs is not None and not self.spoilt:
            self.outputs.add(first, rows)

    def shows(self, links: Sequence[LinkLog]) -> bool:
        """Whether the work of a segment with these links can be done again from this."""
        return not (
            self.spoilt or any(log.replay for log in links) or sum(len(log.leaves) for log in links) > MAX_LEAVES
        )

    def case(self, digest: bytes) -> AuditCase:
        written = self.receipts[digest]
        return AuditCase(
            positions=self.positions,
            width_in=ID_BYTES if self.ids_in else self.width,
            width_out=self.width if self.outputs is not None else 0,
            leaves=tuple(
                Leaf(log.kind, log.direction, *leaf, blind(written.session, log.kind, leaf[0]))
                for log in written.links
                for leaf in log.leaves
            ),
            sampling=self.sampling,
            prompt=self.prompt,
        )

    def part(self, ask: AuditRows) -> AuditPart:
        kept = self.inputs if ask.direction == "in" else self.outputs
        if kept is None or ask.first + ask.count > self.positions:
            raise MeshError("cache_miss", "such rows are not kept")
        width = ID_BYTES if self.ids_in and ask.direction == "in" else self.width
        return AuditPart(kept.read(ask.first, min(ask.count, MAX_PART // width)))

    def close(self) -> None:
        self.inputs.close()
        if self.outputs is not None:
            self.outputs.close()


class Exhibits:
    """Those of one node."""

    def __init__(self) -> None:
        self._open: OrderedDict[int, Exhibit] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def keep(self, exhibit: Exhibit) -> Exhibit:
        self._open[id(exhibit)] = exhibit
        while len(self._open) > MAX_EXHIBITS:
            self._open.popitem(last=False)[1].close()
        return exhibit

    def ended(self, exhibit: Exhibit) -> None:
        exhibit.ends = trio.current_time() + KEPT_S

    def find(self, receipt: bytes) -> Exhibit:
        """MeshError cache_miss when it is not kept, or no longer."""
        for exhibit in self._open.values():
            if receipt in exhibit.receipts:
                return exhibit
        raise MeshError("cache_miss", "what that receipt is about is not kept here")

    def expire(self) -> None:
        now = trio.current_time()
        for key in [key for key, exhibit in self._open.items() if exhibit.ends <= now]:
            self._open.pop(key).close()

    def close(self) -> None:
        for exhibit in self._open.values():
            exhibit.close()
        self._open.clear()
