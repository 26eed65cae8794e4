"""Prompt in, tokens out: finding a head, opening a route, driving it, closing it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from .. import logs
from ..artifact.names import match
from ..config import NodeConfig
from ..errors import MeshError
from ..ids import ArtifactId, PeerId, SessionId, new_session
from ..keys import NodeKey
from ..net.directory import Directory
from ..net.links import Links
from ..route import choose, cost
from ..route.choose import Heard
from ..wire import messages
from ..wire.messages import Failure, Signed, Tokenize, Tokenized, Tokens
from .ask import Ask, Event
from .journey import Journey
from .mending import Mender
from .opening import Opener, Wanted

log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 20.0  # to find and lease a whole route
TOKENIZE_TIMEOUT_S = 5.0
DEFAULT_TOKENS = 256  # of an answer whose length nobody named; fewer where the context has no room


class Client:
    """The entry node's side of sessions."""

    def __init__(self, links: Links, directory: Directory, key: NodeKey, config: NodeConfig) -> None:
        self._links = links
        self._directory = directory
        self._key = key
        self._config = config
        self.open_timeout_s = OPEN_TIMEOUT_S
        self._journeys: dict[SessionId, Journey] = {}
        self.on_signed: list[Callable[[Sequence[Signed]], None]] = []  # receipts and countersignatures of answers
        self._opener = Opener(links, directory, key, config)
        self._mender = Mender(self._opener, config)
        links.take(Tokens, self._tokens)
        links.take(Failure, self._failure)
        links.on_lost.append(self._lost)

    @property
    def audit(self) -> bool:
        """Consent that others do again what is asked from here on."""
        return self._opener.audit

    @audit.setter
    def audit(self, consent: bool) -> None:
        self._opener.audit = consent

    @property
    def sessions(self) -> list[Journey]:
        return list(self._journeys.values())

    async def find(self, model: str) -> tuple[ArtifactId, list[Heard]]:
        """The artifact that a name, an identity or the beginning of either stands for, with all offers of it.

        MeshError unknown_model or ambiguous_model, each with what the mesh does offer.
        """
        labels: dict[str, set[str]] = {}
        everything = await self._directory.everything()
        for heard in everything:
            labels.setdefault(heard.offer.contract.artifact, set()).add(heard.offer.name)
        artifact = ArtifactId(match(model, labels))
        return artifact, [heard for heard in everything if heard.offer.contract.artifact == artifact]

    @asynccontextmanager
    async def ask(self, ask: Ask) -> AsyncIterator[AsyncIterator[Event]]:
        """The events of one answer. Leaving the block early stops the work at every hop."""
        ask.check()
        _, everything = await self.find(ask.model)
        heard = choose.agreeing(everything)
        heads = _heads(heard)
        prompt = await self._tokenize(ask, heads)
        limit = max(h.offer.context for h in heard)
        room = max(1, limit - len(prompt))
        max_tokens = ask.max_tokens if ask.max_tokens is not None else min(DEFAULT_TOKENS, room)
        if len(prompt) + max_tokens > limit:
            raise MeshError(
                "context_exceeded",
                f"{len(prompt)} tokens of prompt and {max_tokens} of answer do not fit the context of {limit}",
            )
        journey = await self._open(ask, heads, prompt, max_tokens)
        try:
            async with journey.travel() as events:
                yield events
            if (measured := journey.token_s) is not None:
                self._directory.observed(journey.head.node, journey.claimed_s, measured)
        finally:
            self._journeys.pop(journey.grant.session, None)
            log.info("answered with %d tokens", len(journey.answer.ids), extra=logs.of(journey.grant.session))

    def _tell(self, signed: Sequence[Signed]) -> None:
        for take in self.on_signed:
            take(signed)

    async def tokenize(self, ask: Ask) -> tuple[int, ...]:
        """The ids of a prompt, as a head gives them."""
        ask.check()
        _, everything = await self.find(ask.model)
        heads = [heard for heard in choose.agreeing(everything) if 0 in heard.offer.holding]  # be they busy or not
        return await self._tokenize(ask, heads)

    async def _tokenize(self, ask: Ask, heads: Sequence[Heard]) -> tuple[int, ...]:
        if ask.tokens:
            return ask.tokens
        fault: MeshError | None = None
        for head in heads[: choose.ATTEMPTS_A_HOP]:
            question = Tokenize(head.offer.contract.artifact, ask.prompt, ask.chat)
            try:
                answer = await self._links.request(head.offer.node, question, Tokenized, timeout=TOKENIZE_TIMEOUT_S)
            except MeshError as error:  # one head's word is not the last: it may be faulty, or have a smaller context
                fault = error
                continue
            if not answer.tokens:
                raise MeshError("bad_prompt", "the prompt gives no token")
            return answer.tokens
        raise fault or MeshError("no_route", "no head tokenizes the prompt")

    async def _open(self, ask: Ask, heads: Sequence[Heard], prompt: tuple[int, ...], max_tokens: int) -> Journey:
        contract = heads[0].offer.contract
        wanted = Wanted(new_session(), contract, ask.sampling, len(prompt) + max_tokens, max_tokens, tuple(heads))

        async def candidates() -> AsyncIterator[tuple[PeerId, bool]]:
            asked = heads[: choose.ATTEMPTS_A_HOP]
            for number, head in enumerate(asked, start=1):
                yield head.offer.node, number == len(asked)

        route = await self._opener.open(wanted, candidates(), 1, prompt, 0, self.open_timeout_s)
        journey = Journey(
            self._links,
            self._key,
            self._config,
            self._directory.mesh_id,
            self._mender,
            wanted,
            route,
            prompt,
            self._tell,
        )
        journey.claimed_s = next(cost.at(h.offer.pairs, 0) for h in heads if h.offer.node == journey.head.node)
        self._journeys[wanted.session] = journey
        of = logs.of(wanted.session)
        log.info("a route of %d hops for %d tokens", len(route.leases), len(prompt), extra=of)
        return journey

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._opener.addresses

    @addresses.setter
    def addresses(self, addresses: tuple[str, ...]) -> None:
        self._opener.addresses = addresses

    async def _tokens(self, peer: PeerId, message: Tokens, _: memoryview) -> None:
        journey = self._journeys.get(message.session)
        if journey is not None and message.lease is None:
            journey.tokens(peer, message)

    async def _failure(self, peer: PeerId, message: messages.Failure, _: memoryview) -> None:
        journey = self._journeys.get(message.session)
        if journey is not None and message.lease is None:
            journey.failure(peer, message)

    def _lost(self, peer: PeerId) -> None:
        for journey in self._journeys.values():
            journey.lost(peer)


def _heads(heard: Sequence[Heard]) -> list[Heard]:
    """Candidates for the first hop, best first; MeshError no_route names the layers that nobody holds."""
    contract = heard[0].offer.contract
    gaps = choose.missing((h.offer for h in heard), contract.n_layer)
    if gaps:
        missing = ", ".join(map(str, gaps))
        raise MeshError("no_route", f"nobody holds the layers {missing}", hint="serve them: --layers " + missing)
    verdicts = [choose.judge(h, 0, h.offer.contract, 0, ()) for h in heard]
    heads = choose.rank(verdicts)
    if not heads:
        reasons = "; ".join(sorted({v.reason for v in verdicts if v.reason and 0 in v.heard.offer.holding}))
        raise MeshError("busy" if "busy" in reasons else "no_route", f"no head can take the request: {reasons}")
    return heads
