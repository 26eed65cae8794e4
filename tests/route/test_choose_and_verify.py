"""Which offers are asked, and which routes an entry node believes."""

import dataclasses

import pytest

from meshnode.errors import MeshError
from meshnode.ids import Layers, SessionId
from meshnode.keys import NodeKey
from meshnode.route import choose
from meshnode.route.choose import Heard
from meshnode.route.verify import check_route
from meshnode.wire import statements
from meshnode.wire.messages import Contract, Grant, Lease, Offer

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


def test_the_farthest_reach_then_the_least_cost_comes_first() -> None:
    offers = [heard(0, 0, 10), heard(1, 0, 20, cost=900), heard(2, 0, 20, cost=500), heard(3, 0, 30, free=0)]
    ranked = choose.rank(choose.judge(h, 0, CONTRACT, 1, ()) for h in offers)
    assert [h.offer.node for h in ranked] == [KEYS[2].peer, KEYS[1].peer, KEYS[0].peer]
    near, far = heard(0, 0, 10, rtt=0.001), heard(1, 0, 10, rtt=0.1)
    assert choose.rank([choose.judge(h, 0, CONTRACT, 1, ()) for h in (far, near)])[0] is near


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
