"""A node's one key: its libp2p Ed25519 key, which also signs all that it says.

Every signature covers `meshnode/1/<message>`, the mesh id and the raw bytes, so that nothing signed for one purpose
or one mesh can be shown for another.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import base58
from nacl.exceptions import BadSignatureError
from nacl.signing import SigningKey, VerifyKey

from .errors import MeshError
from .ids import PeerId

# An identity multihash of libp2p's protobuf {type: Ed25519, data: the 32 bytes}: the peer id embeds the key.
_PEER_PREFIX = bytes.fromhex("0024080112 20".replace(" ", ""))


EXPORT_FAMILY = "meshnode-key-1:"


@dataclass(frozen=True)
class NodeKey:
    seed: bytes

    @classmethod
    def generate(cls) -> NodeKey:
        return cls(os.urandom(32))

    @cached_property
    def _signing(self) -> SigningKey:
        return SigningKey(self.seed)

    @property
    def public(self) -> bytes:
        return bytes(self._signing.verify_key)

    @cached_property
    def peer(self) -> PeerId:
        return peer_of(self.public)

    def sign(self, domain: str, mesh_id: str, raw: bytes) -> bytes:
        """64 bytes over what `signed_bytes` gives."""
        return self._signing.sign(signed_bytes(domain, mesh_id, raw)).signature

    def __repr__(self) -> str:  # a key never reaches a log
        return f"NodeKey({self.peer})"


def signed_bytes(domain: str, mesh_id: str, raw: bytes) -> bytes:
    """The two names with their lengths before them, so that no shift of a border between them gives the same bytes."""
    names = (f"meshnode/1/{domain}".encode(), mesh_id.encode())
    return b"".join(len(name).to_bytes(2, "big") + name for name in names) + raw


def verify(peer: PeerId, domain: str, mesh_id: str, raw: bytes, signature: bytes) -> None:
    """Raises MeshError bad_signature unless `peer` signed exactly this."""
    try:
        VerifyKey(public_of(peer)).verify(signed_bytes(domain, mesh_id, raw), signature)
    except (BadSignatureError, ValueError) as error:
        raise MeshError("bad_signature", f"a {domain} is not signed by {peer}") from error


def peer_of(public: bytes) -> PeerId:
    return PeerId(base58.b58encode(_PEER_PREFIX + public).decode())


@functools.lru_cache(maxsize=4096)  # asked for with every signature
def public_of(peer: PeerId) -> bytes:
    """The 32 bytes of the Ed25519 key that a peer id embeds."""
    try:
        raw = base58.b58decode(peer)
    except ValueError as error:
        raise MeshError("bad_frame", f"{peer[:80]!r} is no peer id") from error
    if len(raw) != len(_PEER_PREFIX) + 32 or not raw.startswith(_PEER_PREFIX):
        raise MeshError("bad_frame", f"{peer[:80]!r} is no peer id of an Ed25519 key")
    return bytes(raw[len(_PEER_PREFIX) :])


def export_line(key: NodeKey) -> str:
    """The key as one line of text, with its peer id behind it, which finds a slip of the pen."""
    return f"{EXPORT_FAMILY}{base58.b58encode(key.seed).decode()}:{key.peer}"


def import_line(line: str) -> NodeKey:
    """What `export_line` wrote. MeshError bad_key."""
    secret, _, peer = line.strip().removeprefix(EXPORT_FAMILY).partition(":")
    try:
        seed = base58.b58decode(secret)
    except ValueError:
        seed = b""
    if not line.startswith(EXPORT_FAMILY) or len(seed) != 32 or NodeKey(seed).peer != peer:
        raise MeshError("bad_key", "this is no exported key")
    return NodeKey(seed)


def load_or_create(path: Path) -> NodeKey:
    """The key in a file of mode 600, made when there is none."""
    try:
        return load(path)
    except FileNotFoundError:
        key = NodeKey.generate()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(key.seed)
            file.flush()
            os.fsync(file.fileno())
        return key


def load(path: Path) -> NodeKey:
    """The key in a file. FileNotFoundError; MeshError bad_home when the file holds none."""
    seed = path.read_bytes()
    if len(seed) != 32:
        raise MeshError("bad_home", f"{path.name} is no node key: {len(seed)} bytes instead of 32")
    return NodeKey(seed)
