"""Signed statements: what a node says under its name, and can be held to."""

from __future__ import annotations

import hashlib
import re
from typing import Any, TypeVar

from .. import keys
from ..errors import MeshError
from ..keys import NodeKey
from . import schema
from .messages import Contract, Signed

S = TypeVar("S")


def domain(cls: type) -> str:
    """RouteOpen -> route-open: the statement's name in its signature and in the CDDL."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower()


def sign(key: NodeKey, mesh_id: str, statement: Any) -> Signed:
    raw = schema.encode(statement)
    return Signed(key.peer, raw, key.sign(domain(type(statement)), mesh_id, raw))


def check(signed: Signed, cls: type[S], mesh_id: str, *, by: str | None = None) -> S:
    """The statement; MeshError bad_signature unless its signer (who must be `by`) signed it in this mesh."""
    if by is not None and signed.signer != by:
        raise MeshError("bad_signature", f"a {domain(cls)} of {by} is signed by {signed.signer}")
    keys.verify(signed.signer, domain(cls), mesh_id, signed.raw, signed.signature)
    return schema.decode(signed.raw, cls)


def digest(signed: Signed) -> bytes:
    """What names a statement: SHA-256 of its raw bytes."""
    return hashlib.sha256(signed.raw).digest()


def contract_digest(contract: Contract) -> bytes:
    return hashlib.sha256(b"meshnode/1/contract\0" + schema.encode_nested(contract)).digest()
