"""What an auditor asks of a node whose receipt it doubts or has drawn, and gets."""

from __future__ import annotations

from dataclasses import dataclass

from .messages import DIGEST, POSITION, TOKENS, Sampling
from .schema import field, listing, message, nested, octets, uint, word

MAX_POSITIONS = 8192  # of a session, to be computed again
MAX_LEAVES = 8192  # of the links of one segment
MAX_PART = 1 << 19  # bytes of rows in one answer


@dataclass(frozen=True)
class Leaf:
    """One leaf of a side of a link, opened."""

    kind: str = field(1, word("prompt", "residual", "ring", "answer"))
    direction: str = field(2, word("in", "out"))
    first: int = field(3, POSITION)
    count: int = field(4, uint(4096))
    digest: bytes = field(5, DIGEST)
    blind: bytes = field(6, octets(16))


@message(27)
class AuditQuery:
    """Asks for what it takes to do a segment's work again."""

    receipt: bytes = field(2, DIGEST)


@message(28)
class AuditCase:
    """leaves: of the receipt's links. positions: those that came in, from the session's first on; width: bytes of one,
    on the way in, and on the way out where the rows of that are kept too."""

    positions: int = field(2, POSITION)
    width_in: int = field(4, uint(1 << 24))
    width_out: int = field(6, uint(1 << 24))
    leaves: tuple[Leaf, ...] = field(8, listing(nested(Leaf), MAX_LEAVES))
    sampling: Sampling | None = field(9, nested(Sampling), default=None)  # a tail's
    prompt: tuple[int, ...] = field(11, TOKENS, default=())  # likewise


@message(29)
class AuditRows:
    """Asks for rows of positions [first, first + count), as they came in or went out."""

    receipt: bytes = field(2, DIGEST)
    direction: str = field(4, word("in", "out"))
    first: int = field(6, POSITION)
    count: int = field(8, POSITION)


@message(30)
class AuditPart:
    """As many of them as one message holds, from the first on."""

    rows: bytes = field(2, octets(0, MAX_PART))


AUDIT_REQUESTS = (AuditQuery, AuditRows)
