"""Invites: one line of text that lets a machine into a mesh. Pure: the clock is passed in.

    meshnode-invite-1.<base64url without padding of: deterministic CBOR, then 8 bytes of its SHA-256>

Who has the line is in: it holds the mesh's secret. The digest tells a line that was cut or mistyped from a sound one;
it proves nothing about who made it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass

from ..errors import MeshError
from ..mesh import MAX_NUMBER, SECRET_BYTES, Mesh
from . import cbor
from .messages import ADDRESSES
from .schema import Kind, encode_nested, field, nested, octets, text, uint

PREFIX = "meshnode-invite-1."
FAMILY = "meshnode-invite-"
CHECK_BYTES = 8  # a slip passes once in 2^64
MAX_LINE = 4096  # 8 addresses of 200 bytes and all else, in base64, are under 2,400 characters

_SECRET = octets(SECRET_BYTES)
_SECRET_OR_NULL = Kind(
    lambda value: None if value is None else _SECRET.encode(value),
    lambda value: None if value is None else _SECRET.decode(value),
)


@dataclass(frozen=True)
class Invite:
    """The mesh, its secret (None: public), addresses of members to begin with, and when it lapses (unix seconds)."""

    mesh_id: str = field(2, text(64, 1))
    secret: bytes | None = field(4, _SECRET_OR_NULL)
    addresses: tuple[str, ...] = field(6, ADDRESSES)
    expires: int = field(8, uint())
    generation: int = field(9, uint(MAX_NUMBER), default=0)  # of the secret

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.mesh_id, self.secret, self.generation)

    def to_line(self) -> str:
        raw = encode_nested(self)
        return PREFIX + base64.urlsafe_b64encode(raw + _check(raw)).rstrip(b"=").decode()

    def current(self, now: float) -> Invite:
        """Itself; MeshError invite_expired when it lapsed before `now` (unix seconds)."""
        if now >= self.expires:
            raise MeshError("invite_expired", f"the invite to {self.mesh_id} expired {_ago(now - self.expires)} ago")
        return self

    def __repr__(self) -> str:  # a secret never reaches a log
        return f"Invite({self.mesh_id}, {', '.join(self.addresses)}, expires={self.expires})"


def parse(line: str) -> Invite:
    """The invite in a line of text; MeshError bad_invite unless it is a whole and sound one."""
    line = line.strip()
    if not line.startswith(PREFIX):
        if line.startswith(FAMILY):
            raise MeshError("bad_invite", "the invite is of another version", hint="upgrade the older of the two nodes")
        raise MeshError("bad_invite", f"this is no invite: it does not begin with {PREFIX}")
    if len(line) > MAX_LINE:
        raise MeshError("bad_invite", f"an invite has at most {MAX_LINE} characters, this has {len(line)}")
    body = line[len(PREFIX) :]
    try:
        if "+" in body or "/" in body:  # which the decoder would take for - and _
            raise ValueError("not of this alphabet")
        packed = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise MeshError("bad_invite", "the invite has characters that no invite has") from error
    raw, check = packed[:-CHECK_BYTES], packed[-CHECK_BYTES:]
    if len(packed) <= CHECK_BYTES or _check(raw) != check:
        raise MeshError("bad_invite", "the invite is cut short or mistyped: its check sum does not fit")
    try:
        invite: Invite = nested(Invite).decode(cbor.loads(raw))
        _ = invite.mesh  # its id and secret are sound
    except (ValueError, MeshError) as error:
        raise MeshError("bad_invite", f"the invite cannot be understood: {error}") from error
    return invite


def _check(raw: bytes) -> bytes:
    return hashlib.sha256(b"meshnode/1/invite\0" + raw).digest()[:CHECK_BYTES]


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
