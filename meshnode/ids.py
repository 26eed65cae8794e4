"""Names of things: artifacts, layers, sessions, peers. Pure values with one text form each."""

from __future__ import annotations

import itertools
import re
import secrets
from dataclasses import dataclass
from typing import NewType

from .errors import MeshError

PeerId = NewType("PeerId", str)  # base58 libp2p id of an Ed25519 key, "12D3KooW..."
ArtifactId = NewType("ArtifactId", str)  # "sha256:<64 hex>" or "shards:<64 hex>"
SessionId = NewType("SessionId", bytes)  # 128 random bits

SESSION_BYTES = 16
_ARTIFACT = re.compile(r"(sha256|shards):[0-9a-f]{64}")


def artifact_id(text: str) -> ArtifactId:
    """The identity in `text`; MeshError unknown_model when it is none."""
    if not _ARTIFACT.fullmatch(text):
        raise MeshError("unknown_model", f"{text!r} is no content identity (sha256:<64 hex digits>)")
    return ArtifactId(text)


def new_session() -> SessionId:
    return SessionId(secrets.token_bytes(SESSION_BYTES))


@dataclass(frozen=True, order=True)
class Layers:
    """Layers [begin, end) of an artifact: 0-based, half-open, never empty."""

    begin: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.begin < self.end:
            raise MeshError("bad_layers", f"layers {self.begin}-{self.end} are empty or reversed")

    def __str__(self) -> str:
        return f"{self.begin}-{self.end}"

    def __len__(self) -> int:
        return self.end - self.begin

    def __contains__(self, layer: int) -> bool:
        return self.begin <= layer < self.end

    def holds(self, other: Layers) -> bool:
        return self.begin <= other.begin and other.end <= self.end

    def within(self, n_layer: int) -> Layers:
        """Itself; MeshError bad_layers when the model has fewer layers."""
        if self.end > n_layer:
            raise MeshError("bad_layers", f"layers {self} reach beyond the model, which has {n_layer}")
        return self


def parse_layers(text: str) -> Layers:
    """`A-B`, half-open and 0-based."""
    match = re.fullmatch(r"\s*(\d{1,6})\s*-\s*(\d{1,6})\s*", text)
    if not match:
        raise MeshError("bad_layers", f"{text!r} is no range of layers", hint="write it A-B, for example 0-10")
    return Layers(int(match[1]), int(match[2]))


def gaps(covered: list[Layers], n_layer: int) -> list[Layers]:
    """The layers of [0, n_layer) that none of `covered` holds."""
    missing, at = [], 0
    for layers in sorted(covered):
        if layers.begin > at:
            missing.append(Layers(at, layers.begin))
        at = max(at, layers.end)
    if at < n_layer:
        missing.append(Layers(at, n_layer))
    return missing


def share_evenly(n_layer: int, parts: int) -> list[Layers]:
    """[0, n_layer) in `parts` ranges whose lengths differ by one at most, the longer ones first."""
    if not 1 <= parts <= n_layer:
        raise MeshError("bad_layers", f"{n_layer} layers cannot be shared by {parts} nodes")
    size, longer = divmod(n_layer, parts)
    cuts = [0]
    for part in range(parts):
        cuts.append(cuts[-1] + size + (part < longer))
    return [Layers(a, b) for a, b in itertools.pairwise(cuts)]
