"""The entry node's checks of a route that was negotiated by others."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..errors import MeshError
from ..ids import PeerId
from ..wire import statements
from ..wire.messages import Grant, Lease, Signed

MIN_TTL_MS = 1000  # a shorter lease would keep its entry node busy with renewals


def check_route(
    signed: Sequence[Signed], grant: Grant, mesh_id: str, head: PeerId, excluded: Collection[PeerId] = ()
) -> list[Lease]:
    """The leases of a route, the head's first.

    MeshError bad_lease (or bad_signature) unless each is signed by its own node for this session, epoch and contract,
    their effective ranges tile [0, n_layer) exactly once within their holdings, each names its neighbours, and none is
    of an excluded node.
    """
    leases = [statements.check(s, Lease, mesh_id, by=s.signer) for s in signed]
    contract = statements.contract_digest(grant.contract)
    at = 0
    for index, (lease, statement) in enumerate(zip(leases, signed, strict=True)):
        last = index == len(leases) - 1
        before = leases[index - 1].node if index else grant.entry
        after = leases[0].node if last else leases[index + 1].node
        faults = {
            "it is signed by another node": lease.node != statement.signer,
            "the head is not the node that was asked": index == 0 and lease.node != head,
            "it is of another session or epoch": (lease.session, lease.epoch) != (grant.session, grant.epoch),
            "it is of another contract": lease.contract != contract,
            "its place in the route is another": lease.hop != index,
            f"its layers {lease.effective} do not begin at {at}": lease.effective.begin != at,
            f"it runs {lease.effective} but holds {lease.holding}": not lease.holding.holds(lease.effective),
            "its predecessor is not the hop before it": lease.predecessor != before,
            "its successor is not the hop after it": lease.successor != after,
            f"its context of {lease.context} is less than {grant.context}": lease.context < grant.context,
            "its node is excluded": lease.node in excluded,
            f"it lives for {lease.ttl} ms only": lease.ttl < MIN_TTL_MS,
        }
        for fault, found in faults.items():
            if found:
                raise MeshError("bad_lease", f"the lease of {lease.node}: {fault}")
        at = lease.effective.end
    if at != grant.contract.n_layer:
        raise MeshError("bad_lease", f"the route ends at layer {at} of {grant.contract.n_layer}")
    return leases
