"""What a ledger says, as plain JSON: for the commands and the API alike. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from ..errors import MeshError
from ..ids import PeerId
from ..wire.accounts import Acceptance, Finding, Receipt
from ..wire.messages import Signed
from . import merkle
from .chain import Chain, chains, digest, read
from .rules import Filed
from .store import Ledger, decoded

EXPORT = "meshnode-receipts-1"
MAX_LINE = 1 << 18  # of an exported file: a statement has 64 KiB at most


def receipts(ledger: Ledger, *, peer: str | None = None, since: int = 0) -> list[dict[str, Any]]:
    """Every epoch that is known of, the newest last, in short."""
    if peer is None:
        return [chain_view(c) for c in chains(ledger.receipts(since=since), ledger.acceptances(since=since))]
    tags = {filed.receipt.tag for filed in ledger.receipts(since=since, peer=peer)}
    tags |= {acceptance.tag for acceptance in ledger.acceptances(since=since, peer=peer)}
    found = [c for tag in tags for c in chains(ledger.receipts(tag=tag), ledger.acceptances(tag=tag))]
    return [chain_view(c) for c in sorted(found, key=lambda c: c.ended)]


def chain_view(chain: Chain) -> dict[str, Any]:
    return {
        "id": chain.tag.hex(),
        "epoch": chain.epoch,
        "artifact": chain.artifact,
        "entry": chain.entry,
        "ended": chain.ended,
        "verdict": chain.verdict,
        "faults": [{"say": fault.say, "by": list(fault.by)} for fault in chain.faults],
        "tokens": sum(acceptance.tokens for acceptance in chain.accepted),
        "hops": [_hop(hop) for hop in chain.hops],
    }


def _hop(hop: Sequence[Filed]) -> dict[str, Any]:
    first = hop[0].receipt
    return {
        "peer": first.node,
        "hop": first.hop,
        "layers": [first.effective.begin, first.effective.end],
        "holding": [first.holding.begin, first.holding.end],
        "positions": sum(f.receipt.positions for f in hop),
        "steps": sum(f.receipt.steps for f in hop),
        "compute_ms": round(sum(f.receipt.compute for f in hop) / 1000, 2),
        "receipts": [f.digest.hex() for f in hop],
    }


def show(ledger: Ledger, prefix: str) -> dict[str, Any]:
    """One session, named by the beginning of its id or of a receipt's digest. MeshError unknown_receipt or usage."""
    if len(prefix) < 4 or any(c not in "0123456789abcdef" for c in prefix.lower()):
        raise MeshError("usage", "an id is at least four hexadecimal digits", hint="`meshnode receipts` lists them")
    tags = {
        statement.tag for signed in ledger.find(prefix) if not isinstance(statement := decoded(signed.raw), Finding)
    }
    if not tags:
        raise MeshError("unknown_receipt", f"no receipt here begins with {prefix}")
    if len(tags) > 1:
        raise MeshError("usage", f"{prefix} is the beginning of several: give more of it")
    [tag] = tags
    found = chains(ledger.receipts(tag=tag), ledger.acceptances(tag=tag))
    findings = [f for c in found for hop in c.hops for filed in hop for f in _findings_of(ledger, filed)]
    return {
        "id": tag.hex(),
        "epochs": [chain_view(chain) | {"segments": _segments(chain)} for chain in found],
        "findings": findings,
    }


def _findings_of(ledger: Ledger, filed: Filed) -> list[dict[str, Any]]:
    return [finding(f) for f in ledger.findings(peer=filed.receipt.node) if f.receipt == filed.digest]


def finding(found: Finding) -> dict[str, Any]:
    return {
        "receipt": found.receipt.hex(),
        "peer": found.node,
        "auditor": found.auditor,
        "verdict": found.verdict,
        "position": found.position,
        "ended": found.ended,
    }


def _segments(chain: Chain) -> list[dict[str, Any]]:
    return [
        {
            "digest": filed.digest.hex(),
            "work": filed.receipt.work.hex(),
            "peer": filed.receipt.node,
            "hop": filed.receipt.hop,
            "segment": filed.receipt.segment,
            "first": filed.receipt.first,
            "positions": filed.receipt.positions,
            "steps": filed.receipt.steps,
            "compute_ms": round(filed.receipt.compute / 1000, 2),
            "recipe": filed.receipt.recipe.hex(),
            "fingerprint": filed.receipt.fingerprint.hex(),
            "links": [
                {
                    "peer": link.peer,
                    "direction": link.direction,
                    "kind": link.kind,
                    "replay": link.replay,
                    "positions": link.positions,
                    "leaves": link.leaves,
                    "root": link.root.hex(),
                }
                for link in filed.receipt.links
            ],
        }
        for hop in chain.hops
        for filed in hop
    ]


def step(ledger: Ledger, prefix: str, position: int) -> list[dict[str, Any]]:
    """What shows that one step is accounted for in own receipts: for each of their links that has the position, its
    leaf, and the hashes that lead from there to the root that was signed. MeshError as of show(), or usage."""
    found = []
    for signed in ledger.find(prefix):
        links = ledger.leaves(digest(signed))
        for peer, direction, kind, leaves in links or ():
            hashes = [merkle.leaf(blind, first, count, bits) for first, count, bits, blind in leaves]
            for index, (first, count, bits, blind) in enumerate(leaves):
                if first <= position < first + count:
                    found.append(
                        {
                            "receipt": _line(signed),
                            "peer": peer,
                            "direction": direction,
                            "kind": kind,
                            "leaf": {"first": first, "count": count, "sha256": bits.hex(), "blind": blind.hex()},
                            "index": index,
                            "path": [node.hex() for node in merkle.proof(hashes, index)],
                        }
                    )
    if not found:
        raise MeshError("unknown_receipt", f"no own receipt of {prefix} has position {position}")
    return found


def balances(ledger: Ledger, peer: str | None = None) -> list[dict[str, Any]]:
    """In layer-positions, who did most first."""
    every = ledger.balances()
    chosen = {peer: every.get(PeerId(peer))} if peer is not None else every
    rows = [{"peer": p, "served": b.served if b else 0, "used": b.used if b else 0} for p, b in chosen.items()]
    return sorted(rows, key=lambda row: (-int(str(row["served"])), str(row["peer"])))


# -- files


def _line(signed: Signed) -> dict[str, str]:
    return {"signer": signed.signer, "raw": signed.raw.hex(), "signature": signed.signature.hex()}


def export(ledger: Ledger, mesh_id: str, *, prefix: str | None = None, since: int = 0) -> Iterable[str]:
    """The lines of a file that anybody can verify who has nothing else: a header, then a statement a line."""
    yield json.dumps({"format": EXPORT, "mesh_id": mesh_id})
    tag = bytes.fromhex(show(ledger, prefix)["id"]) if prefix is not None else None
    for entry in ledger.entries(tag=tag, since=since):
        yield json.dumps(_line(entry.signed))


def verify(lines: Iterable[str], each: Any = map) -> tuple[list[Chain], list[tuple[int, MeshError]]]:
    """The chains in an exported file, and the lines that are refused, by number. MeshError bad_export.

    each: what applies a function to every line in order, in whatever processes: most of the time goes to signatures.
    """
    rest = iter(lines)
    header = next(rest, None)
    if header is None:
        raise MeshError("bad_export", "the file is empty")
    filed, accepted, refused = [], [], []
    for number, found in enumerate(each(partial(_statement, _header(header)), rest), start=2):
        if isinstance(found, MeshError):
            refused.append((number, found))
            continue
        statement, signed = found
        if isinstance(statement, Receipt):
            filed.append(Filed(statement, signed))
        elif isinstance(statement, Acceptance):
            accepted.append(statement)
    return chains(filed, accepted), refused


def _statement(mesh_id: str, line: str) -> tuple[Receipt | Acceptance | Finding, Signed] | MeshError:
    try:
        signed = _signed(line)
        return read(signed, mesh_id), signed
    except MeshError as error:
        return error


def _header(text: str) -> str:
    try:
        header = json.loads(text)
        if header["format"] == EXPORT and type(header["mesh_id"]) is str:
            return str(header["mesh_id"])
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise MeshError("bad_export", "this is no file of exported receipts")


def _signed(text: str) -> Signed:
    try:
        value = json.loads(text)
        signer, raw, signature = value["signer"], bytes.fromhex(value["raw"]), bytes.fromhex(value["signature"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise MeshError("bad_receipt", "the line holds no statement") from error
    if type(signer) is not str or not 0 < len(signer) <= 64 or not raw or len(signature) != 64:
        raise MeshError("bad_receipt", "the line holds no statement")
    return Signed(PeerId(signer), raw, signature)
