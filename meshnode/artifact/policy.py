"""Where the bytes of a model may come from, and for how long that holds.

local-required   the default for what an operator names: a source that is missing, incomplete, changed or another's
                 fails the load, the first time and every time after, and nothing takes its place
fetch-allowed    missing bytes may come from elsewhere; it can be named, but nothing here fetches yet

A policy is registered with a load and gone with its unload, so that it binds no later load, of this model or another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

from ..errors import MeshError
from ..ids import ArtifactId


class Policy(StrEnum):
    LOCAL_REQUIRED = "local-required"
    FETCH_ALLOWED = "fetch-allowed"

    def check_available(self) -> None:
        """MeshError not_available for what has a name but no code behind it."""
        if self is Policy.FETCH_ALLOWED:
            raise MeshError(
                "not_available", "the policy fetch-allowed is not yet available", hint="have the whole model on disk"
            )


class Policies:
    """The policies of the loads of one node."""

    def __init__(self) -> None:
        self._loads: list[tuple[ArtifactId, Policy]] = []

    @contextmanager
    def registered(self, artifact: ArtifactId, policy: Policy) -> Iterator[None]:
        """For as long as a load lasts, whatever ends it. MeshError not_available."""
        policy.check_available()
        load = (artifact, policy)
        self._loads.append(load)
        try:
            yield
        finally:
            self._loads.remove(load)

    def of(self, artifact: ArtifactId) -> Policy | None:
        """The strictest that binds this artifact now; None when it is not loaded."""
        bound = {policy for loaded, policy in self._loads if loaded == artifact}
        return next((policy for policy in Policy if policy in bound), None)
