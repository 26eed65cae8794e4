"""Which offers are asked, and which routes an entry node believes."""

import dataclasses

import pytest

from meshnode.errors import MeshError
from meshnode.ids import Layers, SessionId
from meshnode.keys import NodeKey
from meshnode.route import choose, cost, explain
from meshnode.route.choose import Heard
from meshnode.route.verify import check_route
from meshnode.wire import statements
from meshnode.wire.messages import Contract, Failed, Grant, Lease, Offer

KEYS = [NodeKey(bytes([n]) * 32) for n in range(4)]
ENTRY = NodeKey(b"e" * 32)
CONTRACT = Contract("sha256:" + "0" * 64, 1, "llama", "f32", "invariant", 30, 576)  # type: ignore[arg-type]
D = b"d" * 32


def heard(
    node: int, begin: int, end: int, *, free: int = 1, cost: int = 100, rtt: float = 0.0, **changes: object
) -> Heard:
    offer = Offer(
        b"n" * 16, KEYS[node].peer, "m", CONTRACT, Layers(begin, end), D, D, 64, 4, free, ((begin, cost),), (), True
    )
    return Heard(dataclasses.replace(offer, **changes), rtt)  # type: ignore[arg-type]


def reason(h: Heard, **overrides: object) -> str:
    asked: dict[str, object] = {"begin": 5, "contract": CONTRACT, "context": 10, "excluded": ()} | overrides
    return choose.judge(h, **asked).reason or ""  # type: ignore[arg-type]


def test_reasons_are_named() -> None:
    assert reason(heard(0, 0, 10)) == ""
    assert "layer 5 is needed" in reason(heard(0, 6, 10))
    assert reason(heard(0, 0, 10, free=0)).startswith("busy")
    assert reason(heard(0, 0, 10), context=65).startswith("context_exceeded")
    assert "excluded" in reason(heard(0, 0, 10), excluded=(KEYS[0].peer,))
    other = dataclasses.replace(CONTRACT, numerics="fast")
    assert reason(heard(0, 0, 10), contract=other) == "contract_mismatch: numerics"


def test_the_least_cost_from_here_to_the_tail_comes_first() -> None:
    offers = [heard(0, 0, 10), heard(1, 0, 20, cost=900), heard(2, 0, 20, cost=500), heard(3, 0, 30, free=0, cost=1)]
    ranked = choose.rank(choose.judge(h, 0, CONTRACT, 1, ()) for h in offers)
    assert [h.offer.node for h in ranked] == [
        KEYS[0].peer,
        KEYS[2].peer,
        KEYS[1].peer,
        KEYS[3].peer,
    ]  # who is full comes last
    near, far = heard(0, 0, 10, rtt=0.001), heard(1, 0, 10, rtt=0.1)
    assert choose.rank([choose.judge(h, 0, CONTRACT, 1, ()) for h in (far, near)])[0] is near
    silent, belied = dataclasses.replace(near, blamed=True), dataclasses.replace(near, factor=10_000.0)
    for worse in (silent, belied):
        assert choose.rank([choose.judge(h, 0, CONTRACT, 1, ()) for h in (worse, far)])[0] is far


def on_the_way(begin: int, end: int, *offers: Heard, layer_us: int = 100, **options: object) -> list[tuple[str, int]]:
    stand = choose.Stand(KEYS[0].peer, Layers(begin, end), layer_us / 1e6)
    found, _ = choose.ways(offers, stand, CONTRACT, **options)  # type: ignore[arg-type]
    return [(way.heard.offer.node if way.heard else "", way.cut) for way in found]


def falling(node: int, begin: int, end: int, layer_us: int, **changes: object) -> Heard:
    """An offer of a node that takes so long for each of its layers, and states nothing beyond them."""
    pairs = tuple((layer, layer_us * (end - layer)) for layer in range(begin, end))
    return heard(node, begin, end, **({"pairs": pairs} | changes))  # type: ignore[arg-type]


def test_a_hop_hands_over_where_another_goes_on_for_less() -> None:
    fast, slow = falling(1, 10, 30, 10), falling(2, 10, 30, 900)
    assert on_the_way(0, 20, fast) == [(KEYS[1].peer, 10)]  # as soon as may be
    assert on_the_way(0, 20, slow) == [(KEYS[2].peer, 20)]  # as late as may be
    assert on_the_way(0, 20, slow, fast) == [(KEYS[1].peer, 10), (KEYS[2].peer, 20)]
    assert on_the_way(0, 9, fast) == []
    assert on_the_way(15, 20, fast) == [(KEYS[1].peer, 16)]  # never nothing for itself


def test_a_hop_that_reaches_the_end_is_the_tail_unless_another_is_worth_the_way() -> None:
    assert on_the_way(0, 30, falling(1, 10, 30, 100)) == [("", 30), (KEYS[1].peer, 29)]
    assert on_the_way(0, 30, falling(1, 10, 30, 1))[0] == (KEYS[1].peer, 10)
    many = [falling(1, 10, 30, 1, name=str(n)) for n in range(9)]
    found, _ = choose.ways(many, choose.Stand(KEYS[0].peer, Layers(0, 30), 1e-4), CONTRACT)
    assert [way.heard is None for way in choose.shortlist(found)] == [False] * choose.ATTEMPTS_A_HOP + [True]


def test_what_was_tried_is_not_tried_again() -> None:
    fast = falling(1, 10, 30, 10)
    assert on_the_way(0, 20, fast, failed={(KEYS[1].peer, 10)}) == [(KEYS[1].peer, 11)]
    assert on_the_way(0, 20, fast, failed={(KEYS[1].peer, cut) for cut in range(30)}) == []
    assert on_the_way(0, 20, falling(0, 0, 20, 10)) == []  # itself
    tried = [Failed(KEYS[1].peer, 10, "busy", "long"), Failed(KEYS[2].peer, 10, "unreachable")]
    assert choose.passed_on(tried) == (Failed(KEYS[1].peer, 10, "busy"),)


def test_what_a_hop_states_is_what_the_best_way_costs_it() -> None:
    stand = choose.Stand(KEYS[0].peer, Layers(0, 20), 1e-4)
    tail, slow = falling(1, 15, 30, 10, rtt=0.002), falling(2, 19, 30, 10, rtt=0.004)
    stated = dict(choose.pairs([tail, slow], stand, CONTRACT))
    assert stated[0] == 15 * 100 + 15 * 10 + 1500  # its own layers, the tail's, and the way: 1 ms and the handover
    assert stated[19] == 100 + 10 * 10 + 1500
    assert len(stated) == 16
    assert choose.pairs([], stand, CONTRACT) == ()
    assert dict(choose.pairs([], choose.Stand(KEYS[0].peer, Layers(10, 30), 1e-4), CONTRACT))[10] == 2000


def test_costs_between_two_that_are_stated_are_in_proportion() -> None:
    pairs = ((10, 1000), (14, 200), (15, 5000))
    assert [round(cost.at(pairs, layer) * 1e6) for layer in (10, 11, 12, 14, 15)] == [1000, 800, 600, 200, 5000]
    assert cost.at(pairs, 9) == cost.at(pairs, 16) == cost.at((), 0) == cost.UNKNOWN_S
    assert cost.entries(Layers(3, 6)) == [3, 4, 5]
    spread = cost.entries(Layers(0, 100))
    assert (spread[0], spread[-1], len(spread)) == (0, 99, 16)
    for wrong in (((9, 1),), ((12, 1), (11, 1)), ((10, 1), (10, 1)), ((20, 1),), ((10, 1), (1 << 52, 1))):
        with pytest.raises(MeshError):
            cost.check(wrong, Layers(10, 20))


def test_every_candidate_is_explained() -> None:
    other = dataclasses.replace(CONTRACT, numerics="fast")
    offers = [
        falling(0, 0, 10, 100, pairs=tuple((n, 9000 - 100 * n) for n in range(10))),
        falling(1, 10, 30, 100), falling(2, 10, 30, 200), falling(3, 10, 30, 1, free=0),
        heard(3, 0, 30, contract=other),
    ]  # fmt: skip
    hops, candidates = explain.route(offers, CONTRACT)
    assert [(hop.heard, hop.effective) for hop in hops] == [(offers[0], Layers(0, 10)), (offers[1], Layers(10, 30))]
    said = {(offers.index(c.heard), c.layer): c for c in candidates}
    assert [key for key, c in said.items() if c.taken] == [(0, 0), (1, 10)]
    assert "2.00 ms a token more" in said[2, 10].reason
    assert said[3, 10].reason.startswith("busy")
    assert said[4, 10].reason == "contract_mismatch: numerics"
    assert all(c.step for c in candidates if not c.taken)


GRANT = Grant(SessionId(b"s" * 16), 1, ENTRY.peer, CONTRACT, 60)


def lease(hop: int, effective: Layers, before: str, after: str) -> Lease:
    return Lease(
        bytes([hop]) * 8, GRANT.session, 1, hop, KEYS[hop].peer, before, after, effective, effective,  # type: ignore[arg-type]
        statements.contract_digest(CONTRACT), D, D, 64, 1000, (),
    )  # fmt: skip


def route(change_at: int = -1, **changes: object) -> list[Lease]:
    peers = [key.peer for key in KEYS]
    cuts = [Layers(0, 10), Layers(10, 29), Layers(29, 30)]
    before, after = [ENTRY.peer, *peers[:2]], [peers[1], peers[2], peers[0]]
    leases = [lease(hop, cuts[hop], before[hop], after[hop]) for hop in range(3)]
    return [dataclasses.replace(made, **changes) if made.hop == change_at else made for made in leases]  # type: ignore[arg-type]


def check(leases: list[Lease], **options: object) -> list[Lease]:
    signed = [statements.sign(KEYS[index], "mesh", made) for index, made in enumerate(leases)]
    return check_route(signed, GRANT, "mesh", KEYS[0].peer, **options)  # type: ignore[arg-type]


def test_a_sound_route_is_believed() -> None:
    assert check(route()) == route()


@pytest.mark.parametrize(
    "changes",
    [
        {"session": b"t" * 16},
        {"epoch": 2},
        {"hop": 2},
        {"node": KEYS[3].peer},
        {"predecessor": KEYS[3].peer},
        {"successor": KEYS[3].peer},
        {"effective": Layers(11, 29)},
        {"effective": Layers(9, 29), "holding": Layers(9, 29)},
        {"effective": Layers(10, 28)},
        {"holding": Layers(12, 29)},
        {"contract": D},
        {"context": 59},
    ],
)
def test_a_changed_lease_is_not(changes: dict[str, object]) -> None:
    with pytest.raises(MeshError) as refused:
        check(route(1, **changes))
    assert refused.value.code == "bad_lease"


def test_a_route_that_lacks_its_end_or_has_an_excluded_node_is_not() -> None:
    for leases, options in ((route()[:2], {}), (route(), {"excluded": (KEYS[1].peer,)})):
        with pytest.raises(MeshError) as refused:
            check(leases, **options)
        assert refused.value.code == "bad_lease"
