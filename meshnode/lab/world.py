"""A mesh without processes, sockets and clocks: the real stage, client and leases over fake links and workers.

Time is trio's MockClock, tasks run in an order that the seed decides, and everything that passes is written into a log:
the same seed gives the same log. What a route computes can be told from what it should, token by token.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import trio

from ..client import Client
from ..config import NodeConfig
from ..errors import MeshError
from ..ids import ArtifactId, Layers, PeerId
from ..keys import NodeKey
from ..net import PeerInfo
from ..net.directory import Directory, keys_of
from ..net.links import Links, Refused
from ..net.measure import NeighbourMeasure
from ..route.lease import LeaseBook
from ..stage import Holding, Stage
from ..wire.messages import OfferQuery, Refusal
from ..wire.worker_messages import Loaded, Sampled, Stepped

MESH_ID = "simulated"
ARTIFACT = ArtifactId("sha256:" + "5" * 64)
PRIME = 8_388_593  # the largest below 2^23: every state is a whole number that f32 holds
END_EACH = 61  # of so many tokens one ends the text
SWEEP_S, ONWARD_S = 2.0, 30.0  # a node's own rounds: each costs real time, in every node
NEIGHBOURS = 2  # that a newcomer connects to; whom else it needs it finds
LOST_AFTER_S = 1.0  # until a connection that carries nothing counts as broken


class SimKey(NodeKey):
    """Signs by a hash: what is signed is still bound to its signer, its kind and its mesh, for a tenth of the time."""

    def sign(self, domain: str, mesh_id: str, raw: bytes) -> bytes:
        return stamp(self.peer, domain, mesh_id, raw)


def stamp(peer: PeerId, domain: str, mesh_id: str, raw: bytes) -> bytes:
    return hashlib.blake2b(f"{peer} {domain} {mesh_id} ".encode() + raw).digest()


def check_stamp(peer: PeerId, domain: str, mesh_id: str, raw: bytes, signature: bytes) -> None:
    """In place of keys.verify, inside of a simulation."""
    if signature != stamp(peer, domain, mesh_id, raw):
        raise MeshError("bad_signature", f"a {domain} is not signed by {peer}")


def advance(state: int, x: int, layer: int) -> int:
    """One layer at one position, from its state after the position before and its input."""
    return (state * 31 + x * 17 + layer + 1) % PRIME


def reference(prompt: Sequence[int], n_layer: int, count: int) -> list[int]:
    """The tokens that any sound route gives."""
    state, made, todo = [0] * n_layer, list[int](), list(prompt)
    while len(made) < count:
        x = 0
        for token in todo:
            x = token
            for layer in range(n_layer):
                state[layer] = x = advance(state[layer], x, layer)
        if x % END_EACH == 0:
            break
        made.append(x % 1000)
        todo = [x % 1000]
    return made


class FakeWorker:
    """Computes as `reference` does, in virtual time; keeps each position's state, as a cache would."""

    def __init__(self, layers: Layers, n_layer: int, sessions: int, layer_s: float, thawed: Callable[[], Any]) -> None:
        recipe = json.dumps({"numerics": "invariant"})
        self.loaded = Loaded(
            "toy", (layers.begin, layers.end), n_layer, 1, 1000, 512, sessions, 512, 64, False, 0, 0, recipe,
            "00" * 32, "any",
        )  # fmt: skip
        self.died = trio.Event()
        self.fault: MeshError | None = None
        self.sessions: dict[int, list[list[int]]] = {}  # by handle and layer: the state after each position
        self._layer_s = layer_s
        self._thawed = thawed
        self._turn = trio.Lock()

    def die(self) -> None:
        self.fault = MeshError("worker_died", "the worker was killed")
        self.sessions.clear()
        self.died.set()

    def _alive(self) -> None:
        if self.fault is not None:
            raise self.fault

    async def open(self, handle: int, sampling: object, prompt: Sequence[int] = (), start: int | None = None) -> None:
        self._alive()
        if len(self.sessions) >= self.loaded.n_sessions:
            raise MeshError("busy", "the worker has no free session")
        self.sessions[handle] = [[] for _ in range(self.loaded.n_layer)]

    async def step(
        self,
        handle: int,
        first: int,
        layers: tuple[int, int],
        *,
        tokens: Sequence[int] | None = None,
        residual: bytes | memoryview | None = None,
        sample: bool = False,
    ) -> Stepped:
        rows = list(tokens) if tokens is not None else [int(x) for (x,) in struct.iter_unpack("<f", residual or b"")]
        took = self._layer_s * (layers[1] - layers[0]) * len(rows)
        async with self._turn:
            await self._thawed()
            await trio.sleep(took)
            await self._thawed()
        self._alive()
        states = self.sessions[handle]
        for layer in range(*layers):
            kept = states[layer]
            if len(kept) < first:
                raise MeshError("cache_miss", f"{first} positions are expected, {len(kept)} are held")
            del kept[first:]
            state = kept[-1] if kept else 0
            for n, x in enumerate(rows):
                rows[n] = state = advance(state, x, layer)
                kept.append(state)
        if layers[1] < self.loaded.n_layer:
            return Stepped(int(took * 1e9), struct.pack(f"<{len(rows)}f", *rows))
        token = rows[-1] % 1000
        sampled = Sampled(token, f"{token} ".encode(), rows[-1] % END_EACH == 0) if sample else None
        return Stepped(int(took * 1e9), b"", sampled)

    async def truncate(self, handle: int, keep: int) -> None:
        self._alive()
        for kept in self.sessions[handle]:
            del kept[keep:]

    async def close(self, handle: int) -> None:
        self._alive()
        self.sessions.pop(handle, None)

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return list(text.encode())


class FakeNetwork:
    """What a Directory asks of a network: who is connected, and who was announced."""

    def __init__(self, world: World, peer: PeerId) -> None:
        self._world = world
        self.peer = peer
        self.admission = self
        self.denied: frozenset[PeerId] = frozenset()

    def connected(self) -> list[PeerInfo]:
        node = self._world.nodes[self.peer]
        return [
            PeerInfo(peer, "", False, 0.0, NeighbourMeasure()) for peer in node.neighbours if peer in self._world.nodes
        ]

    def measures(self, peer: str) -> NeighbourMeasure:
        return NeighbourMeasure()  # nothing is: what a question takes stands in

    async def find(self, key: bytes, *, timeout: float = 5.0) -> list[str]:
        return list(self._world.announced.get(key, ()))


class FakeLinks(Links):
    """Messages as objects, in order for each pair, each as late as the world says."""

    def __init__(self, world: World, peer: PeerId) -> None:
        self._world = world
        self._me = peer
        self._on_request = {}
        self._on_message = {}
        self.on_lost = []
        self._ways: dict[PeerId, trio.MemorySendChannel[tuple[float, Any, bytes]]] = {}

    @property
    def peer(self) -> PeerId:
        return self._me

    async def request(self, peer: PeerId, message: Any, expected: type, *, timeout: float) -> Any:
        with trio.move_on_after(timeout):
            return await self._world.ask(self._me, peer, message)
        raise MeshError("deadline", f"{peer} did not answer within {timeout:.1f} s")

    async def send(self, peer: PeerId, message: Any, payload: bytes | memoryview = b"") -> None:
        self._world.post(self._me, peer, message, bytes(payload))

    async def connect(self, peer: PeerId, addresses: tuple[str, ...] = ()) -> None:
        await self._world.pause(self._me, peer)
        self._world.reach(self._me, peer)


class _Call:
    """A request on its way. answer None: the node that was to give it is gone."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.done = trio.Event()
        self.answer: Any = None


@dataclass
class SimNode:
    name: str
    peer: PeerId
    links: FakeLinks
    stage: Stage
    client: Client
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    thawed: trio.Event | None = None  # while it is frozen
    neighbours: list[PeerId] = field(default_factory=list)
    workers: list[FakeWorker] = field(default_factory=list)
    nursery: trio.Nursery = field(init=False)


class World:
    """All nodes, what lies between them, and the log."""

    def __init__(self, seed: int, config: NodeConfig, nursery: trio.Nursery) -> None:
        self.chance = random.Random(seed)
        self.config = config
        self.nodes: dict[PeerId, SimNode] = {}  # that live
        self.announced: dict[bytes, list[PeerId]] = {}  # what a DHT would know, of those who are gone too
        self.log: list[str] = []
        self.names: dict[PeerId, str] = {}
        self.cut: set[frozenset[PeerId]] = set()  # pairs between which nothing passes
        self.lossy: dict[frozenset[PeerId], float] = {}  # pairs, and how likely a message is sent again
        self._nursery = nursery
        self._places: dict[PeerId, tuple[float, float]] = {}
        self._queues: dict[tuple[PeerId, PeerId], trio.MemorySendChannel[tuple[float, Any, bytes]]] = {}

    def note(self, what: str) -> None:
        self.log.append(f"{trio.current_time():.6f} {what}")

    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.log).encode()).hexdigest()

    # members

    async def add(self, name: str) -> SimNode:
        key = SimKey(hashlib.sha256(f"{name} {self.chance.random()}".encode()).digest())
        peer = key.peer
        self.names[peer] = name
        self._places[peer] = self.chance.random(), self.chance.random()
        links = FakeLinks(self, peer)
        directory = Directory(FakeNetwork(self, peer), links, MESH_ID)  # type: ignore[arg-type]
        stage = Stage(links, directory, key, self.config, sweep_s=SWEEP_S, onward_s=ONWARD_S)
        node = SimNode(name, peer, links, stage, Client(links, directory, key, self.config))
        node.neighbours = self.chance.sample(list(self.nodes), min(NEIGHBOURS, len(self.nodes)))
        for neighbour in node.neighbours:
            self.nodes[neighbour].neighbours.append(peer)
        self.nodes[peer] = node
        await self._nursery.start(self._live, node)
        return node

    async def _live(self, node: SimNode, *, task_status: Any) -> None:
        with node.scope:
            async with trio.open_nursery() as node.nursery:
                await node.nursery.start(node.stage.run)
                task_status.started()
                await trio.sleep_forever()

    def hold(self, node: SimNode, layers: Layers, n_layer: int, layer_s: float, sessions: int, lies: bool) -> Holding:
        async def thawed() -> None:
            while node.thawed is not None:
                await node.thawed.wait()

        async def sound() -> None:
            pass

        worker = FakeWorker(layers, n_layer, sessions, layer_s, thawed)
        node.workers.append(worker)
        holding = (Liar if lies else Holding)(
            artifact=ARTIFACT,
            name="toy",
            worker=worker,  # type: ignore[arg-type]
            book=LeaseBook(sessions, self.config.lease_ttl_s),
            verify=sound,
            token_us=round(layer_s * len(layers) * 1e6),
            template=None,
        )
        node.stage.hold(holding)
        for announced in keys_of(MESH_ID, ARTIFACT, layers, n_layer):
            self.announced.setdefault(announced, []).append(node.peer)
        return holding

    def kill(self, node: SimNode) -> None:
        """At once and without a word; who is connected to it learns that the connection is gone."""
        if self.nodes.pop(node.peer, None) is None:
            return
        self.note(f"kill {node.name}")
        node.scope.cancel()
        self.thaw(node)
        for other in list(self.nodes.values()):
            self._nursery.start_soon(self._tell_lost, other, node.peer)

    async def _tell_lost(self, node: SimNode, peer: PeerId) -> None:
        await self.pause(node.peer, peer)
        if node.peer in self.nodes:
            for call in node.links.on_lost:
                call(peer)

    def freeze(self, node: SimNode) -> None:
        if node.thawed is None:
            self.note(f"freeze {node.name}")
            node.thawed = trio.Event()

    def thaw(self, node: SimNode) -> None:
        if node.thawed is not None:
            self.note(f"thaw {node.name}")
            node.thawed.set()
            node.thawed = None

    def part(self, a: SimNode, b: SimNode) -> None:
        """Nothing passes between two, and after a while both take their connection for broken."""
        self.note(f"part {a.name} {b.name}")
        self.cut.add(frozenset((a.peer, b.peer)))

        async def notice() -> None:
            await trio.sleep(LOST_AFTER_S)
            await self._tell_lost(a, b.peer)
            await self._tell_lost(b, a.peer)

        self._nursery.start_soon(notice)

    def join(self, a: SimNode, b: SimNode) -> None:
        self.cut.discard(frozenset((a.peer, b.peer)))
        self.note(f"join {a.name} {b.name}")

    # what lies between

    def latency(self, a: PeerId, b: PeerId) -> float:
        """Seconds one way."""
        (xa, ya), (xb, yb) = self._places[a], self._places[b]
        return 0.0 if a == b else 0.0005 + 0.04 * math.hypot(xa - xb, ya - yb)

    def delay(self, a: PeerId, b: PeerId) -> float:
        """That of one message: what is lost is sent again, later."""
        lost = self.lossy.get(frozenset((a, b)), 0.0)
        again = 0.2 if lost and self.chance.random() < lost else 0.0
        return self.latency(a, b) + again

    async def pause(self, a: PeerId, b: PeerId) -> None:
        await trio.sleep(self.delay(a, b))

    def reach(self, a: PeerId, b: PeerId) -> SimNode:
        if b not in self.nodes or frozenset((a, b)) in self.cut:
            raise MeshError("unreachable", f"{self.names[b]} cannot be reached")
        return self.nodes[b]

    async def _awake(self, node: SimNode) -> None:
        while node.thawed is not None:
            await node.thawed.wait()

    async def ask(self, a: PeerId, b: PeerId, message: Any) -> Any:
        """A request and its answer. In a partition it hangs, as it would."""
        await self.pause(a, b)
        if frozenset((a, b)) in self.cut:
            await trio.sleep_forever()
        node = self.reach(a, b)
        await self._awake(node)
        call = _Call()
        node.nursery.start_soon(self._serve, node, a, message, call)
        try:
            await call.done.wait()
        finally:
            call.scope.cancel()  # what nobody waits for any more is given up
        answer = call.answer
        if not isinstance(message, OfferQuery):
            said = answer.code if isinstance(answer, Refusal) else type(answer).__name__
            self.note(f"{type(message).__name__} {self.names[a]} {self.names[b]} {said}")
        await self.pause(b, a)
        if answer is None or b not in self.nodes:
            raise MeshError("unreachable", f"{self.names[b]} is gone")
        if isinstance(answer, Refusal):
            raise Refused(answer)
        return answer

    async def _serve(self, node: SimNode, a: PeerId, message: Any, call: _Call) -> None:
        """In the served node's own tasks, so that it ends with the node."""
        try:
            with call.scope:
                call.answer = await node.links._on_request[type(message)](a, message)
        except Refused as refused:
            call.answer = Refusal(refused.code, refused.message, refused.failed, refused.attempts)
        except MeshError as error:
            call.answer = Refusal(error.code, error.message)
        finally:
            call.done.set()

    def post(self, a: PeerId, b: PeerId, message: Any, payload: bytes) -> None:
        self.reach(a, b) if frozenset((a, b)) not in self.cut else None
        if (a, b) not in self._queues:
            send, receive = trio.open_memory_channel[tuple[float, Any, bytes]](math.inf)
            self._queues[a, b] = send
            self._nursery.start_soon(self._carry, a, b, receive)
        self._queues[a, b].send_nowait((trio.current_time() + self.delay(a, b), message, payload))

    async def _carry(self, a: PeerId, b: PeerId, arriving: trio.MemoryReceiveChannel[tuple[float, Any, bytes]]) -> None:
        async for at, message, payload in arriving:
            await trio.sleep_until(max(at, trio.current_time()))
            node = self.nodes.get(b)
            if node is None or frozenset((a, b)) in self.cut:
                continue
            await self._awake(node)
            if b not in self.nodes:
                continue
            self.note(f"{type(message).__name__} {self.names[a]} {self.names[b]}")
            for take in node.links._on_message.get(type(message), ()):
                try:
                    await take(a, message, memoryview(payload))
                except MeshError as error:
                    self.note(f"refused {error.code}")

    # the end

    def leaks(self) -> list[str]:
        """What is still held when nothing should be."""
        found = []
        for node in self.nodes.values():
            if node.stage.hops:
                found.append(f"{node.name} has {len(node.stage.hops)} hops")
            if node.client.sessions:
                found.append(f"{node.name} has {len(node.client.sessions)} sessions")
            for holding in node.stage.holdings:
                if holding.book.free != holding.book.places:
                    found.append(f"{node.name} has {holding.book.places - holding.book.free} leases")
            found += [f"{node.name}'s worker has {len(w.sessions)} sessions" for w in node.workers if w.sessions]
        return found


class Liar(Holding):
    """States that everything from here to the tail takes no time."""

    def pairs(self, node: PeerId) -> tuple[tuple[int, int], ...]:
        return ((self.layers.begin, 0), (self.layers.end - 1, 0)) if len(self.layers) > 1 else ((self.layers.begin, 0),)
