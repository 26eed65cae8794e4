"""What a node writes down: one line an event, as text or as JSON, with the request that it belongs to on every hop.

log.info("leased layers %s", layers, extra=of(session))       the same eight digits at each node of a route

A line holds no prompt, no answer and no path: faults are told by their kind and where in our code they came up, and
an OSError's file is left out.
"""

from __future__ import annotations

import json
import logging
import time
import traceback
from typing import Any

FORMATS = ("text", "json")
DIGITS = 8  # of a session's id, as status shows it
FRAMES = 8  # of a fault's way, the innermost


def of(session: bytes) -> dict[str, str]:
    """What a record's `extra` is to say of its request."""
    return {"request": session.hex()[:DIGITS]}


class _Line(logging.Formatter):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self._json = kind == "json"

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "process": record.process,
            "logger": record.name,
            "event": record.getMessage(),
        }
        if request := getattr(record, "request", None):
            said["request"] = request
        if record.exc_info and (error := record.exc_info[1]) is not None:
            said["fault"] = _fault(error)
        if self._json:
            return json.dumps(said)
        rest = "".join(f" {key}={said[key]}" for key in ("request", "fault") if key in said)
        line = f"{said['time']} {said['process']} {said['level'][0].upper()} {said['logger']}: {said['event']}{rest}"
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def formatter(kind: str) -> logging.Formatter:
    """kind: one of FORMATS."""
    return _Line(kind)


def _fault(error: BaseException) -> str:
    """`KeyError: 'x' at serve.py:12 < hop.py:30`; of a group its first leaf."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    said = error.strerror if isinstance(error, OSError) else str(error)
    frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
    way = " < ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(error).__name__}: {said}" + (f" at {way}" if way else "")
