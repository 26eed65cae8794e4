"""Finding who holds what: the DHT names candidates, their owners' fresh and signed offers say the rest.

Keys are few (a node may announce ten in ten seconds): one a mesh for whoever holds anything, and one a sixteenth of an
artifact's layers. A record is a hint: what is not confirmed by its owner within OFFER_TIMEOUT_S is not used.
"""

from __future__ import annotations

import hashlib
import logging
import math
import secrets
from collections.abc import Collection, Iterable

import trio

from ..errors import MeshError
from ..ids import ArtifactId, Layers, PeerId
from ..route import cost
from ..route.choose import Heard
from ..wire import statements
from ..wire.messages import MAX_EXCLUDED, Offer, OfferQuery, Offers
from .links import Links
from .network import Network

log = logging.getLogger(__name__)

SIXTEENTHS = 16
OFFER_TIMEOUT_S = 2.0  # a member that takes longer to say what it holds is no good next hop
FIND_TIMEOUT_S = 3.0
BLAMED_S = 60.0  # one slow answer should not count for ever
BLAMED_TIMEOUT_S = 0.25  # what a look-up waits for those that were silent before
MAX_BLAMED = 1024
OBSERVED_S = 600.0  # what was measured of a peer's claims counts so long
OBSERVED_SHARE = 0.5  # of the newest measurement in what its claims are multiplied by
FACTORS = (0.5, 100.0)  # between these: one odd measurement says little, and a claim of nothing is no reason for more
PROBE_S = 1.0  # for a hop that served a moment ago to say that it still does
ASKED = 64  # peers asked for one look-up: enough for choice, few enough to be quick


def sixteenth(layer: int, n_layer: int) -> int:
    return layer * SIXTEENTHS // n_layer


def holder_key(mesh_id: str, artifact: ArtifactId, part: int) -> bytes:
    return hashlib.sha256(f"meshnode/1/holders/{mesh_id}/{artifact}/{part}".encode()).digest()


def list_key(mesh_id: str) -> bytes:
    return hashlib.sha256(f"meshnode/1/artifacts/{mesh_id}".encode()).digest()


def keys_of(mesh_id: str, artifact: ArtifactId, layers: Layers, n_layer: int) -> list[bytes]:
    """What a holding is announced under."""
    parts = range(sixteenth(layers.begin, n_layer), sixteenth(layers.end - 1, n_layer) + 1)
    return [list_key(mesh_id), *(holder_key(mesh_id, artifact, part) for part in parts)]


class Directory:
    """Offers of the mesh, pulled from their owners."""

    def __init__(self, network: Network, links: Links, mesh_id: str) -> None:
        self._network = network
        self._links = links
        self.mesh_id = mesh_id
        self._blamed: dict[PeerId, float] = {}
        self._lowered: set[PeerId] = set()
        self._factors: dict[PeerId, tuple[float, float]] = {}  # (factor, until when)

    @property
    def denied(self) -> tuple[PeerId, ...]:
        """Peers that no route of this node may use, as many as a message can name."""
        return tuple(map(PeerId, sorted(self._network.admission.denied)))[:MAX_EXCLUDED]

    async def holders(
        self, artifact: ArtifactId, layer: int, n_layer: int, *, but: Collection[PeerId] = ()
    ) -> list[Heard]:
        """Offers of an artifact by nodes announced for a layer, or connected; they may hold other layers of it.

        but: nodes that are not asked.
        """
        key = holder_key(self.mesh_id, artifact, sixteenth(layer, n_layer))
        return await self._ask([peer for peer in await self._candidates(key) if peer not in but], artifact)

    async def fresh(self, peer: PeerId, artifact: ArtifactId, *, timeout: float) -> list[Heard]:
        """One node's offers of an artifact; none when it does not answer in time."""
        try:
            return await self._offers(peer, artifact, timeout)
        except MeshError as error:
            log.info("offers of %s: %s", peer, error)
            return []

    async def everything(self) -> list[Heard]:
        """Offers of every artifact."""
        return await self._ask(await self._candidates(list_key(self.mesh_id)), None)

    async def _candidates(self, key: bytes) -> list[PeerId]:
        """Those that the DHT names, then members that are connected: what they have may not have got around yet."""
        found: list[str] = []
        try:
            found = await self._network.find(key, timeout=FIND_TIMEOUT_S)
        except MeshError as error:
            log.info("look-up in the DHT: %s", error)
        connected = [info.peer for info in self._network.connected()]
        return [PeerId(peer) for peer in dict.fromkeys([self._network.peer, *found, *connected])][:ASKED]

    async def _ask(self, peers: Iterable[PeerId], artifact: ArtifactId | None) -> list[Heard]:
        heard: list[Heard] = []

        async def ask(peer: PeerId) -> None:
            try:
                heard.extend(await self._offers(peer, artifact))
            except MeshError as error:
                log.info("offers of %s: %s", peer, error)

        async with trio.open_nursery() as nursery:
            for peer in peers:
                nursery.start_soon(ask, peer)
        return heard

    async def _offers(self, peer: PeerId, artifact: ArtifactId | None, timeout: float = OFFER_TIMEOUT_S) -> list[Heard]:
        nonce = secrets.token_bytes(16)
        asked = trio.current_time()
        timeout = BLAMED_TIMEOUT_S if self._is_blamed(peer) else timeout
        try:
            answer = await self._links.request(peer, OfferQuery(nonce, artifact), Offers, timeout=timeout)
        except MeshError as error:
            if error.code in ("deadline", "unreachable"):
                self.blame(peer)
            raise
        took = trio.current_time() - asked
        offers = [statements.check(signed, Offer, self.mesh_id, by=peer) for signed in answer.offers]
        for offer in offers:
            if offer.nonce != nonce or offer.node != peer:
                raise MeshError("bad_signature", f"an offer of {peer} that is not fresh")
            offer.holding.within(offer.contract.n_layer)
            cost.check(offer.pairs, offer.holding)
        blamed = self._is_blamed(peer) or peer in self._lowered
        trip, factor = self._round_trip(peer, took), self._factor(peer)
        return [Heard(offer, trip, blamed, factor) for offer in offers if artifact in (None, offer.contract.artifact)]

    def _round_trip(self, peer: PeerId, took: float) -> float:
        """As measured over time, which an answer that had to wait for its turn does not tell; else as just now."""
        measured = self._network.measures(peer).rtt
        return took if math.isnan(measured) else measured

    def observed(self, peer: PeerId, claimed_s: float, measured_s: float) -> None:
        """An answer over a peer took so long a token, where its offer, uncorrected, claimed so much."""
        low, high = FACTORS
        ratio = min(high, max(low, measured_s / max(claimed_s, 1e-6)))
        factor = self._factor(peer) * (1 - OBSERVED_SHARE) + ratio * OBSERVED_SHARE
        self._factors.pop(peer, None)
        self._factors[peer] = factor, trio.current_time() + OBSERVED_S
        while len(self._factors) > MAX_BLAMED:
            del self._factors[next(iter(self._factors))]

    def _factor(self, peer: PeerId) -> float:
        factor, until = self._factors.get(peer, (1.0, math.inf))
        return factor if until > trio.current_time() else 1.0

    def blame(self, peer: PeerId) -> None:
        """It let a request of ours run out of time: for a while it is asked last, and briefly."""
        self._blamed[peer] = trio.current_time() + BLAMED_S
        while len(self._blamed) > MAX_BLAMED:
            del self._blamed[next(iter(self._blamed))]

    def lower(self, peers: set[PeerId]) -> None:
        """From now on these are asked last, and no others: an audit found that they do not compute what they sign."""
        self._lowered = set(peers)

    def _is_blamed(self, peer: PeerId) -> bool:
        return self._blamed.get(peer, -math.inf) > trio.current_time()
