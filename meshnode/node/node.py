"""The node: network, stage, client and control API in one nursery, and what status says of them."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from ..api.control import serve_control
from ..api.http import listen_somewhere, serve_http, url_of
from ..api.requests import RunRequest
from ..artifact.cache import IdentityCache
from ..artifact.catalogue import Catalogue
from ..artifact.policy import Policies
from ..client import Ask, Client
from ..config import Home, NodeConfig
from ..errors import MeshError, root_cause
from ..ids import PeerId
from ..keys import NodeKey, load_or_create
from ..ledger import views as accounts
from ..ledger.store import Ledger, open_ledger
from ..mesh import Mesh
from ..net import Network, open_network, peer_of_address
from ..net.directory import Directory, keys_of
from ..net.gossip import Gossip
from ..net.links import Links
from ..stage import Stage
from ..stage.auditing import Auditor
from ..wire.invite import Invite
from . import views
from .auditing import Auditing
from .load import Loading, ServeModel
from .memory import Memory, read_denied, seen
from .quarantine import Quarantine

log = logging.getLogger(__name__)

ANNOUNCE_S = 20.0  # how long a newcomer may have to wait for what the DHT did not tell it at first
ANNOUNCE_SOON_S = 2.0  # after a start: the first announcement may have met an empty routing table
INVITE_ADDRESSES = 8
INVITE_OWN = 4  # of them: the inviter may be the one that is off when the invite is used
LAST_WORDS_S = 2.0  # for writing down what waits for the ledger


class Node:
    """One member of a mesh; the control API's backend."""

    def __init__(
        self, home: Home | None, config: NodeConfig, mesh: Mesh, key: NodeKey, network: Network, ledger: Ledger
    ) -> None:
        self.home = home
        self.config = config
        self.mesh = mesh  # as it was joined; network.admission has its secret as it is now
        self.network = network
        self.stopped = trio.Event()
        self.loadings: list[Loading] = []
        self._key = key
        self._ledger = ledger
        self.api: list[str] = []  # URLs of the HTTP API

    def _build(self, nursery: trio.Nursery, kept: Home | None) -> None:
        self.memory = Memory(kept, self.network)
        self.links = Links(self.network, nursery)
        self.directory = Directory(self.network, self.links, self.mesh.mesh_id)
        self.stage = Stage(self.links, self.directory, self._key, self.config)
        self.client = Client(self.links, self.directory, self._key, self.config)
        self.client.audit = self.config.audits if self.config.audits is not None else self.mesh.secret is not None
        self.gossip = Gossip(self.links, self._members, self._ledger, self.mesh.mesh_id)
        self.network.on_joined.append(self.gossip.joined)
        self.client.on_signed.append(self.gossip.tell)
        self.stage.on_receipt.append(self.gossip.tell_own)
        auditor = Auditor(self.links, self.stage.holdings, PeerId(self.network.peer))
        trusted = [PeerId(peer) for peer in self.config.trusted]
        self.auditing = Auditing(self.gossip, auditor, self._key, self.mesh.mesh_id, trusted)
        self.gossip.on_new.append(self.auditing.heard)
        self.auditing.on_lowered.append(self.directory.lower)
        self.stage.standing = self.auditing.standing

    def _members(self) -> list[PeerId]:
        return [PeerId(info.peer) for info in self.network.connected()]

    # what the control API asks

    def status(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "peer": self.network.peer,
            "mesh_id": self.mesh.mesh_id,
            "generation": None if self.mesh.secret is None else self.network.admission.mesh.number,
            "addresses": list(self.network.addresses),
            "api": self.api,
            "home": str(self.home.path) if self.home else None,
            "state": views.state([loading.state for loading in self.loadings]),
            "alone": not self.network.connected(),
            "holdings": [loading.view() for loading in self.loadings],
            "sessions": views.sessions(self.stage, self.client),
        }

    async def peers(self) -> list[dict[str, Any]]:
        return [views.peer(info) for info in self.network.connected()]

    async def models(self) -> list[dict[str, Any]]:
        sizes = {loading.artifact: loading.summary.file_bytes for loading in self.loadings if loading.artifact}
        return views.models(await self.directory.everything(), self.network.peer, sizes)

    async def route(self, model: str) -> dict[str, Any]:
        artifact, heard = await self.client.find(model)
        return views.route(artifact, heard)

    async def receipts(self, peer: str | None, since: int) -> list[dict[str, Any]]:
        return await self.gossip.use(lambda ledger: accounts.receipts(ledger, peer=peer, since=since))

    async def receipt(self, name: str) -> dict[str, Any]:
        return await self.gossip.use(lambda ledger: accounts.show(ledger, name))

    async def audit(self, name: str) -> list[dict[str, Any]]:
        return await self.auditing.audit_named(name)

    async def balances(self, peer: str | None) -> list[dict[str, Any]]:
        return await self.gossip.use(lambda ledger: accounts.balances(ledger, peer))

    async def invite(self, expires_s: float) -> str:
        own = self.network.addresses
        addresses = tuple(dict.fromkeys([*own[:INVITE_OWN], *seen(self.network), *own]))[:INVITE_ADDRESSES]
        mesh = self.network.admission.mesh
        expires = int(time.time() + expires_s)
        return Invite(mesh.mesh_id, mesh.secret, addresses, expires, mesh.number).to_line()

    def rotate(self, overlap_s: float) -> dict[str, Any]:
        """Replaces the mesh's secret; members that are denied here are not given the new one."""
        mesh = self.network.admission.rotate(overlap_s, self.network.admission.denied)
        return {"mesh_id": mesh.mesh_id, "generation": mesh.number}

    def denied(self) -> list[str]:
        return sorted(self.network.admission.denied)

    def deny(self, peer: str) -> None:
        self.network.deny(peer)
        self.memory.keep_denied()

    def allow(self, peer: str) -> None:
        self.network.allow(peer)
        self.memory.keep_denied()

    async def connect(self, addresses: list[str]) -> None:
        fault: MeshError | None = None
        for address in addresses:
            try:
                await self.network.connect(peer_of_address(address), [address])
                return
            except MeshError as error:
                fault = error
        raise fault or MeshError("usage", "no address is given")

    async def tokenize(self, model: str, prompt: str | None, messages: Sequence[tuple[str, str]]) -> list[int]:
        turns = RunRequest(model, prompt, tuple(messages)).turns  # checked
        return list(await self.client.tokenize(Ask(model, prompt, turns)))

    @asynccontextmanager
    async def run(self, request: RunRequest) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        ask = Ask(
            model=request.model,
            prompt=request.prompt,
            chat=request.turns,
            max_tokens=request.max_tokens,
            sampling=request.sampling,
            tokens=request.tokens,
        )
        async with self.client.ask(ask) as events:
            yield (views.event(event) async for event in events)

    def stop(self) -> None:
        self.stopped.set()

    # what runs by itself

    async def _serve(self, loading: Loading, worker: Path | None) -> None:
        await loading.serve(self.stage, lambda: self._announce_now.set(), worker)

    async def _announce(self) -> None:
        """Keeps the DHT told of what is held here: at once when that changes, soon after a start, then seldom."""
        soon = [ANNOUNCE_SOON_S, 2 * ANNOUNCE_SOON_S]
        while True:
            self._announce_now = trio.Event()
            for holding in list(self.stage.holdings):
                try:
                    await holding.verify()
                    n_layer = holding.contract.n_layer
                    for key in keys_of(self.mesh.mesh_id, holding.artifact, holding.layers, n_layer):
                        await self.network.provide(key)
                except MeshError as error:
                    log.warning("announcing layers %s: %s", holding.layers, error)
            with trio.move_on_after(soon.pop(0) if soon else ANNOUNCE_S):
                await self._announce_now.wait()


def usable(addresses: Sequence[str]) -> list[str]:
    """The addresses that name a peer: one that is damaged must not hide the others. MeshError when none is sound."""
    sound, fault = [], None
    for address in addresses:
        try:
            peer_of_address(address)
            sound.append(address)
        except MeshError as error:
            log.warning("an address to join by is left out: %s", error)
            fault = error
    if fault is not None and not sound:
        raise fault
    return sound


@asynccontextmanager
async def one_fault_nursery() -> AsyncIterator[trio.Nursery]:
    """A nursery that raises the first MeshError of its tasks by itself, without the group around it."""
    try:
        async with trio.open_nursery() as nursery:
            yield nursery
    except BaseExceptionGroup as group:
        cause = root_cause(group)
        if isinstance(cause, MeshError):
            raise cause from group
        raise


@asynccontextmanager
async def open_node(
    home: Home | None,
    config: NodeConfig,
    *,
    mesh: Mesh,
    bootstrap: Sequence[str] = (),
    models: Sequence[ServeModel] = (),
    ephemeral: bool = False,
    worker: Path | None = None,
    http: str | None = "off",
    api_key: str | None = None,
) -> AsyncIterator[Node]:
    """A running node. Faults of the files named by the operator are raised before anything is bound.

    ephemeral: a throw-away key, no control API and nothing written; home may then be None. worker: the program to run,
    None: the built one. http: HOST:PORT of the HTTP API, None: the usual one, with api_key asked for if there is one. A
    model that cannot be loaded ends the node with its MeshError.
    """
    kept = None if ephemeral else home
    with contextlib.ExitStack() as held:
        if kept is not None:
            held.enter_context(kept.lock())
        cache = IdentityCache(kept.catalogue_path if kept is not None else ":memory:")
        held.callback(cache.close)
        catalogue = Catalogue(cache)
        quarantine = Quarantine(kept.quarantine_path if kept is not None else None)
        policies = Policies()
        loadings = [Loading(model, config, catalogue, policies, quarantine) for model in models]
        ledger = open_ledger(kept.ledger_path if kept is not None else ":memory:")
        held.callback(ledger.close)
        key = NodeKey.generate() if kept is None else load_or_create(kept.key_path)
        known = usable(bootstrap)
        bound = listen_somewhere(http, key=api_key)
        for one in bound:
            held.callback(one.close)
        denied = read_denied(kept.denied_path) if kept is not None else ()
        async with open_network(
            key, mesh, listen=config.listen, bootstrap=known, denied=denied, lan=config.lan
        ) as network:
            node = Node(home, config, mesh, key, network, ledger)
            async with one_fault_nursery() as nursery:
                node._build(nursery, kept)
                node.loadings = loadings
                node._announce_now = trio.Event()
                node.stage.addresses = node.client.addresses = tuple(network.addresses[:8])
                await nursery.start(node.stage.run)
                node.links.start()
                if kept is not None:
                    nursery.start_soon(node.memory.run)
                    await nursery.start(serve_control, node, kept)
                if bound:
                    node.api = [url_of(one) for one in bound]
                    await nursery.start(serve_http, node, bound, api_key)
                for loading in loadings:
                    nursery.start_soon(node._serve, loading, worker)
                nursery.start_soon(node._announce)
                nursery.start_soon(node.gossip.run)
                nursery.start_soon(node.auditing.run)
                yield node
                with trio.CancelScope(shield=True, deadline=trio.current_time() + LAST_WORDS_S):
                    await node.stage.shut()
                    await node.gossip.flush()
                nursery.cancel_scope.cancel()
