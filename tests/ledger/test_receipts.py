"""Receipts that agree are accepted; one changed field anywhere is not."""

import dataclasses
import hashlib

import pytest

from meshnode.errors import MeshError
from meshnode.ids import Layers, SessionId
from meshnode.keys import NodeKey
from meshnode.ledger import merkle
from meshnode.ledger.receipts import Account, LinkLog, Seen, check_receipts
from meshnode.wire import statements
from meshnode.wire.messages import Contract, Grant, Lease, LinkSide, Receipt

HEAD, TAIL, ENTRY = (NodeKey(bytes([n]) * 32) for n in range(3))
CONTRACT = Contract("sha256:" + "0" * 64, 1, "llama", "f32", "invariant", 2, 4)  # type: ignore[arg-type]
D = b"d" * 32
GRANT = Grant(SessionId(b"s" * 16), 1, ENTRY.peer, CONTRACT, 60)


def digest(n: int) -> bytes:
    return hashlib.sha256(bytes([n])).digest()


def make(same_node: bool = False) -> tuple[list[Receipt], list[Lease], list[NodeKey], list[LinkLog]]:
    """A prompt of 3, two tokens sampled: one in the ring, both to the entry node."""
    tail_key = HEAD if same_node else TAIL
    keys = [HEAD, tail_key]
    leases = [
        Lease(
            bytes([hop]) * 8, SessionId(b"s" * 16), 1, hop, keys[hop].peer, [ENTRY, HEAD][hop].peer, keys[1 - hop].peer,
            Layers(hop, hop + 1), Layers(hop, hop + 1), D, D, D, 64, 1000, (),
        )
        for hop in range(2)
    ]  # fmt: skip
    head, tail = (Account(lease, CONTRACT) for lease in leases)
    sent, got = LinkLog(HEAD.peer, "out", "prompt"), LinkLog(tail_key.peer, "in", "answer")
    for log in (sent, head.link(ENTRY.peer, "in", "prompt")):
        log.add(0, 3, digest(1))
    for log in (head.link(tail_key.peer, "in", "ring"), tail.link(HEAD.peer, "out", "ring")):
        log.add(3, 1, digest(2))
    for log in (head.link(tail_key.peer, "out", "residual"), tail.link(HEAD.peer, "in", "residual")):
        log.add(0, 3, digest(3))
        log.add(3, 1, digest(4))
    for log in (tail.link(ENTRY.peer, "out", "answer"), got):
        log.add(3, 1, digest(2))
        log.add(4, 1, digest(5))
    for account in (head, tail):
        account.step(0, 3, 100)
        account.step(3, 1, 50)
    return [head.receipt(final=True), tail.receipt(final=True)], leases, keys, [sent, got]


def check(receipts: list[Receipt], leases: list[Lease], keys: list[NodeKey], own: list[LinkLog]) -> None:
    signed = [statements.sign(key, "mesh", receipt) for key, receipt in zip(keys, receipts, strict=True)]
    check_receipts(signed, leases, GRANT, Seen(own[0], own[1], cut=True), "mesh")


@pytest.mark.parametrize("same_node", [False, True])
def test_agreeing_receipts_are_accepted(same_node: bool) -> None:
    check(*make(same_node))


@pytest.mark.parametrize("name", ["work", "session", "epoch", "hop", "segment", "node", "predecessor", "successor",
                                  "holding", "effective", "contract", "recipe", "fingerprint"])  # fmt: skip
def test_a_changed_name_is_refused(name: str) -> None:
    receipts, leases, keys, own = make()
    value = getattr(receipts[1], name)
    changed = {
        bytes: lambda v: b"x" * len(v),
        int: lambda v: v + 1,
        str: lambda v: NodeKey(b"z" * 32).peer,
        Layers: lambda v: Layers(v.begin, v.end + 1),
        Contract: lambda v: dataclasses.replace(v, numerics="fast"),
    }[type(value)](value)
    receipts[1] = dataclasses.replace(receipts[1], **{name: changed})
    with pytest.raises(MeshError) as refused:
        check(receipts, leases, keys, own)
    assert refused.value.code in ("bad_receipt", "bad_signature")


@pytest.mark.parametrize(
    "change", [{"positions": 9}, {"leaves": 1}, {"root": D}, {"direction": "in"}, {"kind": "ring"}]
)
@pytest.mark.parametrize("hop", [0, 1])
def test_a_link_of_which_one_side_differs_is_refused(hop: int, change: dict[str, object]) -> None:
    receipts, leases, keys, own = make()
    for index, link in enumerate(receipts[hop].links):
        if all(getattr(link, key) == value for key, value in change.items()):
            continue
        links = list(receipts[hop].links)
        links[index] = dataclasses.replace(link, **change)  # type: ignore[arg-type]
        with pytest.raises(MeshError, match=r"do not agree|does not have|other positions|other steps|other tokens"):
            check([dataclasses.replace(r, links=tuple(links)) if i == hop else r for i, r in enumerate(receipts)],
                  leases, keys, own)  # fmt: skip


def test_what_the_entry_node_saw_counts() -> None:
    receipts, leases, keys, own = make()
    own[1].add(5, 1, digest(9))
    with pytest.raises(MeshError, match="answer"):
        check(receipts, leases, keys, own)


@pytest.mark.parametrize(
    "change",
    [{"positions": 10**12}, {"steps": 10**12}, {"first": 1}, {"final": False}, {"previous": D}, {"links": ()}],
)
@pytest.mark.parametrize("hop", [0, 1])
def test_a_claim_that_does_not_follow_from_the_links_is_refused(hop: int, change: dict[str, object]) -> None:
    receipts, leases, keys, own = make()
    receipts[hop] = dataclasses.replace(receipts[hop], **change)  # type: ignore[arg-type]
    with pytest.raises(MeshError) as refused:
        check(receipts, leases, keys, own)
    assert refused.value.code == "bad_receipt"


def test_a_link_with_oneself_as_both_ends_is_refused() -> None:
    receipts, leases, keys, own = make()
    both = tuple(LinkSide(TAIL.peer, way, "residual", 10**9, 7, D) for way in ("in", "out"))
    receipts[1] = dataclasses.replace(receipts[1], links=receipts[1].links + both, positions=4 + 10**9, steps=2 + 7)
    with pytest.raises(MeshError, match="links that its place does not have"):
        check(receipts, leases, keys, own)


def test_a_tail_that_tells_the_head_something_else_is_refused() -> None:
    receipts, leases, keys, own = make()
    told = LinkLog(TAIL.peer, "in", "ring")
    told.add(3, 1, digest(77))
    for hop, (peer, direction) in enumerate(((TAIL.peer, "in"), (HEAD.peer, "out"))):
        lie = dataclasses.replace(told.side(), peer=peer, direction=direction)
        links = tuple(lie if link.kind == "ring" else link for link in receipts[hop].links)
        receipts[hop] = dataclasses.replace(receipts[hop], links=links)
    with pytest.raises(MeshError, match="other tokens"):
        check(receipts, leases, keys, own)


def test_a_missing_receipt_is_refused() -> None:
    receipts, leases, keys, own = make()
    with pytest.raises(MeshError):
        check(receipts[:1], leases, keys[:1], own)


def test_roots_depend_on_every_leaf_and_their_order() -> None:
    leaves = [merkle.leaf(n, 1, digest(n)) for n in range(7)]
    roots = {merkle.root(leaves[:n]) for n in range(8)} | {merkle.root(leaves[::-1])}
    assert len(roots) == 9
    assert merkle.root([]) == hashlib.sha256().digest()
    left = hashlib.sha256(b"\x01" + leaves[0] + leaves[1]).digest()
    assert merkle.root(leaves[:3]) == hashlib.sha256(b"\x01" + left + leaves[2]).digest()
