"""Ends connections whose other side has stopped reading, so that a node can always end."""

from __future__ import annotations

import contextlib
import os
import socket

import trio


async def at_end(address: str) -> None:
    """Waits to be cancelled, then shuts every connection that was accepted at a Unix socket's address.

    hypercorn shields its writes from cancellation: one to a client that is suspended would hold the node for ever.
    """
    try:
        await trio.sleep_forever()
    finally:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    _shut(int(name), address)


def _shut(descriptor: int, address: str) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family == socket.AF_UNIX and connection.getsockname() == address:
            connection.shutdown(socket.SHUT_RDWR)
