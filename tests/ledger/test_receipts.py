"""Receipts that agree are accepted; one changed field anywhere is not."""

import dataclasses
import hashlib
import random
from typing import Any

import pytest

from meshnode.errors import MeshError
from meshnode.ids import Layers
from meshnode.ledger import merkle
from meshnode.ledger.account import SEGMENT_POSITIONS, LinkLog, blind
from meshnode.ledger.chain import read
from meshnode.wire import statements
from meshnode.wire.accounts import LinkSide, Receipt
from meshnode.wire.messages import Contract, Signed

from .sessions import MESH, D, Session, digest, key_of, play

ENTRY, HEAD, TAIL = map(key_of, (1, 2, 3))
OTHER = key_of(9)


@pytest.fixture
def session() -> Session:
    return play([HEAD, TAIL], ENTRY)


@pytest.mark.parametrize("keys", [[HEAD], [HEAD, TAIL], [HEAD, HEAD], [HEAD, ENTRY, TAIL]])
def test_agreeing_receipts_are_accepted(keys: list[Any]) -> None:
    [row] = play(keys, ENTRY).check()
    assert len(row) == len(keys)


def test_a_long_session_has_segments_that_all_cut_alike() -> None:
    session = play([HEAD, TAIL, OTHER], ENTRY, prompt=9000, tokens=200, pace_s=1.0)
    rows = session.check()
    assert len(rows) > 3
    assert all(len({(f.receipt.first, f.receipt.positions) for f in row}) == 1 for row in rows)
    assert max(row[0].receipt.positions for row in rows) <= SEGMENT_POSITIONS
    assert sum(row[0].receipt.positions for row in rows) == 9000 + 199
    for hop in session.receipts:
        assert [receipt.final for receipt in hop] == [False] * (len(rows) - 1) + [True]
        assert hop[1].previous is not None


@pytest.mark.parametrize("hop", [0, 1])
@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Receipt)])
def test_a_changed_field_is_refused(session: Session, hop: int, field: str) -> None:
    """Also when its signer signs the change: what it says does not fit its lease, its place, or its neighbour."""
    receipts = session.receipts
    old = receipts[hop][0]
    if field in ("ended", "compute", "open"):
        return  # nobody else can know: these are the node's own word
    receipts[hop][0] = dataclasses.replace(old, **{field: changed(getattr(old, field))})
    with pytest.raises(MeshError) as refused:
        session.check(receipts)
    assert refused.value.code in ("bad_receipt", "bad_signature")


def changed(value: Any) -> Any:
    change: dict[type, Any] = {
        bytes: lambda: b"x" * len(value),
        int: lambda: value + 1,
        bool: lambda: not value,
        str: lambda: OTHER.peer,
        tuple: lambda: value[1:],
        type(None): lambda: D,
        Layers: lambda: Layers(value.begin, value.end + 1),
        Contract: lambda: dataclasses.replace(value, numerics="fast"),
    }
    return change[type(value)]()


@pytest.mark.parametrize("hop", [0, 1])
@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(LinkSide)])
def test_a_changed_field_of_any_link_is_refused(session: Session, hop: int, field: str) -> None:
    old = session.receipts[hop][0]
    for index, link in enumerate(old.links):
        wrong = {"direction": "in" if link.direction == "out" else "out", "kind": "ring", "peer": OTHER.peer}
        value = wrong.get(field) or changed(getattr(link, field))
        if value == getattr(link, field):
            continue
        links = (*old.links[:index], dataclasses.replace(link, **{field: value}), *old.links[index + 1 :])
        receipts = session.receipts
        receipts[hop][0] = dataclasses.replace(old, links=links)
        with pytest.raises(MeshError) as refused:
            session.check(receipts)
        assert refused.value.code == "bad_receipt"


def test_no_changed_byte_of_a_signed_statement_is_read(session: Session) -> None:
    for signed in session.statements():
        assert read(signed, MESH)
        for index in range(len(signed.raw)):
            raw = bytearray(signed.raw)
            raw[index] ^= 1 << random.Random(index).randrange(8)
            with pytest.raises(MeshError):
                read(Signed(signed.signer, bytes(raw), signed.signature), MESH)
        with pytest.raises(MeshError, match="signature"):
            read(Signed(OTHER.peer, signed.raw, signed.signature), MESH)
        with pytest.raises(MeshError):
            read(signed, "another mesh")
    with pytest.raises(MeshError, match="another signed"):
        read(statements.sign(OTHER, MESH, session.receipts[0][0]), MESH)


def test_what_the_entry_node_saw_counts(session: Session) -> None:
    session.seen.took(0, 5, 1, digest(9))
    with pytest.raises(MeshError, match="answer"):
        session.check()


def test_a_link_with_oneself_as_both_ends_is_refused(session: Session) -> None:
    receipts = session.receipts
    old = receipts[1][0]
    both = tuple(LinkSide(TAIL.peer, way, "residual", 10**9, 7, D) for way in ("in", "out"))
    receipts[1][0] = dataclasses.replace(
        old, links=old.links + both, positions=old.positions + 10**9, steps=old.steps + 7
    )
    with pytest.raises(MeshError, match="links that its place does not have"):
        session.check(receipts)


def test_a_tail_that_tells_the_head_something_else_is_refused(session: Session) -> None:
    told = LinkLog(TAIL.peer, "in", "ring")
    told.add(3, 1, digest(77))
    receipts = session.receipts
    for hop, (peer, direction) in enumerate(((TAIL.peer, "in"), (HEAD.peer, "out"))):
        lie = dataclasses.replace(told.side(session.grant.session), peer=peer, direction=direction)
        links = tuple(lie if link.kind == "ring" else link for link in receipts[hop][0].links)
        receipts[hop][0] = dataclasses.replace(receipts[hop][0], links=links)
    with pytest.raises(MeshError, match="other tokens"):
        session.check(receipts)


@pytest.mark.parametrize("hop", [0, 1])
def test_a_missing_receipt_or_segment_is_refused(hop: int) -> None:
    session = play([HEAD, TAIL], ENTRY, prompt=5000)
    assert len(session.check()) == 2
    for segment in range(2):
        receipts = session.receipts
        del receipts[hop][segment]
        with pytest.raises(MeshError, match=r"missing|no receipt"):
            session.check(receipts)


def test_roots_depend_on_every_leaf_and_their_order() -> None:
    leaves = [merkle.leaf(b"b" * 16, n, 1, digest(n)) for n in range(7)]
    roots = {merkle.root(leaves[:n]) for n in range(8)} | {merkle.root(leaves[::-1])}
    assert len(roots) == 9
    assert merkle.root([]) == hashlib.sha256().digest()
    left = hashlib.sha256(b"\x01" + leaves[0] + leaves[1]).digest()
    assert merkle.root(leaves[:3]) == hashlib.sha256(b"\x01" + left + leaves[2]).digest()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 13])
def test_a_single_leaf_can_be_shown_and_nothing_else_in_its_place(count: int) -> None:
    leaves = [merkle.leaf(b"b" * 16, n, 1, digest(n)) for n in range(count)]
    top = merkle.root(leaves)
    for index, leaf in enumerate(leaves):
        path = merkle.proof(leaves, index)
        assert merkle.is_under(top, leaf, index, count, path)
        assert not merkle.is_under(top, digest("other"), index, count, path)
        assert not merkle.is_under(D, leaf, index, count, path)
        assert not merkle.is_under(top, leaf, index, count, (*path, D))
        for other in range(-1, count + 1):
            assert merkle.is_under(top, leaf, other, count, path) == (other == index)


def test_one_token_cannot_be_guessed_from_what_strangers_see(session: Session) -> None:
    """A root over one leaf of a known position would else be a table of the vocabulary away from its token."""
    log = LinkLog(ENTRY.peer, "out", "answer")
    log.add(3, 1, digest("token"))
    assert log.side(session.grant.session).root != log.side(b"r" * 16).root  # type: ignore[arg-type]
    assert session.grant.session not in b"".join(signed.raw for signed in session.statements())
    blinds = {blind(session.grant.session, kind, first) for kind in ("ring", "answer") for first in range(9)}
    assert len(blinds) == 18
