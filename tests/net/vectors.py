"""Writes protocol/vectors/membership.json: `python -m tests.net.vectors`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshnode.keys import NodeKey
from meshnode.mesh import Generation
from meshnode.net.membership import Hello, Limits, Proof, Refusal, proof
from meshnode.net.rotation import Handed, Taken
from meshnode.wire.cbor import dumps
from meshnode.wire.schema import encode_nested

PATH = Path(__file__).parents[2] / "protocol/vectors/membership.json"
INITIATOR, RESPONDER = NodeKey(bytes(32)).peer, NodeKey(bytes([1]) * 32).peer
NONCES = (bytes(range(32)), bytes(range(32, 64)))
SECRET = bytes(range(64, 96))
GENERATIONS = (Generation(1, bytes([1]) * 32), Generation(0, SECRET))


def _proof(name: str, secret: bytes | None, mesh_id: str, role: str) -> dict[str, Any]:
    return {
        "name": name,
        "secret": secret.hex() if secret else None,
        "mesh_id": mesh_id,
        "role": role,
        "initiator": INITIATOR,
        "responder": RESPONDER,
        "initiator_nonce": NONCES[0].hex(),
        "responder_nonce": NONCES[1].hex(),
        "proof": proof(mesh_id, secret, role, INITIATOR, RESPONDER, NONCES).hex(),
    }


def _message(name: str, kind: str, raw: bytes, **more: str) -> dict[str, str]:
    return {"name": name, "kind": kind, "hex": raw.hex(), **more}


def vectors() -> dict[str, Any]:
    nonce = NONCES[0]
    hello = Hello(1, (1,), "mesh", nonce)
    full = Hello(1, (2, 1), "mesh", nonce, ("x",), Limits(100, 0))
    rotated = Hello(1, (1,), "mesh", nonce, ("rotates",), generations=tuple(g.name for g in GENERATIONS))
    base = {0: 1, 2: [1], 4: "mesh", 6: nonce}
    refused = {
        "nothing": b"",
        "an array": dumps([1]),
        "no kind": dumps({2: [1], 4: "mesh", 6: nonce}),
        "an unknown kind": dumps({0: 9}),
        "a proof where a hello is due": encode_nested(Proof(2, b"")),
        "an unknown even key": dumps(base | {12: 1}),
        "a nonce too short": dumps(base | {6: nonce[:31]}),
        "no nonce": dumps({0: 1, 2: [1], 4: "mesh"}),
        "no mesh id": dumps({0: 1, 2: [1], 6: nonce}),
        "an empty mesh id": dumps(base | {4: ""}),
        "a mesh id of bytes": dumps(base | {4: b"mesh"}),
        "nine versions": dumps(base | {2: [1] * 9}),
        "a version of 256": dumps(base | {2: [256]}),
        "five generations": dumps(base | {11: [bytes(8)] * 5}),
        "a generation of 7 bytes": dumps(base | {11: [bytes(7)]}),
        "a default spelled out": dumps(base | {7: []}),
        "trailing bytes": encode_nested(hello) + b"\0",
        "a repeated key": bytes.fromhex("a200010001"),
        "an indefinite map": b"\xbf" + encode_nested(hello)[1:] + b"\xff",
    }
    return {
        "what": "hello, the handshake that makes a member; see protocol/02-membership.md",
        "provenance": "python -m tests.net.vectors",
        "version": 1,
        "proofs": [
            _proof("the initiator's", SECRET, "mesh", "initiator"),
            _proof("the responder's", SECRET, "mesh", "responder"),
            _proof("of a mesh with another name", SECRET, "mésh", "initiator"),
            _proof("of a public mesh", None, "mesh", "initiator"),
        ],
        "messages": [
            _message("a hello with defaults", "hello", encode_nested(hello)),
            _message("a hello with everything", "hello", encode_nested(full)),
            _message("a hello of a mesh whose secret was replaced", "hello", encode_nested(rotated)),
            _message("a hello with an unknown odd key", "hello", dumps(base | {13: "later"})),
            _message("a proof", "proof", encode_nested(Proof(2, bytes(32)))),
            _message("a proof of a public mesh", "proof", encode_nested(Proof(2, b""))),
            _message(
                "a refusal", "refusal", encode_nested(Refusal(3, "version_mismatch", "old")), code="version_mismatch"
            ),
            _message(
                "a refusal of a later time", "refusal", encode_nested(Refusal(3, "moon_phase")), code="not_member"
            ),
        ],
        "generations": [{"secret": g.secret.hex(), "name": g.name.hex(), "number": g.number} for g in GENERATIONS],
        "handed": [
            _message("to all", "handed", encode_nested(Handed(4, 1, GENERATIONS[0].secret, 86_400_000))),
            _message("not to one", "handed", encode_nested(Handed(4, 1, SECRET, 0, (INITIATOR,)))),
            _message("taken", "taken", encode_nested(Taken(5, tuple(g.name for g in GENERATIONS)))),
        ],
        "refused": [{"name": name, "hex": raw.hex()} for name, raw in refused.items()],
    }


if __name__ == "__main__":
    PATH.write_text(json.dumps(vectors(), indent=1, ensure_ascii=False) + "\n")
