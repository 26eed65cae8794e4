"""What people see of a node: plain JSON values, without a path and without a prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import trio

from ..client import Client, Done, Recovered, Routed, Token
from ..client.ask import Event
from ..errors import MeshError
from ..ids import ArtifactId, Layers, gaps
from ..net import PeerInfo
from ..route import choose, explain
from ..route.choose import Heard
from ..stage import Stage
from ..wire.messages import Lease, Logprobs, Signed


def pair(layers: Layers) -> list[int]:
    return [layers.begin, layers.end]


def state(holdings: Sequence[str]) -> str:
    """ready: all that was asked for is served; starting: more is to come; degraded: what is missing has failed."""
    missing = [state for state in holdings if state != "ready"]
    return "ready" if not missing else "degraded" if set(missing) == {"failed"} else "starting"


def sessions(stage: Stage, client: Client) -> list[dict[str, Any]]:
    """Sessions that hold something here, as a hop; and those that this node is the entry node of."""
    hops = [
        {
            "session": hop.lease.session.hex()[:8],
            "epoch": hop.lease.epoch,
            "role": "hop",
            "artifact": hop.account.contract.artifact,
            "effective": pair(hop.lease.effective),
            "positions": hop.computed,
        }
        for hop in stage.hops.values()
    ]
    asked = [
        {
            "session": journey.grant.session.hex()[:8],
            "epoch": journey.grant.epoch,
            "role": "entry",
            "artifact": journey.grant.contract.artifact,
            "positions": len(journey.answer.prompt) + len(journey.answer.ids),
        }
        for journey in client.sessions
    ]
    return hops + asked


def peer(info: PeerInfo) -> dict[str, Any]:
    return {
        "peer": info.peer,
        "address": info.address,
        "direction": "inbound" if info.inbound else "outbound",
        "rtt_ms": None if math.isnan(info.rtt) else round(info.rtt * 1000, 2),
        "bandwidth_mb_s": None if math.isnan(info.measure.bandwidth) else round(info.measure.bandwidth / 1e6, 2),
        "since_s": round(trio.current_time() - info.since, 1),
    }


def models(heard: Sequence[Heard], own: str, sizes: Mapping[ArtifactId, int]) -> list[dict[str, Any]]:
    """sizes: bytes of the artifacts that lie here, which nobody else tells."""
    by_artifact: dict[ArtifactId, list[Heard]] = {}
    for h in heard:
        by_artifact.setdefault(h.offer.contract.artifact, []).append(h)
    seen = []
    for artifact, all_offers in sorted(by_artifact.items()):
        offers = choose.agreeing(all_offers)
        n_layer = offers[0].offer.contract.n_layer
        holdings = [h.offer.holding for h in offers]
        missing = gaps(holdings, n_layer)
        covered = gaps(missing, n_layer) if missing else [Layers(0, n_layer)]
        seen.append(
            {
                "artifact": artifact,
                "name": offers[0].offer.name,
                "architecture": offers[0].offer.contract.architecture,
                "n_layer": n_layer,
                "bytes": sizes.get(artifact),
                "covered": [pair(part) for part in covered],
                "missing": [pair(part) for part in missing],
                "holders": [{"peer": h.offer.node, "layers": pair(h.offer.holding)} for h in offers],
                "local": any(h.offer.node == own for h in offers),
            }
        )
    return seen


def route(artifact: ArtifactId, heard: Sequence[Heard]) -> dict[str, Any]:
    """The route that would be tried first, and what is said of every candidate."""
    agreeing = choose.agreeing(heard)
    contract = agreeing[0].offer.contract
    hops, candidates = explain.route(heard, contract)
    return {
        "artifact": artifact,
        "name": heard[0].offer.name,
        "n_layer": contract.n_layer,
        "complete": bool(hops) and hops[-1].effective.end == contract.n_layer,
        "hops": [
            {"peer": h.heard.offer.node, "holding": pair(h.heard.offer.holding), "effective": pair(h.effective)}
            for h in hops
        ],
        "missing": [pair(part) for part in choose.missing((h.offer for h in agreeing), contract.n_layer)],
        "candidates": [
            {
                "peer": c.heard.offer.node,
                "layer": c.layer,
                "holding": pair(c.heard.offer.holding),
                "usable": c.usable,
                "taken": c.taken,
                "reason": c.reason or None,
                "next": c.step or None,
                "cost_ms": None if c.cost is None else round(c.cost * 1000, 2),
                "round_trip_ms": round(c.heard.round_trip * 1000, 2),
                "factor": round(c.heard.factor, 2),
                "free": c.heard.offer.free,
            }
            for c in candidates
        ],
    }


def event(event: Event) -> dict[str, Any]:
    if isinstance(event, Token):
        said = {"event": "token", "id": event.id, "text": event.text}
        return said if event.logprobs is None else said | {"logprobs": _told(event.logprobs)}
    if isinstance(event, Routed):
        return {"event": "route", "route": [hop(lease) for lease in event.leases], "prompt_tokens": len(event.prompt)}
    if isinstance(event, Recovered):
        return {"event": "recovered", **_recovered(event), "route": [hop(lease) for lease in event.leases]}
    return {"event": "done", "result": done(event)}


def _recovered(event: Recovered) -> dict[str, Any]:
    return {
        "epoch": event.epoch,
        "why": event.why,
        "tokens": event.tokens,
        "replayed": event.replayed,
        "restarted": event.restarted,
        "may_differ": event.may_differ,
        "seconds": round(event.seconds, 4),
    }


def _told(told: Logprobs) -> dict[str, Any]:
    top = [{"id": likely.id, "logprob": -likely.cost / 1e6, "bytes": list(likely.piece)} for likely in told.top]
    return {"logprob": -told.cost / 1e6, "top": top}


def hop(lease: Lease) -> dict[str, Any]:
    return {
        "hop": lease.hop,
        "peer": lease.node,
        "holding": pair(lease.holding),
        "effective": pair(lease.effective),
        "epoch": lease.epoch,
    }


def done(answer: Done) -> dict[str, Any]:
    made, asked = len(answer.ids), len(answer.prompt)
    return {
        "text": answer.text,
        "token_ids": list(answer.ids),
        "prompt_token_ids": list(answer.prompt),
        "finish_reason": answer.finish,
        "usage": {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made},
        "route": [hop(lease) for lease in answer.leases],
        "timing": {
            "ttft_s": round(answer.ttft_s, 4),
            "prefill_tok_s": round(asked / answer.ttft_s, 2) if answer.ttft_s > 0 else None,
            "decode_tok_s": round((made - 1) / answer.decode_s, 2) if made > 1 and answer.decode_s > 0 else None,
        },
        "receipts": [
            {
                "work": filed.receipt.work.hex(),
                "node": filed.receipt.node,
                "hop": filed.receipt.hop,
                "segment": filed.receipt.segment,
                "effective": pair(filed.receipt.effective),
                "positions": filed.receipt.positions,
                "steps": filed.receipt.steps,
                "compute_ms": round(filed.receipt.compute / 1000, 2),
                **_signed(filed.signed),
            }
            for filed in answer.receipts
        ],
        "accepted": [_signed(statement) for statement in answer.accepted],
        "recovered": [_recovered(event) for event in answer.recovered],
        "receipts_error": _error(answer.fault) if answer.fault else None,
    }


def _signed(statement: Signed) -> dict[str, str]:
    return {"raw": statement.raw.hex(), "signature": statement.signature.hex()}


def _error(error: MeshError) -> dict[str, str]:
    return {"code": error.code, "message": error.message, "hint": error.hint}
