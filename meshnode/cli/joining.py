"""What --join means: an invite, or the address of a member of a mesh that this home knows or that is public."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ..config import Home
from ..errors import MeshError
from ..mesh import OVERLAP_S, Generation, KnownMesh, Mesh
from ..wire.invite import FAMILY, MAX_LINE, Invite, parse
from . import show
from .options import checked_multiaddr, path_of

MAX_GIVEN = 16  # addresses kept of those that were given: two invites' worth
_PROTOCOLS = ("/ip4/", "/ip6/", "/dns/", "/dns4/", "/dns6/", "/dnsaddr/")


@dataclass(frozen=True)
class Joining:
    """The mesh to be in and where to look for it: addresses that were given, and those of members seen since."""

    mesh: Mesh
    bootstrap: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()

    @property
    def addresses(self) -> tuple[str, ...]:
        return KnownMesh(self.mesh, self.bootstrap, self.peers).addresses


def joining(option: str | None, home: Home, environ: Mapping[str, str] = os.environ) -> Joining:
    """From --join, else MESHNODE_INVITE, else what the home remembers, else a new private mesh.

    MeshError bad_invite, invite_expired, bad_config (the home is in another mesh), usage, or those of files.
    """
    named, wanted = ("--join", option) if option is not None else ("MESHNODE_INVITE", environ.get("MESHNODE_INVITE"))
    if wanted is not None and not wanted.strip():  # to open a new mesh instead would be far from what was meant
        raise MeshError("usage", f"{named} is empty", hint=f"name an invite, or leave {named} out")
    known = home.known_mesh()
    if wanted is None:
        return Joining(known.mesh, known.bootstrap, known.peers) if known else Joining(Mesh.private())
    if wanted.startswith(_PROTOCOLS):
        known = known or KnownMesh(Mesh.public())
        return Joining(known.mesh, _given(_addresses(wanted), known), known.peers)
    now = time.time()
    invite = read_invite(wanted).current(now)
    if known is None:
        return Joining(invite.mesh, invite.addresses)
    if known.mesh.mesh_id != invite.mesh_id:
        raise MeshError(
            "bad_config",
            f"this home is in {known.mesh.mesh_id}; the invite is to {invite.mesh_id}",
            hint="join with another --home, or leave the old mesh by removing mesh.json from this one",
        )
    return Joining(_newer(known.mesh, invite, now), _given(invite.addresses, known), known.peers)


def _addresses(wanted: str) -> tuple[str, ...]:
    """Multiaddrs with a comma or a space between them. MeshError usage."""
    addresses = tuple(map(checked_multiaddr, wanted.replace(",", " ").split()))
    for address in addresses:
        if "/p2p/" not in address:
            hint = "an address to join ends with /p2p/PEER"
            raise MeshError("usage", f"{address[:200]!r} does not say which peer it is", hint=hint)
    return addresses


def _given(addresses: tuple[str, ...], known: KnownMesh) -> tuple[str, ...]:
    """The newest first: the mesh may have moved."""
    return tuple(dict.fromkeys(addresses + known.bootstrap))[:MAX_GIVEN]


def _newer(known: Mesh, invite: Invite, now: float) -> Mesh:
    """The mesh with the newer of the secrets that the home and the invite have."""
    if invite.secret is None or known.secret is None:
        if invite.secret == known.secret:
            return known
        raise MeshError("bad_config", f"the home and the invite know different meshes named {invite.mesh_id}")
    return known.taking(Generation(invite.generation, invite.secret), now, OVERLAP_S)


def read_invite(wanted: str) -> Invite:
    """From its line, from a file, or with `-` from stdin."""
    if wanted.startswith(FAMILY):
        return parse(wanted)
    if wanted == "-":
        return parse(sys.stdin.read(MAX_LINE + 1))
    try:
        # O_NONBLOCK: a FIFO without a writer must not hold us
        descriptor = os.open(path_of(wanted), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        hint = "--join takes the path of an invite, or a multiaddr of a member"
        raise MeshError("not_found", f"there is no invite at {show.line(wanted)}", hint=hint) from error
    except (OSError, ValueError) as error:
        raise MeshError("unreadable", f"the invite at {show.line(wanted)} cannot be read: {error}") from error
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise MeshError("not_a_file", f"{show.line(wanted)} is no regular file", hint="name an invite's file")
        if mode & 0o077:
            show.note(f"others can read {wanted}, and so join the mesh: chmod 600 {wanted}")
        return parse(os.read(descriptor, MAX_LINE + 1).decode(errors="replace"))
    finally:
        os.close(descriptor)
