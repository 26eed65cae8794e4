"""What is asked of a mesh, and what comes back while it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ..errors import MeshError
from ..ledger.rules import Filed
from ..wire.messages import MAX_TEXT, Lease, Logprobs, Sampling, Signed, Turn


@dataclass(frozen=True)
class Ask:
    """A request: either a prompt (raw text) or a chat. max_tokens None: a usual number, or what there is room for."""

    model: str
    prompt: str | None = None
    chat: tuple[Turn, ...] = ()
    max_tokens: int | None = None
    sampling: Sampling = Sampling()
    tokens: tuple[int, ...] = ()  # the prompt's ids, instead of either

    def check(self) -> None:
        """MeshError bad_prompt or context_exceeded for what no head needs to look at."""
        if (self.prompt is not None) + bool(self.chat) + bool(self.tokens) != 1:
            raise MeshError("bad_prompt", "give either a prompt or a chat")
        size = len(self.prompt.encode(errors="replace")) if self.prompt is not None else 0
        size += sum(len(turn.content.encode(errors="replace")) for turn in self.chat)
        if self.prompt == "":
            raise MeshError("bad_prompt", "the prompt is empty")
        if size > MAX_TEXT:
            raise MeshError("context_exceeded", f"a prompt of {size} bytes is over the limit of {MAX_TEXT}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise MeshError("usage", f"max_tokens is {self.max_tokens}; at least 1 can be asked for")


@dataclass(frozen=True)
class Routed:
    """The route is ready: its leases, the head's first."""

    leases: tuple[Lease, ...]
    prompt: tuple[int, ...]


@dataclass(frozen=True)
class Token:
    id: int
    text: str  # what became complete with it; may be empty inside a character
    logprobs: Logprobs | None = None  # if they were asked for


@dataclass(frozen=True)
class Recovered:
    """A hop was lost, and the answer goes on in another epoch. seconds: until its route was ready."""

    epoch: int
    why: str  # the code of the fault
    tokens: int  # of the answer so far
    replayed: int  # positions, at the hop that had the fewest
    restarted: bool  # from position 0 on a route of other recipes: nobody of equal recipe was there
    may_differ: bool  # from what an undisturbed run would have said
    seconds: float
    leases: tuple[Lease, ...]


@dataclass(frozen=True)
class Done:
    """The whole answer. Times in seconds from when the prompt was pushed."""

    text: str
    ids: tuple[int, ...]
    prompt: tuple[int, ...]
    finish: str  # stop | length
    leases: tuple[Lease, ...]
    ttft_s: float
    decode_s: float  # from the first token to the last
    receipts: tuple[Filed, ...]  # by segment, the head's first
    accepted: tuple[Signed, ...]  # the entry node's countersignatures, one a segment
    fault: MeshError | None  # why there is none
    recovered: tuple[Recovered, ...] = ()


Event: TypeAlias = Routed | Token | Recovered | Done
