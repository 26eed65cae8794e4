"""What the simulated mesh is measured by: routes against the optimum, churn, hostile messages, cancels."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from typing import Any

import trio
import trio.testing

from ..ids import Layers, PeerId, gaps
from ..route import choose, cost
from ..route.choose import Heard, Stand
from ..wire.messages import Contract, Offer
from . import hostile
from .simulate import CONFIG, N_LAYER, TTL_S, ask, deterministic
from .world import ARTIFACT, SimNode, World

Say = Callable[[str], None]

ROUTED_NODES, ROUTED_LAYERS, ROUTES = 200, 32, 500
HEARD = 64  # offers that a node pulls at one look
ROUNDS = 8  # looks of every node before routes are asked for: more than the hops of any route
CHURN_NODES, CHURN_PARTS = 24, 3
CHURN_A_MINUTE = 0.1
REQUEST_EVERY_S = 2.0
CONTRACT = Contract(ARTIFACT, 1, "toy", "f32", "invariant", ROUTED_LAYERS, 1)


def measure(seed: int = 1, *, small: bool = False, say: Say | None = None) -> dict[str, Any]:
    """All figures, and which of them are not what they have to be."""
    share = 10 if small else 1
    found: dict[str, Any] = {"seed": seed}
    parts: list[Callable[[], dict[str, Any]]] = [
        lambda: route_costs(seed, ROUTES // share),
        lambda: churn(seed, 1000 // share),
        lambda: hostile.messages(seed, 100_000 // share),
        lambda: cancels(seed, 10_000 // share),
    ]
    for part in parts:
        figures = part()
        if say is not None:
            say(", ".join(f"{name} {value}" for name, value in figures.items()))
        found |= figures
    bounds = {
        "route_cost_median": found["route_cost_median"] <= 1.05,
        "route_cost_p99": found["route_cost_p99"] <= 1.25,
        "churn_success": found["churn_success"] >= 0.99,
        "hostile_accepted": found["hostile_accepted"] == 0,
        "cancels_touched": found["cancels_touched"] == 0,
        "leaks": found["leaks"] == 0,
    }
    return found | {"broken": [name for name, kept in bounds.items() if not kept]}


class _Placed:
    """A node somewhere on the plane, with some layers and a speed of its own."""

    def __init__(self, number: int, chance: random.Random) -> None:
        self.peer = PeerId(f"n{number:03}")
        begin = chance.randrange(ROUTED_LAYERS)
        self.layers = Layers(begin, min(ROUTED_LAYERS, begin + chance.randint(3, 16)))
        self.layer_s = chance.uniform(0.0002, 0.003)
        self.at = complex(chance.random(), chance.random())
        self.pairs: cost.Pairs = ()

    def way_to(self, other: _Placed) -> float:
        return 0.0005 + 0.05 * abs(self.at - other.at)

    def hears(self, others: list[_Placed]) -> list[Heard]:
        offers = [
            Offer(b"n" * 16, o.peer, "m", CONTRACT, o.layers, b"r" * 32, b"f" * 32, 99, 4, 4, o.pairs, (), False)
            for o in others
        ]
        return [Heard(offer, 2 * self.way_to(o)) for offer, o in zip(offers, others, strict=True)]

    def stand(self, begin: int) -> Stand:
        return Stand(self.peer, Layers(begin, self.layers.end), self.layer_s)


def route_costs(seed: int, routes: int) -> dict[str, Any]:
    """What routes that the hops choose by themselves cost, over the cheapest there is by the same reckoning."""
    chance = random.Random(f"costs {seed}")
    nodes = [_Placed(number, chance) for number in range(ROUTED_NODES)]
    if gaps([node.layers for node in nodes], ROUTED_LAYERS):
        raise AssertionError("a seed whose nodes do not cover the model")
    by_peer = {node.peer: node for node in nodes}

    def found_by(node: _Placed, layer: int) -> list[_Placed]:
        """Those that a look-up for a layer gives, and some that are connected anyway."""
        holders = [o for o in nodes if layer in o.layers and o is not node]
        return (holders + chance.sample(nodes, 16))[:HEARD]

    for _ in range(ROUNDS):
        for node in nodes:
            heard = node.hears(found_by(node, min(node.layers.end, ROUTED_LAYERS - 1)))
            node.pairs = choose.pairs(heard, node.stand(node.layers.begin), CONTRACT)

    def walk(entry: _Placed) -> float:
        at, total, before = 0, 0.0, entry
        heads = entry.hears(found_by(entry, 0))
        node = by_peer[choose.rank(choose.judge(h, 0, CONTRACT, 0, ()) for h in heads)[0].offer.node]
        while True:
            total += before.way_to(node) + cost.HANDOVER_S
            heard = node.hears(found_by(node, min(node.layers.end, ROUTED_LAYERS - 1)))
            way = choose.ways(heard, node.stand(at), CONTRACT)[0][0]
            total += node.layer_s * (way.cut - at)
            if way.heard is None:
                return total
            at, before, node = way.cut, node, by_peer[way.heard.offer.node]

    best = optimum(nodes)
    ratios = []
    for _ in range(routes):
        entry = _Placed(-1, chance)
        least = min(entry.way_to(n) + cost.HANDOVER_S + best[n.peer][0] for n in nodes if 0 in n.layers)
        ratios.append(walk(entry) / least)
    return {
        "route_nodes": ROUTED_NODES,
        "routes": routes,
        "route_cost_median": round(statistics.median(ratios), 4),
        "route_cost_p99": round(sorted(ratios)[-1 - len(ratios) // 100], 4),
    }


def optimum(nodes: list[_Placed]) -> dict[PeerId, dict[int, float]]:
    """The least cost from each node and layer to the tail, over every node and every cut."""
    best: dict[PeerId, dict[int, float]] = {node.peer: {} for node in nodes}
    onward: dict[int, dict[PeerId, float]] = {}  # by cut: from a node, over the best that goes on there
    for layer in range(ROUTED_LAYERS - 1, -1, -1):
        for node in (n for n in nodes if layer in n.layers):
            cuts = range(layer + 1, min(node.layers.end, ROUTED_LAYERS - 1) + 1)
            costs = [node.layer_s * (cut - layer) + onward[cut].get(node.peer, cost.UNKNOWN_S) for cut in cuts]
            if node.layers.end == ROUTED_LAYERS:
                costs.append(node.layer_s * (ROUTED_LAYERS - layer))
            best[node.peer][layer] = min(costs)
        takers = [(n, best[n.peer][layer] + cost.HANDOVER_S) for n in nodes if layer in n.layers]
        onward[layer] = {
            node.peer: min(node.way_to(other) + rest for other, rest in takers)
            for node in nodes
            if node.layers.begin < layer <= node.layers.end
        }
    return best


def churn(seed: int, requests: int) -> dict[str, Any]:
    """Requests that a mesh answers, every token right, while a tenth of its nodes is replaced each minute."""
    with deterministic(seed):
        return trio.run(_churn, seed, requests, clock=trio.testing.MockClock(autojump_threshold=0))


async def _churn(seed: int, requests: int) -> dict[str, Any]:
    chance = random.Random(f"churn {seed}")
    ended: list[str] = []
    async with trio.open_nursery() as nursery:
        world = World(seed, CONFIG, nursery)
        serving: list[tuple[SimNode, Layers]] = []

        async def newcomer(name: str, layers: Layers) -> None:
            node = await world.add(name)
            world.hold(node, layers, N_LAYER, chance.uniform(0.0005, 0.004), 4, False)
            serving.append((node, layers))

        for number in range(CHURN_NODES):
            part = number % CHURN_PARTS
            await newcomer(f"n{number}", Layers(part * N_LAYER // CHURN_PARTS, (part + 1) * N_LAYER // CHURN_PARTS))
        entry = await world.add("entry")

        async def come_and_go() -> None:
            number = CHURN_NODES
            while True:
                await trio.sleep(chance.expovariate(CHURN_NODES * CHURN_A_MINUTE / 60))
                node, layers = serving.pop(chance.randrange(len(serving)))
                world.kill(node)
                await newcomer(f"n{number}", layers)
                number += 1

        async def request(number: int) -> None:
            outcome = await ask(entry, f"prompt {number}", chance.randint(5, 30))
            ended.append("wrong" if outcome.wrong else outcome.ended)

        nursery.start_soon(come_and_go)
        async with trio.open_nursery() as asking:
            for number in range(requests):
                await trio.sleep(chance.expovariate(1 / REQUEST_EVERY_S))
                asking.start_soon(request, number)
        minutes = trio.current_time() / 60
        nursery.cancel_scope.cancel()
    return {
        "churn_requests": requests,
        "churn_minutes": round(minutes, 1),
        "churn_success": round(ended.count("ok") / requests, 4),
        "churn_failed": {code: ended.count(code) for code in sorted(set(ended)) if code != "ok"},
    }


def cancels(seed: int, count: int) -> dict[str, Any]:
    """Requests that are given up at random moments beside others that are not: those have to be as if alone."""
    with deterministic(seed):
        return trio.run(_cancels, seed, count, clock=trio.testing.MockClock(autojump_threshold=0))


async def _cancels(seed: int, count: int) -> dict[str, Any]:
    chance = random.Random(f"cancels {seed}")
    touched, kept = list[str](), 0
    async with trio.open_nursery() as nursery:
        world = World(seed, CONFIG, nursery)
        for number, layers in enumerate((Layers(0, 4), Layers(4, 9), Layers(9, 12))):
            world.hold(await world.add(f"n{number}"), layers, N_LAYER, 0.001, 8, False)
        entry = await world.add("entry")
        await trio.sleep(1)

        async def stays(number: int) -> None:
            nonlocal kept
            outcome = await ask(entry, f"stays {number}", 30)
            kept += 1
            if outcome.ended != "ok" or outcome.wrong:
                touched.append(outcome.wrong or outcome.ended)

        async def goes(number: int) -> None:
            with trio.move_on_after(chance.uniform(0, 1.5)):  # while it is looked for, opened, in prefill, in decode
                await ask(entry, f"goes {number}", 30)

        for batch in range(0, count, 5):
            async with trio.open_nursery() as together:
                together.start_soon(stays, batch)
                for number in range(batch, min(batch + 5, count)):
                    together.start_soon(goes, number)
        await trio.sleep(TTL_S + 12)
        leaks = world.leaks()
        nursery.cancel_scope.cancel()
    return {"cancels": count, "cancels_beside": kept, "cancels_touched": len(touched), "leaks": len(leaks)}
