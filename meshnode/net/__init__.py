"""The floor that talks to other nodes, and the only one that imports libp2p."""

import logging

from .members import peer_of_address
from .network import Network, PeerInfo, open_network
from .stream import PeerStream

# The stock layers report every fault of a peer as one of ours; what matters of them is logged on this floor.
logging.getLogger("libp2p").setLevel(logging.CRITICAL)

__all__ = ["Network", "PeerInfo", "PeerStream", "open_network", "peer_of_address"]
