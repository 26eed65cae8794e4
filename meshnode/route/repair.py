"""What the next epoch of a session may look like: who goes on, who takes a lost hop's place. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import MeshError
from ..wire.messages import Kept, Lease, Offer


def kept_of(leases: Iterable[Lease]) -> tuple[Kept, ...]:
    """A route's hops, as the next epoch's route-open names them."""
    return tuple(Kept(lease.node, lease.effective, lease.recipe, lease.fingerprint) for lease in leases)


def at(repair: Sequence[Kept], begin: int) -> Kept | None:
    """The hop that began at a layer; None when nothing is repaired. MeshError bad_lease when none began there."""
    if not repair:
        return None
    for kept in repair:
        if kept.effective.begin == begin:
            return kept
    raise MeshError("bad_lease", f"no hop of the epoch before begins at layer {begin}")


def unfit(kept: Kept | None, offer: Offer) -> str | None:
    """Why an offer cannot take a hop's place; None when it can. KV is never mixed across recipes."""
    if kept is None:
        return None
    if not offer.holding.holds(kept.effective):
        return f"holds {offer.holding}, all of {kept.effective} is needed"
    if (offer.recipe, offer.fingerprint) != (kept.recipe, kept.fingerprint):
        return "computes by another recipe than the hop that it would replace"
    return None


def check_repaired(leases: Sequence[Lease], repair: Sequence[Kept]) -> None:
    """MeshError bad_lease unless a route has the borders and recipes of the epoch before."""
    if not repair:
        return
    if len(leases) != len(repair):
        raise MeshError("bad_lease", f"a repaired route of {len(leases)} hops where {len(repair)} were")
    for lease, kept in zip(leases, repair, strict=True):
        if (lease.effective, lease.recipe, lease.fingerprint) != (kept.effective, kept.recipe, kept.fingerprint):
            raise MeshError("bad_lease", f"the lease of {lease.node} is no equal of the hop that it replaces")


def base_of(cached: Iterable[int]) -> int:
    """Positions that some hop holds from earlier epochs: what is computed of them again is a replay."""
    return max(cached, default=0)
