"""The API's description."""

from __future__ import annotations

from typing import Any


def openapi() -> dict[str, Any]:
    return {"openapi": "3.1.0", "info": {"title": "meshnode", "version": "1"}, "paths": {}}
