"""Hello: two peers agree on a version and prove to each other that they are of one mesh (protocol/02-membership.md).

The dialler says hello, the listener answers with its own; then each proves that it knows the mesh's secret, the dialler
first. Whoever finds a fault says it in a Refusal, and the connection is closed. A public mesh has no secret; its proofs
are empty, and never accepted by a mesh that has one.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import CODES, MeshError
from ..wire import cbor
from ..wire.framing import MAX_HEADER, MAX_PAYLOAD
from ..wire.messages import WIRE_VERSION
from ..wire.schema import Kind, encode_nested, field, integer, integers, listing, nested, octets, prose, text, uint
from .stream import PeerStream

VERSIONS = (WIRE_VERSION,)  # spoken here; once there is a second one, also the one before the newest
LABEL = "meshnode/1/hello"  # keeps these proofs apart from everything else the secret may come to be used for
MAX_MESSAGE = 1 << 10  # bytes of any message of hello
MAX_ITEMS = 64  # CBOR items in it
NONCE_BYTES = 32
SECRET_BYTES = 32
CAPABILITIES: tuple[str, ...] = ()  # optional abilities that both sides have to know of; none yet

M = TypeVar("M")


@dataclass(frozen=True)
class Membership:
    """What makes a peer a member: the mesh's name, and its secret of 256 bits (None: a public mesh)."""

    mesh_id: str
    secret: bytes | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.mesh_id.encode()) <= 64:
            raise MeshError("bad_invite", "a mesh id has 1 to 64 bytes")
        if self.secret is not None and len(self.secret) != SECRET_BYTES:
            raise MeshError("bad_invite", f"a mesh secret has {SECRET_BYTES} bytes")

    def __repr__(self) -> str:  # a secret never reaches a log
        return f"Membership({self.mesh_id!r}, {'public' if self.secret is None else 'secret'})"


def _kind(number: int) -> Kind:
    return integer(number, number)


@dataclass(frozen=True)
class Limits:
    """The largest frame that the sender takes."""

    header: int = field(1, uint())
    payload: int = field(3, uint())


@dataclass(frozen=True)
class Hello:
    kind: int = field(0, _kind(1))
    versions: tuple[int, ...] = field(2, integers(255, 8))
    mesh_id: str = field(4, text(64, 1))
    nonce: bytes = field(6, octets(NONCE_BYTES))
    capabilities: tuple[str, ...] = field(7, listing(text(32, 1), 16), default=())
    limits: Limits = field(9, nested(Limits), default=Limits(MAX_HEADER, MAX_PAYLOAD))


@dataclass(frozen=True)
class Proof:
    kind: int = field(0, _kind(2))
    proof: bytes = field(2, octets(0, 32))


@dataclass(frozen=True)
class Refusal:
    kind: int = field(0, _kind(3))
    code: str = field(2, text(40, 1))
    say: str = field(5, prose(200), default="")


@dataclass(frozen=True)
class Agreement:
    """What hello led to."""

    version: int
    capabilities: frozenset[str]
    limits: Limits


def proof(membership: Membership, role: str, initiator: str, responder: str, nonces: tuple[bytes, bytes]) -> bytes:
    """What the peer in `role` shows: 32 bytes, or none in a public mesh. `nonces`: the initiator's first."""
    if membership.secret is None:
        return b""
    covered = cbor.dumps([LABEL, membership.mesh_id, role, initiator, responder, *nonces])
    return hmac.digest(membership.secret, covered, "sha256")


def agree(own: Hello, theirs: Hello) -> Agreement:
    """MeshError not_member or version_mismatch when the two do not fit."""
    if own.mesh_id != theirs.mesh_id:
        raise MeshError("not_member", "the peer belongs to another mesh")
    common = set(own.versions) & set(theirs.versions)
    if not common:
        raise MeshError("version_mismatch", f"the peer speaks versions {theirs.versions}, we {own.versions}")
    return Agreement(max(common), frozenset(own.capabilities) & frozenset(theirs.capabilities), theirs.limits)


def decode(raw: bytes, expected: type[M]) -> M:
    """A message of hello. MeshError bad_frame for anything else; a Refusal is raised as the MeshError it is."""
    value = cbor.loads(raw, max_items=MAX_ITEMS)
    kind: Any = value.get(0) if isinstance(value, dict) else None
    cls = {1: Hello, 2: Proof, 3: Refusal}.get(kind) if type(kind) is int else None
    if cls is None or cls not in (expected, Refusal):
        raise MeshError("bad_frame", f"no {expected.__name__} in hello")
    try:
        message = nested(cls).decode(value)
    except ValueError as error:
        raise MeshError("bad_frame", f"{cls.__name__}: {error}") from error
    if isinstance(message, Refusal):
        raise Refused(message)
    return message  # type: ignore[no-any-return]


class Refused(MeshError):
    """The peer's word that we do not fit; it needs no answer."""

    def __init__(self, refusal: Refusal) -> None:
        code = refusal.code if refusal.code in CODES else "not_member"
        super().__init__(code, f"the peer refuses: {refusal.say}")


class Party:
    """This node's side of hello."""

    def __init__(self, membership: Membership, peer: str, versions: Sequence[int] = VERSIONS) -> None:
        self.membership = membership
        self.peer = peer
        self.versions = tuple(versions)

    def _hello(self) -> Hello:
        return Hello(1, self.versions, self.membership.mesh_id, secrets.token_bytes(NONCE_BYTES), CAPABILITIES)

    async def introduce(self, stream: PeerStream) -> Agreement:
        """As the dialler. MeshError when the peer is no member, or we are none to it."""
        async with _telling(stream):
            ours = self._hello()
            await _send(stream, ours)
            theirs = await _receive(stream, Hello)
            agreement = agree(ours, theirs)
            ends, nonces = (self.peer, stream.peer), (ours.nonce, theirs.nonce)
            await _send(stream, Proof(2, proof(self.membership, "initiator", *ends, nonces)))
            self._check(await _receive(stream, Proof), "responder", ends, nonces)
            return agreement

    async def welcome(self, stream: PeerStream, admit: Callable[[Agreement], None]) -> None:
        """As the listener. Admits before it answers: the peer may use what it is given at once."""
        async with _telling(stream):
            theirs = await _receive(stream, Hello)
            ours = self._hello()
            agreement = agree(ours, theirs)  # before our hello: a stranger does not learn our mesh's name
            await _send(stream, ours)
            ends, nonces = (stream.peer, self.peer), (theirs.nonce, ours.nonce)
            self._check(await _receive(stream, Proof), "initiator", ends, nonces)
            admit(agreement)
            await _send(stream, Proof(2, proof(self.membership, "responder", *ends, nonces)))

    def _check(self, shown: Proof, role: str, ends: tuple[str, str], nonces: tuple[bytes, bytes]) -> None:
        if not hmac.compare_digest(shown.proof, proof(self.membership, role, *ends, nonces)):
            raise MeshError("not_member", "the peer does not know this mesh's secret")


@asynccontextmanager
async def _telling(stream: PeerStream) -> AsyncIterator[None]:
    """Says to the peer what we find wrong with it."""
    try:
        yield
    except Refused:
        raise
    except MeshError as error:
        if error.code != "unreachable":
            await _send(stream, Refusal(3, error.code, error.message))
            await stream.aclose()
        raise


async def _send(stream: PeerStream, message: Hello | Proof | Refusal) -> None:
    await stream.send(encode_nested(message))


async def _receive(stream: PeerStream, expected: type[M]) -> M:
    raw, _ = await stream.receive()
    return decode(raw, expected)
