"""A range of layers that a worker of this node has loaded, and what the node says of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from ..errors import MeshError
from ..ids import ArtifactId, Layers, PeerId
from ..route import choose, cost
from ..route.choose import Heard, Stand
from ..route.lease import LeaseBook
from ..wire.messages import WIRE_VERSION, Contract, Offer
from ..worker import ChatTemplate, Worker


@dataclass
class Holding:
    """One loaded range. verify() raises MeshError identity_changed when the bytes are no longer those identified."""

    artifact: ArtifactId
    name: str
    worker: Worker
    book: LeaseBook
    verify: Callable[[], Awaitable[None]]
    token_us: int  # measured compute of one position in decode, through all of the holding's layers
    template: ChatTemplate | None  # of a head whose model has one
    onward: Sequence[Heard] = field(default=())  # offers of those who may go on from here, as they were last heard

    @property
    def layers(self) -> Layers:
        return Layers(*self.worker.loaded.layers)

    @property
    def contract(self) -> Contract:
        loaded = self.worker.loaded
        return Contract(
            artifact=self.artifact,
            wire=WIRE_VERSION,
            architecture=loaded.architecture,
            boundary="f32",
            numerics=json.loads(loaded.recipe)["numerics"],
            n_layer=loaded.n_layer,
            n_embd=loaded.n_embd,
        )

    @property
    def recipe(self) -> bytes:
        return hashlib.sha256(self.worker.loaded.recipe.encode()).digest()

    @property
    def fingerprint(self) -> bytes:
        return bytes.fromhex(self.worker.loaded.fingerprint)

    @property
    def is_head(self) -> bool:
        return self.layers.begin == 0

    def stand(self, node: PeerId, begin: int) -> Stand:
        """What it has for a session that enters at layer `begin`; its other sessions make it slower."""
        busy = self.book.places - self.book.free
        layer_s = cost.loaded(self.token_us / 1e6, busy) / len(self.layers)
        return Stand(node, Layers(begin, self.layers.end), layer_s)

    def pairs(self, node: PeerId) -> cost.Pairs:
        """(entry layer, us a token from there to the tail), over those who were last heard."""
        return choose.pairs(self.onward, self.stand(node, self.layers.begin), self.contract)

    def offer(self, nonce: bytes, node: PeerId, addresses: tuple[str, ...]) -> Offer:
        loaded = self.worker.loaded
        return Offer(
            nonce=nonce,
            node=node,
            name=self.name,
            contract=self.contract,
            holding=self.layers,
            recipe=self.recipe,
            fingerprint=self.fingerprint,
            context=loaded.n_ctx,
            sessions=self.book.places,
            free=max(0, self.book.free),
            pairs=self.pairs(node),
            addresses=addresses,
            chat=self.template is not None,
        )

    async def tokenize_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """The ids of (role, content) pairs under the model's template, up to where the answer begins."""
        if self.template is None:
            raise MeshError("no_chat_template", "the model has no chat template")
        return await self.worker.tokenize_segments(await self.template.segments(messages))
