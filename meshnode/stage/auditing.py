"""Doing another's work again, on a holding of the same recipe and fingerprint, and saying what came of it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence

import numpy as np
import trio

from ..errors import MeshError
from ..ids import PeerId, SessionId
from ..ledger import merkle
from ..ledger.audit import AGREES, DIFFERS, WITHHELD, first_difference, first_far, tolerance
from ..ledger.rules import is_head, is_tail
from ..net.links import Links
from ..route.lease import Event
from ..wire import activation
from ..wire.accounts import LinkSide, Receipt
from ..wire.audits import MAX_PART, MAX_POSITIONS, AuditCase, AuditPart, AuditQuery, AuditRows, Leaf
from ..worker import Sampling
from .holding import Holding
from .sampling import sampling_of

ASK_S = 10.0  # for the audited node to answer
WITHIN_S = 120.0  # the whole of one audit


class Auditor:
    """Audits with the holdings of one node."""

    def __init__(self, links: Links, holdings: Sequence[Holding], own: PeerId) -> None:
        self._links = links
        self._holdings = holdings
        self._own = own

    def holding_for(self, receipt: Receipt) -> Holding | None:
        """One that gives the very numbers that the audited hop must have given; none for tokens of fast numerics, where
        a near tie may fall either way."""
        if receipt.contract.numerics == "fast" and is_tail(receipt):
            return None
        for holding in self._holdings:
            equal = (holding.recipe, holding.fingerprint) == (receipt.recipe, receipt.fingerprint)
            if equal and holding.contract == receipt.contract and holding.layers.holds(receipt.effective):
                return holding
        return None

    async def audit(self, receipt: Receipt, digest: bytes) -> tuple[str, int]:
        """(verdict, position): agrees and how many positions were compared, or differs and where first; or withheld.

        MeshError unreachable, deadline or busy when it could not be done; not_available when it never can.
        """
        holding = self.holding_for(receipt)
        if holding is None:
            raise MeshError("not_available", "no holding here gives the very numbers of that receipt")
        if not receipt.open:
            raise MeshError("not_available", "nobody consented to an audit of that session")
        with trio.move_on_after(WITHIN_S):
            try:
                case = await self._links.request(receipt.node, AuditQuery(digest), AuditCase, timeout=ASK_S)
                _check_case(receipt, case)
                came = await self._rows(receipt, digest, "in", case.width_in, case.positions)
            except MeshError as error:
                if error.code in ("unreachable", "deadline", "busy", "not_member"):
                    raise
                return WITHHELD, 0
            return await self._compare(receipt, digest, case, came, holding)
        raise MeshError("deadline", f"the audit took more than {WITHIN_S:.0f} s")

    async def _rows(self, receipt: Receipt, digest: bytes, way: str, width: int, count: int) -> bytes:
        rows = bytearray()
        while len(rows) < count * width:
            first = len(rows) // width
            ask = AuditRows(digest, way, first, min(count - first, MAX_PART // width))
            part = await self._links.request(receipt.node, ask, AuditPart, timeout=ASK_S)
            if not part.rows or len(part.rows) % width:
                raise MeshError("bad_frame", "rows of another width")
            rows += part.rows
        if len(rows) != count * width:
            raise MeshError("bad_frame", "more rows than were asked for")
        return bytes(rows)

    async def _compare(
        self, receipt: Receipt, digest: bytes, case: AuditCase, came: bytes, holding: Holding
    ) -> tuple[str, int]:
        where = first_difference(_leaves(case, "in", "prompt", "residual", "ring"), came, case.width_in)
        if where is not None:
            return WITHHELD, where  # these are not the bytes that it signed for
        made = await self._again(receipt, case, came, holding)
        compared = receipt.first + receipt.positions
        if is_tail(receipt):
            where = first_difference(_leaves(case, "out", "answer"), made, 4, begin=len(case.prompt))
        elif receipt.contract.numerics == "invariant":
            where = first_difference(
                _leaves(case, "out", "residual"),
                made,
                case.width_in if not is_head(receipt) else 4 * receipt.contract.n_embd,
            )
        else:
            said = await self._rows(receipt, digest, "out", case.width_out, case.positions)
            where = first_difference(_leaves(case, "out", "residual"), said, case.width_out)
            if where is not None:
                return WITHHELD, where
            where = first_far(_matrix(said, receipt), _matrix(made, receipt), tolerance(len(receipt.effective)))
        return (AGREES, compared) if where is None else (DIFFERS, where)

    async def _again(self, receipt: Receipt, case: AuditCase, came: bytes, holding: Holding) -> bytes:
        """The rows, or at a tail the ids, that come out. It takes a session's place for as long."""
        key = (self._own, SessionId(secrets.token_bytes(16)), receipt.effective.begin)
        handle = int.from_bytes(secrets.token_bytes(8), "big")
        holding.book.reserve(key, 1, trio.current_time(), within=WITHIN_S)
        worker, tail = holding.worker, is_tail(receipt)
        try:
            sampling = sampling_of(case.sampling) if tail and case.sampling is not None else Sampling()
            await worker.open(handle, sampling, case.prompt if tail else ())
            made = bytearray()
            for first, count in _steps(case, worker.loaded.max_step, tail=tail):
                rows = memoryview(came)[first * case.width_in : (first + count) * case.width_in]
                stepped = await worker.step(
                    handle,
                    first,
                    (receipt.effective.begin, receipt.effective.end),
                    tokens=activation.read_tokens(rows) if is_head(receipt) else None,
                    residual=None if is_head(receipt) else rows,
                    sample=tail and first + count >= len(case.prompt),
                )
                if not tail:
                    made += stepped.residual
                elif stepped.sampled is not None:
                    made += activation.tokens_payload((stepped.sampled.token,))
            return bytes(made)
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + ASK_S):
                try:
                    await worker.close(handle)
                finally:
                    holding.book.apply(key, 1, Event.CLOSE, trio.current_time())


def _steps(case: AuditCase, most: int, *, tail: bool) -> Iterator[tuple[int, int]]:
    """As few as there can be: but a tail samples after the prompt, and after each position from there on."""
    at = 0
    while at < case.positions:
        limit = len(case.prompt) if tail and at < len(case.prompt) else case.positions
        count = 1 if tail and at >= len(case.prompt) else min(most, limit - at)
        yield at, count
        at += count


def _check_case(receipt: Receipt, case: AuditCase) -> None:
    """MeshError bad_frame unless this opens what the receipt's signer has signed."""
    if not receipt.first + receipt.positions <= case.positions <= MAX_POSITIONS:
        raise MeshError("bad_frame", "other positions than the receipt's")
    if is_tail(receipt) != (case.sampling is not None):
        raise MeshError("bad_frame", "only a tail samples")
    width = 4 if is_head(receipt) else 4 * receipt.contract.n_embd
    if case.width_in != width or case.width_out not in (0, 4 * receipt.contract.n_embd):
        raise MeshError("bad_frame", "rows of another width")
    for link in receipt.links:
        if not _opens(link, case.leaves):
            raise MeshError("bad_frame", f"the leaves of the {link.kind} are not those that were signed")


def _opens(link: LinkSide, leaves: Sequence[Leaf]) -> bool:
    hashes = [
        merkle.leaf(leaf.blind, leaf.first, leaf.count, leaf.digest)
        for leaf in leaves
        if (leaf.kind, leaf.direction) == (link.kind, link.direction)
    ]
    return merkle.root(hashes) == link.root


def _leaves(case: AuditCase, way: str, *kinds: str) -> list[tuple[int, int, bytes]]:
    return [(x.first, x.count, x.digest) for x in case.leaves if x.direction == way and x.kind in kinds]


def _matrix(rows: bytes, receipt: Receipt) -> np.ndarray:
    return np.frombuffer(rows, "<f4").reshape(-1, receipt.contract.n_embd)
