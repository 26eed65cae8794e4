"""Which work is done again by another, what is compared, and what follows from a difference. Pure."""

from __future__ import annotations

import hashlib
import math
import random
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..ids import PeerId
from ..wire.accounts import Finding

AGREES, DIFFERS, WITHHELD = "agrees", "differs", "withheld"
EVERY = 20  # hops of a peer, of which one is audited
CLEARED_BY = 3  # audits in a row that agree, after one that did not
WITHHELD_TWICE = 2  # in a row: once can be a disk that is full
TOLERANCE = 0.02  # of a row's length, for one layer, under fast numerics; docs/receipts.md says where it is from


@dataclass
class Sampler:
    """Picks one hop, at random, of each EVERY that a peer has done.

    One after the other they come as blocks, and each block has its pick: who lies always is met after 2 * EVERY - 1 at
    the latest, wherever in a block it began to.
    """

    draw: random.Random
    _seen: dict[PeerId, tuple[int, int]] = field(default_factory=dict)  # hops of the block so far, the one to audit

    def is_due(self, peer: PeerId) -> bool:
        """Counts one more hop of a peer; whether it is the one to audit."""
        count, pick = self._seen.get(peer, (0, self.draw.randrange(EVERY)))
        due = count == pick
        self._seen[peer] = (count + 1, pick) if count + 1 < EVERY else (0, self.draw.randrange(EVERY))
        return due


Leaf = tuple[int, int, bytes]  # first, count, digest


def first_difference(said: Sequence[Leaf], rows: bytes, width: int, begin: int = 0) -> int | None:
    """The first position of the first leaf whose bytes are others in `rows`; None when all are the same.

    rows: positions from `begin` on, `width` bytes each. Under invariant numerics the very bits are the same.
    """
    for first, count, digest in said:
        part = rows[(first - begin) * width : (first - begin + count) * width]
        if len(part) != count * width or hashlib.sha256(part).digest() != digest:
            return first
    return None


def lowered(findings: Iterable[Finding], trusted: Collection[PeerId]) -> set[PeerId]:
    """The peers that come last in routing: an auditor that is trusted found a difference, and since then fewer than
    CLEARED_BY that none was there. What others say excludes nobody: they may be the liars."""
    agreed: dict[PeerId, int] = defaultdict(int)
    withheld: dict[PeerId, int] = defaultdict(int)
    low: set[PeerId] = set()
    for finding in sorted((f for f in findings if f.auditor in trusted), key=lambda f: f.ended):
        withheld[finding.node] = withheld[finding.node] + 1 if finding.verdict == WITHHELD else 0
        if finding.verdict == DIFFERS or withheld[finding.node] >= WITHHELD_TWICE:
            low.add(finding.node)
            agreed[finding.node] = 0
        elif finding.verdict == AGREES and finding.node in low:
            agreed[finding.node] += 1
            if agreed[finding.node] >= CLEARED_BY:
                low.discard(finding.node)
    return low


def tolerance(layers: int) -> float:
    """Roundings of one layer have nothing to do with the next one's: they add as the root of their number."""
    return TOLERANCE * math.sqrt(layers)


def first_far(said: np.ndarray, made: np.ndarray, tolerance: float) -> int | None:
    """The first row, both [n, width] f32, whose distance is more than `tolerance` of its length."""
    length = np.linalg.norm(made.astype(np.float64), axis=1)
    far = np.linalg.norm(said.astype(np.float64) - made, axis=1) > tolerance * length
    return int(far.argmax()) if far.any() else None
