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
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ..errors import CODES, MeshError
from ..mesh import MAX_GENERATIONS, NAME_BYTES
from ..wire import cbor
from ..wire.framing import MAX_HEADER, MAX_PAYLOAD
from ..wire.messages import WIRE_VERSION
from ..wire.schema import Kind, encode_nested, field, integer, integers, listing, nested, octets, prose, text, uint
from .admission import Admission, common
from .stream import PeerStream

VERSIONS = tuple(v for v in (WIRE_VERSION, WIRE_VERSION - 1) if v >= 1)  # the newest, and the one before it
LABEL = "meshnode/1/hello"  # keeps these proofs apart from everything else the secret may come to be used for
MAX_MESSAGE = 1 << 10  # bytes of any message of hello
MAX_ITEMS = 64  # CBOR items in it
NONCE_BYTES = 32
ROTATES = "rotates"  # takes newer generations of the secret from members
CAPABILITIES: tuple[str, ...] = (ROTATES,)  # optional abilities that both sides have to know of

M = TypeVar("M")


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
    generations: tuple[bytes, ...] = field(11, listing(octets(NAME_BYTES), MAX_GENERATIONS), default=())


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
    generations: tuple[bytes, ...] = ()  # of the secret, that the peer has: names, newest first


def proof(
    mesh_id: str, secret: bytes | None, role: str, initiator: str, responder: str, nonces: tuple[bytes, bytes]
) -> bytes:
    """What the peer in `role` shows: 32 bytes, or none in a public mesh. `nonces`: the initiator's first."""
    if secret is None:
        return b""
    covered = cbor.dumps([LABEL, mesh_id, role, initiator, responder, *nonces])
    return hmac.digest(secret, covered, "sha256")


def agree(own: Hello, theirs: Hello) -> Agreement:
    """MeshError not_member or version_mismatch when the two do not fit."""
    if own.mesh_id != theirs.mesh_id:
        raise MeshError("not_member", "the peer belongs to another mesh")
    versions = set(own.versions) & set(theirs.versions)
    if not versions:
        raise MeshError("version_mismatch", f"the peer speaks versions {theirs.versions}, we {own.versions}")
    both = frozenset(own.capabilities) & frozenset(theirs.capabilities)
    return Agreement(max(versions), both, theirs.limits, theirs.generations)


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

    def __init__(self, admission: Admission, peer: str, versions: Sequence[int] = VERSIONS) -> None:
        self.admission = admission
        self.peer = peer
        self.versions = tuple(versions)

    def _hello(self) -> Hello:
        mesh = self.admission.mesh
        names = tuple(generation.name for generation in mesh.generations)
        nonce = secrets.token_bytes(NONCE_BYTES)
        return Hello(1, self.versions, mesh.mesh_id, nonce, CAPABILITIES, generations=names)

    def _agree(self, ours: Hello, theirs: Hello) -> tuple[Agreement, bytes | None]:
        """Also the secret that both have to know. MeshError not_member or version_mismatch."""
        agreement = agree(ours, theirs)
        generation = common(self.admission.mesh.generations, theirs.generations)
        if generation is None:
            return agreement, None
        return replace(agreement, generations=theirs.generations or (generation.name,)), generation.secret

    async def introduce(self, stream: PeerStream) -> Agreement:
        """As the dialler. MeshError when the peer is no member, or we are none to it."""
        async with _telling(stream):
            ours = self._hello()
            await _send(stream, ours)
            theirs = await _receive(stream, Hello)
            agreement, secret = self._agree(ours, theirs)
            ends, nonces = (self.peer, stream.peer), (ours.nonce, theirs.nonce)
            await _send(stream, Proof(2, proof(ours.mesh_id, secret, "initiator", *ends, nonces)))
            _check(await _receive(stream, Proof), proof(ours.mesh_id, secret, "responder", *ends, nonces))
            return agreement

    async def welcome(self, stream: PeerStream, admit: Callable[[Agreement], None]) -> None:
        """As the listener. Admits before it answers: the peer may use what it is given at once."""
        async with _telling(stream):
            theirs = await _receive(stream, Hello)
            if stream.peer in self.admission.denied:
                raise MeshError("not_member", "this node's operator denies the peer")
            ours = self._hello()
            agreement, secret = self._agree(ours, theirs)  # before our hello: a stranger does not learn our mesh's name
            await _send(stream, ours)
            ends, nonces = (stream.peer, self.peer), (theirs.nonce, ours.nonce)
            _check(await _receive(stream, Proof), proof(ours.mesh_id, secret, "initiator", *ends, nonces))
            admit(agreement)
            await _send(stream, Proof(2, proof(ours.mesh_id, secret, "responder", *ends, nonces)))


def _check(shown: Proof, due: bytes) -> None:
    if not hmac.compare_digest(shown.proof, due):
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
