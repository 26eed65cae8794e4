"""What a node writes down of its mesh in its home: how to find it again, its secret, and the peers that it denies."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import trio

from ..config import MAX_REMEMBERED, Home, write_private
from ..errors import MeshError
from ..mesh import KnownMesh, Mesh
from ..net import Network

log = logging.getLogger(__name__)

REMEMBER_S, REMEMBER_SOON_S = 30.0, 1.0  # between two looks at who is there, and while nobody was
MAX_DENIED = 4096  # a person denies by hand; a script that goes on and on is stopped


class Memory:
    """home: None keeps nothing."""

    def __init__(self, home: Home | None, network: Network) -> None:
        self._home = home
        self._network = network
        network.admission.on_change.append(self._rotated)

    async def run(self) -> None:
        while True:
            await trio.sleep(REMEMBER_SOON_S if not self._network.connected() else REMEMBER_S)
            self.remember_now()

    def remember_now(self) -> None:
        """Writes into mesh.json the mesh, and the members that were reached, the freshest first."""
        if self._home is None:
            return
        mesh = self._network.admission.mesh
        known = self._home.known_mesh() or KnownMesh(mesh)
        peers = tuple(dict.fromkeys([*seen(self._network), *known.peers]))[:MAX_REMEMBERED]
        if (mesh, peers) != (known.mesh, known.peers):
            self._home.remember(KnownMesh(mesh, known.bootstrap, peers))

    def _rotated(self, _: Mesh) -> None:
        try:
            self.remember_now()
        except MeshError as error:  # the node goes on; after a restart it may need a new invite
            log.error("the new secret of the mesh is not written down: %s", error)

    def keep_denied(self) -> None:
        """MeshError bad_home when the list cannot be written, or holds too many."""
        denied = sorted(self._network.admission.denied)
        if len(denied) > MAX_DENIED:
            raise MeshError("bad_home", f"a node denies at most {MAX_DENIED} peers")
        if self._home is not None:
            write_private(self._home.denied_path, json.dumps(denied, indent=1) + "\n")


def seen(network: Network) -> list[str]:
    """Addresses, with the peer's id, of connected members: where they were reached, and where they say they listen."""
    found: list[str] = []
    for info in network.connected():
        own = [] if info.inbound else [f"{info.address}/p2p/{info.peer}"]
        found += list(dict.fromkeys([*own, *network.known_addresses(info.peer)]))[:2]
    return found


def read_denied(path: Path) -> tuple[str, ...]:
    """MeshError bad_home when the list is damaged: to let everybody in would be far from what was meant."""
    try:
        peers = json.loads(path.read_text())
        if not isinstance(peers, list) or any(not isinstance(peer, str) for peer in peers):
            raise ValueError("no list of peers")
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, RecursionError) as error:
        raise MeshError("bad_home", f"{path} is damaged: {error}", hint="mend it, or remove it") from error
    return tuple(peers)
