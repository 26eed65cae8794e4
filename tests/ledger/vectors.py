"""Chains and what becomes of them, for protocol/vectors/receipts.json, which any reader of the protocol can be held to.

python -m tests.ledger.vectors [--check]      writes the vectors, or tells whether they are current
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshnode.ids import SessionId
from meshnode.ledger import chain, merkle
from meshnode.ledger.account import blind, tag_of, work_id
from meshnode.ledger.rules import Filed
from meshnode.wire import statements
from meshnode.wire.accounts import Acceptance, Receipt
from meshnode.wire.messages import Signed

from .sessions import MESH, D, Session, key_of, play

VECTORS = Path(__file__).parents[2] / "protocol" / "vectors" / "receipts.json"
COMMAND = "python -m tests.ledger.vectors"
ENTRY, KEYS = key_of(1), [key_of(2), key_of(3), key_of(4)]


def judged(signed: Sequence[Signed]) -> list[dict[str, Any]]:
    read = [(chain.read(one, MESH), one) for one in signed]
    receipts = [Filed(statement, one) for statement, one in read if isinstance(statement, Receipt)]
    found = chain.chains(receipts, [s for s, _ in read if isinstance(s, Acceptance)])
    return [{"verdict": c.verdict, "at_odds": sorted({p for f in c.faults for p in f.by})} for c in found]


def changed(session: Session, hop: int, **fields: Any) -> list[Signed]:
    """The session's statements, with one receipt that its own signer has written otherwise."""
    receipts = [list(each) for each in session.receipts]
    receipts[hop][0] = dataclasses.replace(receipts[hop][0], **fields)
    accepted = [statements.sign(session.entry, MESH, acceptance) for acceptance in session.accepted()]
    return [*session.signed(receipts), *accepted]


def cases() -> list[tuple[str, list[Signed]]]:
    session = play(KEYS, ENTRY, prompt=10, tokens=4)
    whole = session.statements()
    middle = session.receipts[1][0]
    other_root = tuple(dataclasses.replace(k, root=D) if k.direction == "out" else k for k in middle.links)
    twice = statements.sign(KEYS[2], MESH, dataclasses.replace(session.receipts[2][0], compute=1))
    stranger = play([key_of(8), key_of(9)], ENTRY, salt="stranger").signed()
    return [
        ("whole", whole),
        ("one hop", play(KEYS[:1], ENTRY).statements()),
        ("one node in two places", play([KEYS[0], KEYS[0]], ENTRY).statements()),
        ("two segments", play(KEYS[:2], ENTRY, prompt=5000, tokens=1).statements()),
        ("no receipt of the middle", [whole[0], whole[2], whole[3]]),
        ("no countersignature", whole[:3]),
        ("the middle says that other bytes went out", changed(session, 1, links=other_root)),
        ("two receipts of one segment", [*whole, twice]),
        ("a stranger's receipts of the same session", [*whole, *stranger]),
    ]


def vectors() -> dict[str, Any]:
    session = SessionId(b"s" * 16)
    ring = blind(session, "ring", 7)
    return {
        "made_by": COMMAND,
        "mesh_id": MESH,
        "session": session.hex(),
        "tag": tag_of(session).hex(),
        "work_id": {"epoch": 1, "hop": 2, "segment": 3, "is": work_id(tag_of(session), 1, 2, 3).hex()},
        "blind": {"kind": "ring", "first": 7, "is": ring.hex()},
        "leaf": {
            "first": 7,
            "count": 1,
            "sha256": D.hex(),
            "is": merkle.leaf(ring, 7, 1, D).hex(),
        },  # type: ignore[arg-type]
        "chains": [
            {
                "case": name,
                "statements": [
                    {"signer": s.signer, "raw": s.raw.hex(), "signature": s.signature.hex()} for s in signed
                ],
                "chains": judged(signed),
            }
            for name, signed in cases()
        ],
    }


def main(arguments: list[str]) -> int:
    text = json.dumps(vectors(), indent=1) + "\n"
    if "--check" in arguments:
        return 0 if VECTORS.read_text() == text else 1
    VECTORS.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
