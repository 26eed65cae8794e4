"""Who is let in: the generations of the mesh's secret as they are now, and the peers that this node denies."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from ..errors import MeshError
from ..mesh import Generation, Mesh

log = logging.getLogger(__name__)


class Admission:
    """on_change hold callbacks(mesh) for when the secret is replaced. They must not wait."""

    def __init__(self, mesh: Mesh, denied: Iterable[str] = ()) -> None:
        self._mesh = mesh
        self.denied = set(denied)
        self.on_change: list[Callable[[Mesh], None]] = []

    @property
    def mesh(self) -> Mesh:
        self._mesh = self._mesh.at(time.time())
        return self._mesh

    def check(self, peer: str) -> None:
        """MeshError denied for a peer that this node denies."""
        if peer in self.denied:
            raise MeshError("denied", f"{peer} is denied by this node")

    def left(self, generation: Generation) -> float:
        """Seconds that it still counts; 0 when it has ended."""
        return max(0.0, (generation.ends or 0.0) - time.time())

    def rotate(self, overlap_s: float, without: Iterable[str]) -> Mesh:
        """Replaces the secret. MeshError bad_config for a public mesh."""
        return self._become(self._mesh.rotated(time.time(), overlap_s, without))

    def take(self, generation: Generation, overlap_s: float) -> Mesh:
        """Takes the word of a member for a newer secret. MeshError bad_frame."""
        return self._become(self._mesh.taking(generation, time.time(), overlap_s))

    def _become(self, mesh: Mesh) -> Mesh:
        changed = mesh.number != self._mesh.number or mesh.secret != self._mesh.secret
        self._mesh = mesh
        if changed:
            log.info("the mesh's secret is of generation %d now", mesh.number)
            for callback in tuple(self.on_change):
                callback(mesh)
        return mesh


def common(ours: Sequence[Generation], names: Sequence[bytes]) -> Generation | None:
    """The newest generation of ours that a peer names too; None where a public mesh meets itself.

    A peer that names none is of a version before there were generations: it has the oldest. MeshError not_member.
    """
    if not ours:
        if names:
            raise MeshError("not_member", "the peer's mesh of this name has a secret, ours is public")
        return None
    if not names:
        return ours[-1]
    for generation in ours:
        if generation.name in names:
            return generation
    raise MeshError("not_member", "the peer's secret is none of this mesh, or was replaced since")
