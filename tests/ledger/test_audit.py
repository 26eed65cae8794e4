import random

from meshnode.ids import PeerId
from meshnode.ledger.audit import CLEARED_BY, EVERY, Sampler, first_difference, lowered
from meshnode.wire.accounts import Finding

from .sessions import D, digest

LIAR, HONEST, OURS, STRANGER = map(PeerId, ("liar", "honest", "ours", "stranger"))


def finding(node: PeerId, verdict: str, ended: int, auditor: PeerId = OURS) -> Finding:
    return Finding(D, node, auditor, verdict, 0, D, D, ended)


def test_one_hop_of_each_twenty_and_never_later_than_the_39th() -> None:
    for seed in range(200):
        sampler = Sampler(random.Random(seed))
        start = random.Random(seed).randrange(100)
        due = [sampler.is_due(LIAR) for _ in range(start + 2 * EVERY)]
        assert any(due[start : start + 2 * EVERY - 1])
        assert all(sum(due[n : n + EVERY]) == 1 for n in range(0, len(due) - EVERY, EVERY))


def test_peers_are_counted_apart() -> None:
    sampler = Sampler(random.Random(1))
    both = [(sampler.is_due(LIAR), sampler.is_due(HONEST)) for _ in range(EVERY)]
    assert [sum(column) for column in zip(*both, strict=True)] == [1, 1]


def test_the_first_position_that_differs() -> None:
    import hashlib

    rows = bytes(range(40))
    said = [(5, 2, hashlib.sha256(rows[:8]).digest()), (7, 8, hashlib.sha256(rows[8:]).digest())]
    assert first_difference(said, rows, 4, begin=5) is None
    assert first_difference(said, rows[:-1] + b"x", 4, begin=5) == 7
    assert first_difference(said, rows[:-4], 4, begin=5) == 7
    assert first_difference([(5, 2, digest(1))], rows, 4, begin=5) == 5


def test_only_what_a_trusted_auditor_found_lowers_a_peer() -> None:
    assert lowered([finding(LIAR, "differs", 1)], {OURS}) == {LIAR}
    assert lowered([finding(HONEST, "differs", 1, STRANGER)], {OURS}) == set()


def test_it_is_cleared_by_audits_that_agree() -> None:
    found = [finding(LIAR, "agrees", 0), finding(LIAR, "differs", 1)]
    for number in range(CLEARED_BY):
        assert lowered(found, {OURS}) == {LIAR}
        found.append(finding(LIAR, "agrees", 2 + number))
    assert lowered(found, {OURS}) == set()
    found.append(finding(LIAR, "differs", 99))
    assert lowered(found, {OURS}) == {LIAR}
