"""The entry node's part: from a prompt to a route, its tokens and its checked receipts."""

from .ask import Ask, Done, Recovered, Routed, Token
from .client import Client

__all__ = ["Ask", "Client", "Done", "Recovered", "Routed", "Token"]
