"""What a stranger makes of receipts, whatever is missing or made up."""

import dataclasses
import itertools
import random

import pytest

from meshnode.errors import MeshError
from meshnode.ledger import chain
from meshnode.ledger.chain import DISPUTED, INCOMPLETE, VERIFIED, Chain
from meshnode.ledger.rules import Filed
from meshnode.wire import statements
from meshnode.wire.accounts import Acceptance, Receipt
from meshnode.wire.messages import Signed

from . import vectors
from .sessions import MESH, D, Session, key_of, play

ENTRY, OTHER = key_of(1), key_of(99)
KEYS = [key_of(n) for n in (2, 3, 4)]


def judge(*signed: Signed) -> list[Chain]:
    read = [(chain.read(one, MESH), one) for one in signed]
    receipts = [Filed(statement, one) for statement, one in read if isinstance(statement, Receipt)]
    return chain.chains(receipts, [s for s, _ in read if isinstance(s, Acceptance)])


@pytest.fixture(scope="module")
def session() -> Session:
    return play(KEYS, ENTRY, prompt=5000, tokens=3)


def test_a_whole_chain_is_verified_in_any_order(session: Session) -> None:
    signed = session.statements()
    random.Random(1).shuffle(signed)
    [whole] = judge(*signed, *signed[:2])
    assert (whole.verdict, whole.entry, len(whole.hops)) == (VERIFIED, ENTRY.peer, 3)


def test_whatever_is_missing_is_said_and_disputes_nothing(session: Session) -> None:
    signed = session.statements()
    for left_out in itertools.chain(
        itertools.combinations(range(len(signed)), 1), itertools.combinations(range(len(signed)), 3)
    ):
        rest = [one for index, one in enumerate(signed) if index not in left_out]
        for part in judge(*rest):
            assert part.verdict == INCOMPLETE, left_out
            assert all("missing" in fault.say for fault in part.faults)


def test_who_is_at_odds_is_named(session: Session) -> None:
    """The middle claims that other bytes went out: that is between it and the tail."""
    middle = session.receipts[1]
    links = tuple(dataclasses.replace(k, root=D) if k.direction == "out" else k for k in middle[0].links)
    receipts = session.receipts
    first = dataclasses.replace(middle[0], links=links)
    second = dataclasses.replace(middle[1], previous=statements.digest(statements.sign(KEYS[1], MESH, first)))
    receipts[1] = [first, second]
    accepted = [statements.sign(session.entry, MESH, acceptance) for acceptance in session.accepted()]
    [found] = judge(*session.signed(receipts), *accepted)
    assert found.verdict == DISPUTED
    assert {KEYS[1].peer, KEYS[2].peer} in [set(fault.by) for fault in found.faults]
    assert KEYS[0].peer not in {peer for fault in found.faults for peer in fault.by}


def test_two_receipts_of_one_segment_are_their_signers_fault(session: Session) -> None:
    twice = dataclasses.replace(session.receipts[2][0], compute=12345)
    [found] = judge(*session.statements(), statements.sign(KEYS[2], MESH, twice))
    assert [fault.by for fault in found.faults] == [(KEYS[2].peer,)]


@pytest.mark.parametrize("field", ["node", "predecessor", "hop"])
def test_a_strangers_receipt_for_a_session_harms_it_nothing(session: Session, field: str) -> None:
    """Everyone sees a session's tag, and can sign what names it."""
    foreign = play([OTHER, OTHER, OTHER], ENTRY, prompt=5000, tokens=3, salt="foreign")
    for hop in foreign.signed():
        found = judge(*session.statements(), hop)
        assert [c.verdict for c in found if c.hops[0][0].receipt.node == KEYS[0].peer] == [VERIFIED]


def test_an_entry_node_that_countersigns_twice_is_named(session: Session) -> None:
    acceptance = dataclasses.replace(session.accepted()[0], tokens=77)
    [found] = judge(*session.statements(), statements.sign(ENTRY, MESH, acceptance))
    assert [fault.by for fault in found.faults] == [(ENTRY.peer,)]


def test_another_entry_nodes_word_counts_nothing(session: Session) -> None:
    """Only the head's predecessor can countersign."""
    foreign = [dataclasses.replace(acceptance, entry=OTHER.peer) for acceptance in session.accepted()]
    signed = [statements.sign(OTHER, MESH, acceptance) for acceptance in foreign]
    [found] = judge(*session.signed(), *signed)
    assert found.verdict == INCOMPLETE
    assert all("countersignature" in fault.say for fault in found.faults)


def test_epochs_of_one_session_are_of_one_model() -> None:
    first = play(KEYS[:2], ENTRY)
    contract = dataclasses.replace(first.grant.contract, artifact="sha256:" + "1" * 64)
    later = play(KEYS[:2], ENTRY, epoch=2, contract=contract)
    verdicts = [found.verdict for found in judge(*first.statements(), *later.statements())]
    assert sorted(verdicts) == [DISPUTED, VERIFIED]
    verdicts = [found.verdict for found in judge(*first.statements(), *play(KEYS[:2], ENTRY, epoch=2).statements())]
    assert verdicts == [VERIFIED, VERIFIED]


def test_mutated_chains_are_never_verified_as_something_else() -> None:
    """10,000 statements with a changed byte each: those that can still be read are refused for their signature."""
    draw = random.Random(7)
    signed = play(KEYS[:2], ENTRY).statements()
    read = 0
    for _ in range(10_000):
        one = draw.choice(signed)
        parts = [bytearray(one.signer.encode()), bytearray(one.raw), bytearray(one.signature)]
        part = draw.choice(parts)
        part[draw.randrange(len(part))] ^= 1 << draw.randrange(7)
        try:
            chain.read(Signed(parts[0].decode(), bytes(parts[1]), bytes(parts[2])), MESH)  # type: ignore[arg-type]
            read += 1
        except MeshError:
            pass
    assert read == 0


def test_the_vectors_are_current() -> None:
    assert vectors.main(["--check"]) == 0, vectors.COMMAND
    said = {case["case"]: case["chains"] for case in vectors.vectors()["chains"]}
    assert [c["verdict"] for c in said["whole"]] == [VERIFIED]
    assert {c["verdict"] for c in said["no receipt of the middle"]} == {INCOMPLETE}
    assert [c["verdict"] for c in said["two receipts of one segment"]] == [DISPUTED]
