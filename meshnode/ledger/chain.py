"""Chains: what the receipts of one epoch say together, as a stranger sees it who has them and the public keys. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .. import keys
from ..errors import MeshError
from ..ids import ArtifactId, PeerId
from ..wire import schema, statements
from ..wire.accounts import ACCOUNTS, Acceptance, Account, Receipt
from ..wire.messages import MAX_HOPS, Signed
from .rules import Fault, Filed, check_receipt, epoch_faults, is_head, is_tail

VERIFIED, INCOMPLETE, DISPUTED = "verified", "incomplete", "disputed"


def read(signed: Signed, mesh_id: str) -> Account:
    """The statement, sound by itself and signed by whom it is of. MeshError bad_receipt, bad_signature, bad_frame."""
    statement = schema.decode(signed.raw, *ACCOUNTS)
    assert isinstance(statement, ACCOUNTS)
    if signed.signer != signer_of(statement):
        raise MeshError("bad_signature", f"a {statements.domain(type(statement))} that another signed")
    keys.verify(signed.signer, statements.domain(type(statement)), mesh_id, signed.raw, signed.signature)
    if isinstance(statement, Receipt):
        check_receipt(statement)
    return statement


def digest(signed: Signed) -> bytes:
    return statements.digest(signed)


def signer_of(statement: Account) -> PeerId:
    if isinstance(statement, Receipt):
        return statement.node
    return statement.entry if isinstance(statement, Acceptance) else statement.auditor


@dataclass(frozen=True)
class Chain:
    """The receipts of one epoch. hops: each one's by segment, the head's first, as far as they are there."""

    tag: bytes
    epoch: int
    hops: tuple[tuple[Filed, ...], ...]
    accepted: tuple[Acceptance, ...]
    faults: tuple[Fault, ...]

    @property
    def verdict(self) -> str:
        if any(fault.by for fault in self.faults):
            return DISPUTED
        return INCOMPLETE if self.faults else VERIFIED

    @property
    def entry(self) -> PeerId | None:
        return _entry_of(self.hops)

    @property
    def artifact(self) -> ArtifactId:
        return self.hops[0][0].receipt.contract.artifact

    @property
    def ended(self) -> int:
        return max(filed.receipt.ended for hop in self.hops for filed in hop)


def chains(receipts: Iterable[Filed], acceptances: Iterable[Acceptance]) -> list[Chain]:
    """Every epoch that there are receipts of, in the order of their beginnings.

    Anybody can sign a receipt that names any session, so a chain is followed from hop to hop by the names that both of
    two neighbours give; what nobody of a chain names begins a chain of its own.
    """
    epochs: dict[tuple[bytes, int], list[Filed]] = defaultdict(list)
    for filed in {filed.digest: filed for filed in receipts}.values():
        epochs[filed.receipt.tag, filed.receipt.epoch].append(filed)
    countersigned: dict[tuple[bytes, int], list[Acceptance]] = defaultdict(list)
    for acceptance in dict.fromkeys(acceptances):
        countersigned[acceptance.tag, acceptance.epoch].append(acceptance)
    found = [chain for key, filed in epochs.items() for chain in _of_epoch(key, filed, countersigned[key])]
    found.sort(key=lambda chain: (chain.ended, chain.tag, chain.epoch))
    return _with_rising_epochs(found)


def _of_epoch(key: tuple[bytes, int], filed: Sequence[Filed], accepted: Sequence[Acceptance]) -> list[Chain]:
    by_place: dict[tuple[int, PeerId, PeerId], list[Filed]] = defaultdict(list)
    for one in filed:
        by_place[one.receipt.hop, one.receipt.node, one.receipt.predecessor].append(one)
    made = []
    while by_place:
        start = min(by_place)
        route = [start]
        while len(route) < MAX_HOPS:
            hop, node, _ = route[-1]
            last = by_place[route[-1]][0].receipt
            following = (hop + 1, last.successor, node)
            if is_tail(last) or following not in by_place:
                break
            route.append(following)
        hops = [sorted(by_place.pop(place), key=lambda f: (f.receipt.segment, f.digest)) for place in route]
        made.append(_judge(key, hops, accepted))
    return made


def _judge(key: tuple[bytes, int], hops: list[list[Filed]], accepted: Sequence[Acceptance]) -> Chain:
    faults = []
    for hop in hops:
        numbers = [filed.receipt.segment for filed in hop]
        if len(set(numbers)) != len(numbers):
            node = hop[0].receipt.node
            faults.append(Fault(f"{node} signed two receipts of one segment", (node,)))
    entry = _entry_of(hops)
    own = [a for a in accepted if a.entry == entry]
    by_segment = {a.segment: a for a in own}
    if len(by_segment) != len(own):
        faults.append(Fault(f"{own[0].entry} countersigned one segment twice", (own[0].entry,)))
    if not faults:
        faults = epoch_faults(hops, by_segment)
    return Chain(*key, tuple(map(tuple, hops)), tuple(own), tuple(faults))


def _entry_of(hops: Sequence[Sequence[Filed]]) -> PeerId | None:
    """Who asked: named by the head and by the tail; a chain without either does not know it."""
    first, last = hops[0][0].receipt, hops[-1][0].receipt
    if is_head(first):
        return first.predecessor
    return next((link.peer for link in last.links if is_tail(last) and link.kind == "answer"), None)


def _with_rising_epochs(found: list[Chain]) -> list[Chain]:
    """A session's epochs rise, and no route of it does another's work: one model, one entry node."""
    first: dict[bytes, Chain] = {}
    for chain in sorted(found, key=lambda chain: chain.epoch):
        before = first.setdefault(chain.tag, chain)
        if before.artifact != chain.artifact and before.entry == chain.entry and chain.entry is not None:
            fault = Fault(f"{chain.entry} names another model in epoch {chain.epoch}", (chain.entry,))
            found[found.index(chain)] = Chain(
                chain.tag, chain.epoch, chain.hops, chain.accepted, (*chain.faults, fault)
            )
    return found
