"""A range of layers that a worker of this node has loaded, and what the node says of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from ..errors import MeshError
from ..ids import ArtifactId, Layers, PeerId
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

    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(entry layer, us a token from there to the tail): what is beyond this holding is taken to be as fast."""
        begin, n_layer = self.layers.begin, self.worker.loaded.n_layer
        return ((begin, self.token_us * (n_layer - begin) // len(self.layers)),)

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
            pairs=self.pairs(),
            addresses=addresses,
            chat=self.template is not None,
        )

    async def tokenize_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """The ids of (role, content) pairs under the model's template, up to where the answer begins."""
        if self.template is None:
            raise MeshError("no_chat_template", "the model has no chat template")
        return await self.worker.tokenize_segments(await self.template.segments(messages))
