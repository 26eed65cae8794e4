"""A mesh: its name, and the generations of the secret that proves membership of it. Pure: the clock is passed in.

A private mesh has one secret that counts, and for a while after it was replaced also those before it. Generations are
ordered by their number; where two members replaced the secret at once, the name decides, the same way for everybody.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from .errors import MeshError

T = TypeVar("T")

SECRET_BYTES = 32
PUBLIC_MESH_ID = "public"
MAX_GENERATIONS = 4  # that count at once: the newest, the one before it, and those of members who rotated meanwhile
MAX_NUMBER = (1 << 32) - 1
MAX_LEAP = 1024  # between a generation and the one it replaces: a member was away, but not for that long
MAX_WITHOUT = 16  # peers that a generation is kept from
NAME_BYTES = 8
OVERLAP_S = 24 * 3600.0  # a replaced secret still counts: every machine of a mesh is on once a day


@dataclass(frozen=True)
class Generation:
    """A secret of a mesh. ends: unix seconds at which it counts no longer; None of the newest.

    without: peers that it is not handed to; once it alone counts, they are out.
    """

    number: int
    secret: bytes
    ends: float | None = None
    without: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.secret) != SECRET_BYTES:
            raise MeshError("bad_config", f"a mesh secret has {SECRET_BYTES} bytes")
        if not 0 <= self.number <= MAX_NUMBER:
            raise MeshError("bad_config", f"a generation has a number of 0 to {MAX_NUMBER}")

    @property
    def name(self) -> bytes:
        """8 bytes that tell it from others and nothing of the secret, which is random."""
        return hashlib.sha256(b"meshnode/1/generation\0" + self.secret).digest()[:NAME_BYTES]

    @property
    def order(self) -> tuple[int, bytes]:
        return self.number, self.name

    def __repr__(self) -> str:  # a secret never reaches a log
        return f"Generation({self.number}, {self.name.hex()})"


@dataclass(frozen=True)
class Mesh:
    """Which mesh, and what proves membership of it: the generations of its secret, newest first; public has none."""

    mesh_id: str
    secret: bytes | None = None
    number: int = 0
    without: tuple[str, ...] = ()
    older: tuple[Generation, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= len(self.mesh_id.encode()) <= 64 or not self.mesh_id.isprintable():
            raise MeshError("bad_config", "a mesh id has 1 to 64 printable bytes")
        _ = self.generations  # its secret and number are sound

    @classmethod
    def private(cls) -> Mesh:
        """A new one that nobody else is in."""
        return cls(f"mesh-{secrets.token_hex(8)}", secrets.token_bytes(SECRET_BYTES))

    @classmethod
    def public(cls) -> Mesh:
        return cls(PUBLIC_MESH_ID)

    @property
    def generations(self) -> tuple[Generation, ...]:
        if self.secret is None:
            return ()
        return (Generation(self.number, self.secret, None, self.without), *self.older)

    def at(self, now: float) -> Mesh:
        """Without the generations that have ended by `now` (unix seconds)."""
        older = tuple(g for g in self.older if g.ends is not None and g.ends > now)
        return self if older == self.older else replace(self, older=older)

    def rotated(self, now: float, overlap_s: float, without: Iterable[str] = ()) -> Mesh:
        """With a new secret; those before it count for `overlap_s` longer. MeshError bad_config for a public mesh."""
        if self.secret is None:
            raise MeshError("bad_config", "a public mesh has no secret", hint="private meshes alone can be rotated")
        kept = tuple(dict.fromkeys(without))
        if len(kept) > MAX_WITHOUT:
            raise MeshError("bad_config", f"a secret is kept from at most {MAX_WITHOUT} peers")
        fresh = Generation(self.number + 1, secrets.token_bytes(SECRET_BYTES), None, kept)
        return self.taking(fresh, now, overlap_s)

    def taking(self, generation: Generation, now: float, overlap_s: float) -> Mesh:
        """With a generation heard of, when it is newer than the newest; else itself, without what has ended.

        Those before it count for `overlap_s` longer, at most. MeshError bad_frame for a number beyond MAX_LEAP.
        """
        mesh = self.at(now)
        generations = mesh.generations
        if not generations or generation.name in (g.name for g in generations):
            return mesh
        if generation.number > mesh.number + MAX_LEAP:
            raise MeshError("bad_frame", f"generation {generation.number} cannot follow {mesh.number}")
        if generation.order < generations[0].order:
            return mesh
        ends = now + overlap_s
        older = [replace(g, ends=ends if g.ends is None else min(g.ends, ends)) for g in generations]
        kept = tuple(g for g in older[: MAX_GENERATIONS - 1] if g.ends is not None and g.ends > now)
        return Mesh(mesh.mesh_id, generation.secret, generation.number, generation.without, kept)

    def __repr__(self) -> str:  # a secret never reaches a log
        return f"Mesh({self.mesh_id}, {'public' if self.secret is None else f'generation {self.number}'})"


@dataclass(frozen=True)
class KnownMesh:
    """What mesh.json holds: the mesh, the addresses it was joined by, and those of members seen since."""

    mesh: Mesh
    bootstrap: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where to look for the mesh: each address once, those it was joined by first."""
        return tuple(dict.fromkeys(self.bootstrap + self.peers))


def to_json(known: KnownMesh) -> dict[str, Any]:
    """As mesh.json has it."""
    mesh = known.mesh
    value: dict[str, Any] = {
        "mesh_id": mesh.mesh_id,
        "secret": mesh.secret.hex() if mesh.secret else None,
        "bootstrap": list(known.bootstrap),
        "peers": list(known.peers),
    }
    if mesh.number:
        value |= {"generation": mesh.number, "without": list(mesh.without)}
    if mesh.older:
        value["older"] = [
            {"generation": g.number, "secret": g.secret.hex(), "ends": g.ends, "without": list(g.without)}
            for g in mesh.older
        ]
    return value


def from_json(value: Any, most: int) -> KnownMesh:
    """The inverse, with at most so many addresses. ValueError, TypeError, KeyError or MeshError when it is damaged."""
    older = tuple(
        Generation(_of(g["generation"], int), bytes.fromhex(g["secret"]), float(g["ends"]), _texts(g["without"]))
        for g in _of(value.get("older", []), list)
    )
    secret = value["secret"]
    mesh = Mesh(
        str(value["mesh_id"]),
        None if secret is None else bytes.fromhex(secret),
        _of(value.get("generation", 0), int),
        _texts(value.get("without", [])),
        older[: MAX_GENERATIONS - 1],
    )
    return KnownMesh(mesh, _texts(value["bootstrap"])[:most], _texts(value["peers"])[:most])


def _of(value: Any, kind: type[T]) -> T:
    if type(value) is not kind:
        raise TypeError(f"no {kind.__name__}")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(_of(text, str) for text in _of(value, list))
