"""A node: everything below, put together in one trio process."""

from .load import ServeModel
from .node import Node, open_node

__all__ = ["Node", "ServeModel", "open_node"]
