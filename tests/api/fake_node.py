"""A node that answers by heart, so that what talks to nodes can be tried without one."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import trio

from meshnode.api.requests import RunRequest
from meshnode.errors import MeshError

ARTIFACT = "sha256:" + "ab" * 32
PEERS = ["12D3KooWHead", "12D3KooWMiddle", "12D3KooWTail"]
HOPS = [
    {"peer": peer, "holding": [a, b], "effective": [a, b], "epoch": 1, "hop": hop}
    for hop, (peer, a, b) in enumerate(zip(PEERS, (0, 10, 20), (10, 20, 30), strict=True))
]
SESSION = {"session": "0011223344556677", "epoch": 1, "artifact": ARTIFACT, "positions": 7}
WORDS = ["The", " answer", " is", " 42", "."]


@dataclass
class FakeNode:
    """pace_s: between tokens; fail_at: the token that is not to come; on_open: raised instead of a route."""

    home: str = "/somewhere"
    peer: str = "12D3KooWEntry"
    pace_s: float = 0.0
    fail_at: int | None = None
    on_open: Exception | None = None
    fault: Exception = field(default_factory=lambda: MeshError("hop_failed", "the middle is gone"))
    holdings: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = True
    runs: int = 0  # under way
    begun: int = 0
    requests: list[RunRequest] = field(default_factory=list)
    connected: list[str] = field(default_factory=list)
    rotations: list[float] = field(default_factory=list)
    denials: set[str] = field(default_factory=set)
    stopped: trio.Event = field(default_factory=trio.Event)

    def status(self) -> dict[str, Any]:
        return {
            "pid": 1,
            "peer": self.peer,
            "mesh_id": "mesh-fake",
            "addresses": ["/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWEntry"],
            "api": ["http://127.0.0.1:8571"],
            "home": self.home,
            "state": "ready",
            "holdings": self.holdings,
            "sessions": [SESSION | {"role": "hop", "effective": [0, 10]}, SESSION | {"role": "entry"}] * self.runs,
            "alone": False,
        }

    async def peers(self) -> list[dict[str, Any]]:
        return [
            {"peer": peer, "address": "/ip4/127.0.0.1/tcp/1", "direction": "out", "rtt_ms": 1.5, "since_s": 3.0}
            for peer in PEERS
        ]

    async def models(self) -> list[dict[str, Any]]:
        return [
            {
                "artifact": ARTIFACT,
                "name": "smollm2",
                "architecture": "llama",
                "n_layer": 30,
                "bytes": None,
                "covered": [[0, 30]] if self.complete else [[0, 10], [20, 30]],
                "missing": [] if self.complete else [[10, 20]],
                "holders": [{"peer": hop["peer"], "layers": hop["holding"]} for hop in HOPS],
                "local": False,
            }
        ]

    async def route(self, model: str) -> dict[str, Any]:
        if model not in ("smollm2", ARTIFACT):
            raise MeshError("unknown_model", f"nobody here knows {model!r}")
        candidates = [{"peer": h["peer"], "holding": h["holding"], "usable": True, "reason": ""} for h in HOPS]
        if self.complete:
            return {"artifact": ARTIFACT, "complete": True, "hops": HOPS, "missing": [], "candidates": candidates}
        candidates[1] |= {"usable": False, "reason": "busy: no session is free"}
        return {"artifact": ARTIFACT, "complete": False, "hops": [], "missing": [[10, 20]], "candidates": candidates}

    def rotate(self, overlap_s: float) -> dict[str, Any]:
        self.rotations.append(overlap_s)
        return {"mesh_id": "mesh-fake", "generation": len(self.rotations)}

    def denied(self) -> list[str]:
        return sorted(self.denials)

    def deny(self, peer: str) -> None:
        self.denials.add(peer)

    def allow(self, peer: str) -> None:
        self.denials.discard(peer)

    async def receipts(self, peer: str | None, since: int) -> list[dict[str, Any]]:
        return [{"id": "ab" * 16, "peer": peer, "since": since}]

    async def receipt(self, name: str) -> dict[str, Any]:
        if name != "abab":
            raise MeshError("unknown_receipt", f"no receipt here begins with {name}")
        return {"id": "ab" * 16}

    async def audit(self, name: str) -> list[dict[str, Any]]:
        verdict = "differs" if name == "bad0" else "agrees"
        return [{"receipt": "ab" * 32, "peer": PEERS[0], "auditor": self.peer, "verdict": verdict, "position": 3}]

    async def balances(self, peer: str | None) -> list[dict[str, Any]]:
        return [{"peer": peer or PEERS[0], "served": 5, "used": 0}]

    async def invite(self, expires_s: float) -> str:
        return f"meshnode-invite-1.fake{expires_s:g}"

    async def connect(self, addresses: list[str]) -> None:
        self.connected += addresses

    async def tokenize(self, model: str, prompt: str | None, messages: Sequence[tuple[str, str]]) -> list[int]:
        return list((prompt or "".join(content for _, content in messages)).encode())

    @contextlib.asynccontextmanager
    async def run(self, request: RunRequest) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        self.requests.append(request)
        if self.on_open:
            raise self.on_open
        self.runs += 1
        self.begun += 1
        try:
            async with trio.open_nursery():  # as a real one does: faults may come out in groups
                async with contextlib.aclosing(self._events(request)) as events:
                    yield events
        finally:
            self.runs -= 1

    async def _events(self, request: RunRequest) -> AsyncIterator[dict[str, Any]]:
        yield {"event": "route", "route": HOPS, "prompt_tokens": 3}
        for number in range(length(request)):
            if number == self.fail_at:
                raise self.fault
            await trio.sleep(self.pace_s)
            yield {"event": "token", "id": number, "text": WORDS[number % len(WORDS)]}
        yield {"event": "done", "result": result(request)}

    def stop(self) -> None:
        self.stopped.set()


def length(request: RunRequest) -> int:
    return 4 if request.max_tokens is None else min(request.max_tokens, 1000)


def result(request: RunRequest) -> dict[str, Any]:
    count = length(request)
    return {
        "text": "".join(WORDS[number % len(WORDS)] for number in range(count)),
        "token_ids": list(range(count)),
        "prompt_token_ids": [1, 2, 3],
        "finish_reason": "length",
        "usage": {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count},
        "route": HOPS,
        "timing": {"ttft_s": 0.1, "prefill_tok_s": 100.0, "decode_tok_s": 50.0},
        "receipts": [{"node": peer, "hop": hop} for hop, peer in enumerate(PEERS)],
        "accepted": True,
    }
