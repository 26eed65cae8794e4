"""One example of every message, with every field set: for the tests, and for protocol/vectors/messages.json.

python -m tests.wire.examples [--check]      writes the vectors, or tells whether they are current
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import cbor2

from meshnode.ids import Layers
from meshnode.keys import NodeKey
from meshnode.ledger import merkle
from meshnode.wire import accounts, audits, framing, messages, schema, statements

VECTORS = Path(__file__).parents[2] / "protocol" / "vectors" / "messages.json"
COMMAND = "python -m tests.wire.examples"
MESH_ID = "mesh"
KEY = NodeKey(bytes(range(32)))
CONTRACT = messages.Contract("sha256:" + "0" * 64, 1, "llama", "f32", "invariant", 30, 576)  # type: ignore[arg-type]
GRANT = messages.Grant(b"s" * 16, 1, KEY.peer, CONTRACT, 100, audit=True)  # type: ignore[arg-type]
SIGNED = statements.sign(KEY, MESH_ID, GRANT)
D = b"d" * 32
TAG = b"t" * 16
BLIND = b"b" * 16
SIDE = accounts.LinkSide(KEY.peer, "in", "residual", 5, 2, D, replay=True)
NAME = {"session": b"s" * 16, "epoch": 1}
LEASE_ID = b"l" * 8
LOGPROBS = messages.Logprobs(500_000, (messages.Likely(7, 500_000, b"x"),))

EXAMPLES: list[Any] = [
    messages.OfferQuery(b"n" * 16, artifact=CONTRACT.artifact),
    messages.Offer(
        b"n" * 16, KEY.peer, "m", CONTRACT, Layers(0, 10), D, D, 64, 4, 3, ((0, 900),), ("/ip4/127.0.0.1/tcp/1",), True
    ),
    messages.Offers((SIGNED,)),
    messages.Refusal("busy", "why", failed=(messages.Failed(KEY.peer, 3, "busy", say="x"),), attempts=7),
    messages.Tokenize(CONTRACT.artifact, chat=(messages.Turn("user", "hi"),)),
    messages.Tokenized((1, 2)),
    GRANT,
    messages.RouteOpen(
        SIGNED,
        0,
        (messages.Hop(KEY.peer, LEASE_ID, addresses=("/ip4/127.0.0.1/tcp/1",), cached=8),),
        5,
        6,
        messages.Sampling(
            temperature=1,
            top_k=2,
            top_p=3,
            min_p=4,
            seed=5,
            typical_p=6,
            repeat_penalty=7,
            repeat_last_n=8,
            presence_penalty=-9,
            frequency_penalty=10,
            biases=((11, -12),),
            grammar="root ::= [0-9]",
            logprobs=13,
        ),
        (1,),
        9,
        excluded=(KEY.peer,),
        entry_addresses=("/ip4/127.0.0.1/tcp/2",),
        generated=1,
        failed=(messages.Failed(KEY.peer, 3, "busy"),),
        repair=(messages.Kept(KEY.peer, Layers(0, 10), D, D),),
    ),
    messages.Lease(
        lease=LEASE_ID,
        **NAME,  # type: ignore[arg-type]
        hop=0,
        node=KEY.peer,
        predecessor=KEY.peer,
        successor=KEY.peer,
        holding=Layers(0, 10),
        effective=Layers(0, 10),
        contract=D,
        recipe=D,
        fingerprint=D,
        context=64,
        ttl=1000,
        addresses=("/ip4/127.0.0.1/tcp/1",),
        cached=8,
    ),
    messages.RouteReady((SIGNED,), 3, failed=(messages.Failed(KEY.peer, 3, "busy"),)),
    messages.Pushes(
        (
            messages.Push(
                LEASE_ID, **NAME, step=0, first=0, count=2, begin=10, cached=0, sample=True, keep=4, segment=1
            ),
        ),  # type: ignore[arg-type]
        (messages.Tensor("residual", "f32", (2, 4), "raw", D),),
    ),
    messages.Tokens(
        **NAME, first=5, ids=(7,), lease=LEASE_ID, pieces=(b"x",), finish="stop", logprobs=(LOGPROBS,), segment=1
    ),  # type: ignore[arg-type]
    messages.Credit(LEASE_ID, **NAME, total=16),  # type: ignore[arg-type]
    messages.Renew(LEASE_ID, **NAME),  # type: ignore[arg-type]
    messages.Failure(**NAME, node=KEY.peer, code="busy", say="x", lease=LEASE_ID),  # type: ignore[arg-type]
    messages.Close(LEASE_ID, **NAME, reason="done"),  # type: ignore[arg-type]
    messages.Closed((SIGNED,)),
    accounts.Receipt(
        work=D,
        tag=TAG,
        epoch=1,
        hop=0,
        segment=0,
        ended=1_800_000_000,
        node=KEY.peer,
        predecessor=KEY.peer,
        successor=KEY.peer,
        holding=Layers(0, 10),
        effective=Layers(0, 10),
        contract=CONTRACT,
        recipe=D,
        fingerprint=D,
        first=0,
        positions=5,
        steps=2,
        compute=77,
        links=(SIDE,),
        final=True,
        previous=D,
        open=True,
    ),
    accounts.Acceptance(TAG, 1, KEY.peer, (D,), 5, (SIDE,), 1_800_000_000, segment=1, broken=True),
    accounts.Finding(D, KEY.peer, KEY.peer, "differs", 7, D, D, 1_800_000_000),
    accounts.Batch((SIGNED,)),
    accounts.LedgerQuery(bucket=7),
    accounts.LedgerSummary(bytes(accounts.BUCKETS * accounts.MARK_BYTES)),
    accounts.LedgerDigests(D + D),
    accounts.LedgerFetch((D,)),
    accounts.Taken(3),
    audits.AuditQuery(D),
    audits.AuditCase(
        5, 2304, 2304, (audits.Leaf("residual", "in", 5, 2, D, BLIND),), messages.Sampling(temperature=1), (1, 2)
    ),
    audits.AuditRows(D, "in", 0, 5),
    audits.AuditPart(b"rows"),
]


def name_of(example: Any) -> str:
    return statements.domain(type(example))


def refused() -> dict[str, bytes]:
    """Bytes that no reader may take for a message of the kind that they begin as."""
    credit = schema.encode(messages.Credit(LEASE_ID, **NAME, total=16))  # type: ignore[arg-type]
    value = cbor2.loads(credit)

    def changed(**keys: Any) -> bytes:
        return cbor2.dumps(value | {int(key[1:]): item for key, item in keys.items()}, canonical=True)

    return {
        "trailing byte": credit + b"\0",
        "cut": credit[:-1],
        "unknown even key": changed(k1000=1),
        "unknown type": changed(k0=200),
        "missing field": cbor2.dumps({k: v for k, v in value.items() if k != 8}, canonical=True),
        "negative number": changed(k8=-1),
        "number over its bound": changed(k8=1 << 24 | 1),
        "bytes too short": changed(k2=b"l" * 7),
        "text for bytes": changed(k2="l" * 8),
        "float": changed(k8=1.5),
        "true for a number": changed(k8=True),
        "key not in its shortest form": bytes([credit[0], 0x18, 0x00]) + credit[2:],
        "indefinite map": b"\xbf" + credit[1:] + b"\xff",
        "keys out of order": bytes([credit[0]]) + credit[3:12] + credit[1:3] + credit[12:],
        "no map": cbor2.dumps([13]),
        "text key": cbor2.dumps({"0": 13}),
        "empty": b"",
    }


def vectors() -> dict[str, Any]:
    frame = b"".join(map(bytes, framing.encode_frame(b"header", b"payload")))
    leaves = [merkle.leaf(BLIND, n, 1, bytes([n]) * 32) for n in range(5)]
    return {
        "made_by": COMMAND,
        "messages": [{"name": name_of(e), "hex": schema.encode(e).hex()} for e in EXAMPLES],
        "refused": [{"as": "credit", "why": why, "hex": raw.hex()} for why, raw in refused().items()],
        "signature": {
            "seed": KEY.seed.hex(),
            "peer": KEY.peer,
            "mesh_id": MESH_ID,
            "name": name_of(GRANT),
            "raw": SIGNED.raw.hex(),
            "signature": SIGNED.signature.hex(),
        },
        "contract_digest": {
            "contract": schema.encode_nested(CONTRACT).hex(),
            "sha256": statements.contract_digest(CONTRACT).hex(),
        },
        "frame": {"header": b"header".hex(), "payload": b"payload".hex(), "hex": frame.hex()},
        "merkle": {
            "blind": BLIND.hex(),
            "leaves": [leaf.hex() for leaf in leaves],
            "roots": [merkle.root(leaves[:n]).hex() for n in range(6)],
        },
    }


def main(arguments: list[str]) -> int:
    text = json.dumps(vectors(), indent=1) + "\n"
    if "--check" in arguments:
        return 0 if VECTORS.read_text() == text else 1
    VECTORS.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
