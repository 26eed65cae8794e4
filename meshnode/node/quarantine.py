"""Files that crashed a worker, and how: not tried again by the same program until the operator says so."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

from ..config import write_private
from ..errors import MeshError
from ..ids import ArtifactId

log = logging.getLogger(__name__)

MOST = 256  # entries kept, the newest; a node serves a handful of files


class Quarantine:
    """Keyed by the artifact and by what ran it: another build of the worker gets a try of its own.

    path: the file it is kept in; None keeps it for this process alone. A file that is damaged counts as empty.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._reasons: dict[str, str] = {}
        try:
            kept = json.loads(path.read_text()) if path is not None else {}
            self._reasons = {str(key): str(reason) for key, reason in kept.items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, AttributeError) as error:
            log.warning("the quarantine cannot be read and starts anew: %s", type(error).__name__)

    def check(self, artifact: ArtifactId, program: str) -> None:
        """Raises MeshError quarantined, with the reason."""
        reason = self._reasons.get(f"{artifact} {program}")
        if reason is not None:
            raise MeshError("quarantined", reason)

    def add(self, artifact: ArtifactId, program: str, reason: str) -> None:
        self._reasons[f"{artifact} {program}"] = reason
        self._reasons = dict(list(self._reasons.items())[-MOST:])
        self._keep()

    def lift(self, artifact: ArtifactId, program: str) -> None:
        if self._reasons.pop(f"{artifact} {program}", None) is not None:
            self._keep()

    def _keep(self) -> None:
        if self._path is None:
            return
        try:
            write_private(self._path, json.dumps(self._reasons, indent=1) + "\n")
        except MeshError as error:  # a full disk: it then holds for this process alone
            log.warning("the quarantine cannot be kept: %s", error)


def program_key(binary: Path) -> str:
    """What stands for a worker's program: a digest of its bytes."""
    try:
        with binary.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise MeshError("worker_died", f"the worker cannot be started: {error.strerror}") from error
