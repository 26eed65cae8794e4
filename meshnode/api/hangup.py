"""Ends connections whose other side has stopped reading, so that a node can always end."""

from __future__ import annotations

import contextlib
import os
import socket

import trio


async def at_end(listener: socket.socket) -> None:
    """Waits to be cancelled, then shuts every connection that was accepted from a listening socket.

    hypercorn shields its writes from cancellation: one to a client that is suspended would hold the node for ever.
    """
    own = _place(listener)
    try:
        await trio.sleep_forever()
    finally:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    _shut(int(name), own)


def _place(bound: socket.socket) -> tuple[int, object]:
    """Family, and path or port: a connection has those of the listener that accepted it, whatever its host."""
    name = bound.getsockname()
    return bound.family, name if bound.family == socket.AF_UNIX else name[1]


def _shut(descriptor: int, own: tuple[int, object]) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6) and _place(connection) == own:
            connection.shutdown(socket.SHUT_RDWR)
