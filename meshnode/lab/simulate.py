"""One simulated mesh a seed: nodes of random layers and places, requests, and faults at random moments."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import trio
import trio.testing

from .. import keys
from ..client import Ask, Done
from ..config import NodeConfig
from ..errors import CODES, MeshError
from ..ids import Layers, gaps
from .world import ARTIFACT, SimNode, World, check_stamp, reference

N_LAYER = 12
MAX_NODES = 12
SPAN_S = 4.0  # of virtual time, in which requests and faults begin
TTL_S = 3.0
HANG_S = 90.0  # of virtual time: no request takes so long, whatever fails
CONFIG = NodeConfig(lease_ttl_s=TTL_S, hop_timeout_s=2.0, chunk=4)


@dataclass
class Outcome:
    """What became of one request: ok, cancelled, a code of an error, or what is wrong."""

    ended: str
    wrong: str | None = None
    took: float = 0.0


@dataclass
class Run:
    """One seed's run. faults: what went against the promises; none in a good run."""

    seed: int
    nodes: int
    covered: bool
    log: list[str] = field(default_factory=list)
    digest: str = ""
    outcomes: list[Outcome] = field(default_factory=list)
    injected: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


@contextlib.contextmanager
def deterministic(seed: int) -> Iterator[None]:
    """trio's tasks run in an order that the seed decides. Its private switch: there is no other."""
    run: Any = importlib.import_module("trio._core._run")
    before, state = run._ALLOW_DETERMINISTIC_SCHEDULING, run._r.getstate()
    run._ALLOW_DETERMINISTIC_SCHEDULING = True
    run._r.seed(seed)
    verify, keys.verify = keys.verify, check_stamp
    quiet = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(quiet)
        keys.verify = verify
        run._ALLOW_DETERMINISTIC_SCHEDULING = before
        run._r.setstate(state)


def simulate(seed: int) -> Run:
    """Everything that the seed decides, in virtual time."""
    with deterministic(seed):
        return trio.run(_simulate, seed, clock=trio.testing.MockClock(autojump_threshold=0))


async def _simulate(seed: int) -> Run:
    chance = random.Random(f"scenario {seed}")
    async with trio.open_nursery() as nursery:
        world = World(seed, CONFIG, nursery)
        count = min(chance.randint(2, MAX_NODES), chance.randint(4, MAX_NODES))
        serving = [await world.add(f"n{number}") for number in range(count - 1)]
        entry = await world.add("entry")
        parts = chance.choice((1, 2, 2, 3, 3, 4))
        holdings = [_holding(chance, number, parts) for number in range(len(serving))]
        for node, layers in zip(serving, holdings, strict=True):
            lies = chance.random() < 0.05
            world.hold(node, layers, N_LAYER, chance.uniform(0.0005, 0.004), chance.randint(1, 3), lies)
        run = Run(seed, count, not gaps(holdings, N_LAYER))
        everybody = [*serving, entry]
        async with trio.open_nursery() as requests:
            for number in range(chance.randint(1, 3)):
                requests.start_soon(
                    _request, world, entry, run, chance.uniform(0, SPAN_S), number, chance.random() < 0.2
                )
            for _ in range(chance.choice((0, 1, 1, 2, 3))):
                requests.start_soon(_fault, world, run, chance.uniform(0.2, SPAN_S + 1), everybody, serving)
        for node in everybody:
            world.thaw(node)
        world.cut.clear()
        await trio.sleep(TTL_S + 12)  # a lease without prefill lapses in 10 s
        run.faults += world.leaks()
        run.faults += [outcome.wrong for outcome in run.outcomes if outcome.wrong]
        run.log, run.digest = world.log, world.digest()
        nursery.cancel_scope.cancel()
    return run


def _holding(chance: random.Random, number: int, parts: int) -> Layers:
    """First the ranges in which people share a model out, then spares of them, and a few that overlap them."""
    if number >= parts and chance.random() < 0.3:
        begin = chance.randrange(N_LAYER)
        return Layers(begin, chance.randint(begin + 1, N_LAYER))
    part = number % parts
    return Layers(part * N_LAYER // parts, (part + 1) * N_LAYER // parts)


async def _request(world: World, entry: SimNode, run: Run, at: float, number: int, cancelled: bool) -> None:
    await trio.sleep(at)
    prompt = f"prompt {number}"
    wanted = world.chance.randint(1, 30)
    began = trio.current_time()
    outcome = Outcome("cancelled")
    with trio.move_on_after(HANG_S) as hang:
        with trio.move_on_after(world.chance.uniform(0, 1.5) if cancelled else HANG_S + 1):
            outcome = await ask(entry, prompt, wanted)
    outcome.took = trio.current_time() - began
    if hang.cancelled_caught:
        outcome = Outcome("hung", f"request {number} hung")
    world.note(f"request {number} {outcome.ended}")
    run.outcomes.append(outcome)


async def ask(entry: SimNode, prompt: str, wanted: int) -> Outcome:
    """One request, held against what it should give."""
    expected = reference(list(prompt.encode()), N_LAYER, wanted)
    taken: list[int] = []
    try:
        async with entry.client.ask(Ask(model=ARTIFACT, prompt=prompt, max_tokens=wanted)) as events:
            async for event in events:
                if isinstance(event, Done):
                    taken = list(event.ids)
    except MeshError as error:
        return Outcome(error.code, None if error.code in CODES and error.code != "internal" else f"error {error}")
    return Outcome("ok", None if taken == expected else f"wrong tokens: {taken} where {expected} are due")


async def _fault(world: World, run: Run, at: float, everybody: list[SimNode], serving: list[SimNode]) -> None:
    await trio.sleep(at)
    chance = world.chance
    kind = chance.choice(("kill", "freeze", "part", "loss", "worker"))
    node, other = chance.choice(serving), chance.choice(everybody)
    run.injected.append(kind)
    if kind == "kill":
        world.kill(node)
    elif kind == "freeze":
        world.freeze(node)
        await trio.sleep(chance.uniform(0.1, 6))
        world.thaw(node)
    elif kind == "part" and node is not other:
        world.part(node, other)
        await trio.sleep(chance.uniform(0.5, 4))
        world.join(node, other)
    elif kind == "loss" and node is not other:
        world.note(f"loss {node.name} {other.name}")
        world.lossy[frozenset((node.peer, other.peer))] = chance.uniform(0.05, 0.3)
    elif kind == "worker" and node.peer in world.nodes:
        world.note(f"worker of {node.name} dies")
        node.workers[0].die()
        holding = node.stage.holdings[0] if node.stage.holdings else None
        if holding is not None:
            await node.stage.let_go(holding)


def digest_of(runs: list[Run]) -> str:
    return hashlib.sha256("".join(run.digest for run in runs).encode()).hexdigest()


__all__ = ["Outcome", "Run", "deterministic", "digest_of", "simulate"]
