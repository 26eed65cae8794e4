"""The floor that talks to other nodes, and the only one that imports libp2p."""

from .membership import Membership
from .network import Network, PeerInfo, open_network, peer_of_address
from .stream import PeerStream

__all__ = ["Membership", "Network", "PeerInfo", "PeerStream", "open_network", "peer_of_address"]
