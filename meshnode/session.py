"""One session's state at a hop and at its entry node: what may come next, and what follows from it. Pure."""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field

from .errors import MeshError
from .wire.messages import Lease, Push, Tokens

_Utf8 = codecs.getincrementaldecoder("utf-8")


@dataclass
class HopSession:
    """What a hop has accepted. A refused push changes nothing.

    positions: in the cache once all that is accepted is computed; steps: pushes accepted on the link in.
    """

    lease: Lease
    positions: int = 0
    steps: int = 0
    sent: int = 0  # pushes on the link out
    segment: int = 0  # that what comes in is accounted for in

    def accept(self, push: Push) -> None:
        """Refuses all but the very next push: stale_epoch, bad_step, cache_miss, context_exceeded, bad_frame."""
        lease = self.lease
        if (push.session, push.epoch) != (lease.session, lease.epoch):
            raise MeshError("stale_epoch", f"a push of epoch {push.epoch}; the lease is of epoch {lease.epoch}")
        if push.begin != lease.effective.begin or push.keep is not None:
            raise MeshError("bad_frame", f"a push for layer {push.begin}; the lease begins at {lease.effective.begin}")
        if push.step != self.steps:
            raise MeshError("bad_step", f"step {push.step} where {self.steps} was due")
        self._extend(push.first, push.count, push.cached, push.segment)
        self.steps += 1

    def accept_ring(self, tokens: Tokens) -> None:
        """The tail's tokens, at the head: the same rules for what comes next."""
        self.check_ring(tokens)
        self._extend(tokens.first, len(tokens.ids), tokens.first, tokens.segment)

    def check_ring(self, tokens: Tokens) -> None:
        """MeshError unless they are of this epoch, whatever comes before them."""
        if (tokens.session, tokens.epoch) != (self.lease.session, self.lease.epoch):
            raise MeshError("stale_epoch", "tokens of another epoch")
        if not tokens.ids:
            raise MeshError("bad_frame", "no tokens to go on with")

    def _extend(self, first: int, count: int, cached: int, segment: int) -> None:
        if cached != self.positions:
            raise MeshError("cache_miss", f"{cached} positions are expected in the cache, which holds {self.positions}")
        if first != self.positions:
            raise MeshError("bad_step", f"position {first} where {self.positions} was due")
        if first + count > self.lease.context:
            raise MeshError("context_exceeded", f"position {first + count} of a context of {self.lease.context}")
        if not self.segment <= segment <= self.segment + (self.positions > 0):
            raise MeshError("bad_step", f"segment {segment} after segment {self.segment}")
        self.positions += count
        self.segment = segment


@dataclass
class Sampler:
    """The tail's part of the ring: how far it may go, and when the answer ends."""

    max_tokens: int
    credit: int = 0
    made: int = 0
    finish: str | None = None

    def sampled(self, is_end: bool) -> None:
        """Counts one token; an end-of-generation token is no part of the answer."""
        if is_end:
            self.finish = "stop"
            return
        self.made += 1
        if self.made >= self.max_tokens:
            self.finish = "length"

    @property
    def may_go_on(self) -> bool:
        return self.finish is None and self.made < self.credit

    def grant(self, total: int) -> None:
        self.credit = max(self.credit, total)  # credits may overtake each other; they only grow


@dataclass
class Answer:
    """What the entry node has taken: ids, and text whose pieces may end inside a character."""

    prompt: tuple[int, ...]
    max_tokens: int
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    _decoder: codecs.IncrementalDecoder = field(default_factory=lambda: _Utf8("replace"))

    def take(self, tokens: Tokens) -> list[tuple[int, str]]:
        """(id, the text that it completed) of each new token; MeshError bad_step unless they come next."""
        if self.finish is not None:
            raise MeshError("bad_step", "tokens after the end of the answer")
        if not tokens.ids and tokens.finish is None:
            raise MeshError("bad_step", "a message of no tokens")
        if tokens.first != len(self.prompt) + len(self.ids) or len(tokens.pieces) != len(tokens.ids):
            raise MeshError("bad_step", f"tokens from position {tokens.first} on where another was due")
        if len(tokens.logprobs) not in (0, len(tokens.ids)):
            raise MeshError("bad_step", "log-probabilities of other tokens")
        if len(self.ids) + len(tokens.ids) > self.max_tokens:
            raise MeshError("bad_step", f"more than the {self.max_tokens} tokens that were asked for")
        taken = []
        for token, piece in zip(tokens.ids, tokens.pieces, strict=True):
            taken.append((token, self._decoder.decode(piece)))
        if tokens.finish is not None:
            self.finish = tokens.finish
            rest = self._decoder.decode(b"", final=True)
            if rest and taken:
                taken[-1] = (taken[-1][0], taken[-1][1] + rest)
            elif rest:
                self.text += rest
        self.ids += [token for token, _ in taken]
        self.text += "".join(part for _, part in taken)
        return taken
