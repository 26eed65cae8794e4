"""The artifacts of this machine: which identity lies at which local paths, and what it is called.

Catalogue(cache)
  .add(path, now_ns=...) -> Entry       check, identify and remember a file or a set of shards
  .describe(path, now_ns=...) -> Summary  its header alone
  .entries(), .refusals()               what is known, and why other paths were refused
  .resolve(text) -> Entry               by identity, an unambiguous prefix of one, or a name
  .verify(identity, now_ns=...)         raises identity_changed unless the bytes are still there
  .open(identity, now_ns=...)           verify, then the open files that are to be handed to a worker
  .remove(identity)

verify() is for advertising, leases and load commands; the descriptors of open() are what the worker gets, which checks
them once more before it opens the model. `now_ns` is the wall clock, taken before the call. All calls block on the
disk and may come from any thread. Paths stay in here.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ..errors import MeshError
from ..ids import ArtifactId, Layers
from .cache import IdentityCache, KnownFile
from .files import FileStamp, OpenFile, PathLike, show
from .gguf import Summary
from .identity import Cancelled, OpenArtifact, Progress, check, digests, identity_of, named, open_artifact
from .names import match

NAME_DIGITS = 8  # of the identity, in the name of a model that has none


@dataclass(frozen=True, slots=True)
class Source:
    """One place where an artifact lies. settled: equal stamps prove equal bytes; else they are read at every check."""

    path: str  # as the operator gave it
    stamps: tuple[FileStamp, ...]
    settled: bool


@dataclass(frozen=True, slots=True)
class Entry:
    """An artifact that was checked and identified. names and sources are for the local operator alone."""

    identity: ArtifactId
    summary: Summary
    names: frozenset[str]  # labels it can be asked for by: its own, and those of its files
    sources: tuple[Source, ...]
    warnings: tuple[str, ...]

    @property
    def name(self) -> str:
        """The label that is shown, also to peers."""
        return self.summary.name

    @property
    def layers(self) -> Layers:
        """All its layers."""
        return Layers(0, self.summary.n_layer)


class Catalogue:
    """An empty catalogue over a cache of digests; without one every file is read once a run."""

    def __init__(self, cache: IdentityCache | None = None) -> None:
        self._cache = cache or IdentityCache(":memory:")
        self._lock = threading.Lock()
        self._entries: dict[ArtifactId, Entry] = {}
        self._lies_at: dict[str, ArtifactId] = {}  # the identity last found at a path
        self._refusals: dict[str, MeshError] = {}

    def add(
        self, path: PathLike, *, now_ns: int, progress: Progress | None = None, cancelled: Cancelled | None = None
    ) -> Entry:
        """Check and identify the model at `path` and remember where it lies.

        Errors: as open_artifact, describe and identify; each but cancelled is also kept among refusals().
        """
        try:
            with open_artifact(path, self._known_split) as artifact:
                found = self._identify(artifact, now_ns, progress, cancelled)
        except MeshError as error:
            if error.code != "cancelled":
                with self._lock:
                    self._refusals[str(path)] = error
            raise
        with self._lock:
            self._refusals.pop(str(path), None)
        return self._remember(found)

    def describe(self, path: PathLike, *, now_ns: int) -> Summary:
        """The checked header of the model at `path`, or what is remembered of it; nothing is hashed or kept.

        Errors: as open_artifact and describe.
        """
        with open_artifact(path, self._known_split) as artifact:
            known = [self._cache.file(file.stamp) for file in artifact.files if file.settled(now_ns)]
            summary = self._summary(artifact.files, [file.digest for file in known if file is not None])
            return named(summary or check(artifact))

    def entries(self) -> list[Entry]:
        with self._lock:
            return sorted(self._entries.values(), key=lambda entry: (entry.name, entry.identity))

    def refusals(self) -> dict[str, MeshError]:
        """Paths that were refused, with the reason; for the local operator."""
        with self._lock:
            return dict(self._refusals)

    def remove(self, identity: str) -> None:
        with self._lock:
            self._entries.pop(ArtifactId(identity), None)

    def resolve(self, text: str) -> Entry:
        """The artifact of this identity, prefix of one (with or without its scheme), or name.

        Errors: unknown_model (says what is known), ambiguous_model (lists the identities).
        """
        entries = {entry.identity: entry for entry in self.entries()}
        return entries[ArtifactId(match(text, {entry.identity: entry.names for entry in entries.values()}))]

    def verify(self, identity: str, *, now_ns: int) -> Entry:
        """The entry, when the bytes still lie at one of its sources.

        A few system calls a file for settled sources; others are read again.
        Errors: unknown_model, identity_changed, unreadable.
        """
        self.open(identity, now_ns=now_ns).close()
        return self._entry(identity)

    def open(self, identity: str, *, now_ns: int) -> OpenArtifact:
        """The artifact's files, opened and verified; the caller closes them. Errors: as verify."""
        entry = self._entry(identity)
        changed: MeshError | None = None
        for source in entry.sources:
            try:
                return self._open_unchanged(entry, source, now_ns)
            except MeshError as error:
                if error.code == "unreadable":
                    raise MeshError("unreadable", f"{entry.name!r} cannot be read") from error
                changed = error  # gone, incomplete, or other bytes: perhaps another copy is whole
        # peers see this message: it names no path
        raise MeshError("identity_changed", f"{entry.name!r} is no longer what was identified") from changed

    def _entry(self, identity: str) -> Entry:
        with self._lock:
            entry = self._entries.get(ArtifactId(identity))
        if entry is None:
            raise MeshError("unknown_model", f"no artifact {identity} is served here")
        return entry

    def _remember(self, found: Entry) -> Entry:
        """Join what was found at one path with what is known; whatever else was said to lie there no longer does."""
        path = found.sources[0].path
        with self._lock:
            before = self._entries.get(self._lies_at.get(path, found.identity))
            if before is not None:
                others = tuple(source for source in before.sources if source.path != path)
                if others or before.identity == found.identity:
                    self._entries[before.identity] = replace(before, sources=others)
                else:
                    del self._entries[before.identity]
            known = self._entries.get(found.identity)
            if known is not None:
                found = replace(known, names=known.names | found.names, sources=known.sources + found.sources)
            self._entries[found.identity] = found
            self._lies_at[path] = found.identity
        return found

    def _open_unchanged(self, entry: Entry, source: Source, now_ns: int) -> OpenArtifact:
        with ExitStack() as opened:
            artifact = opened.enter_context(open_artifact(source.path, self._known_split))
            if source.settled:
                if artifact.stamps != source.stamps:
                    raise MeshError("identity_changed", f"{show(source.path)} was changed after it was identified")
            else:
                again = self._identify(artifact, now_ns)
                if again.identity != entry.identity:
                    raise MeshError("identity_changed", f"{show(source.path)} has other bytes than were identified")
                self._remember(again)
            opened.pop_all()
        return artifact

    def _known_split(self, stamp: FileStamp) -> int | None:
        known = self._cache.file(stamp)
        return known.shards if known else None

    def _identify(
        self,
        artifact: OpenArtifact,
        now_ns: int,
        progress: Progress | None = None,
        cancelled: Cancelled | None = None,
    ) -> Entry:
        """An entry of this one source. Headers are checked before a byte is hashed, unless both are known."""
        files = artifact.files
        settled = [file.settled(now_ns) for file in files]
        known = [self._cache.file(file.stamp) if sure else None for file, sure in zip(files, settled, strict=True)]
        parts = [file.digest for file in known if file is not None]
        summary = self._summary(files, parts)
        if summary is None:
            summary = check(artifact)
            parts = self._read(files, known, settled, progress, cancelled)
            self._cache.store_summary(_identity(files, parts), summary)
        identity = _identity(files, parts)
        # peers see the name: it says nothing of the file's
        name = summary.name or f"{summary.architecture} {identity.partition(':')[2][:NAME_DIGITS]}"
        return Entry(
            identity=identity,
            summary=replace(summary, name=name),
            names=frozenset(label for label in (name, artifact.stem) if label),
            sources=(Source(artifact.path, artifact.stamps, all(settled)),),
            warnings=artifact.warnings,
        )

    def _summary(self, files: Sequence[OpenFile], parts: Sequence[bytes]) -> Summary | None:
        return self._cache.summary(_identity(files, parts)) if len(parts) == len(files) else None

    def _read(
        self,
        files: Sequence[OpenFile],
        known: Sequence[KnownFile | None],
        settled: Sequence[bool],
        progress: Progress | None,
        cancelled: Cancelled | None,
    ) -> list[bytes]:
        """Every file's digest, read where it is not known, and kept where its stamp can be trusted."""
        unknown = [file for file, kept in zip(files, known, strict=True) if kept is None]
        read = iter(digests(unknown, progress, cancelled) if unknown else ())
        parts = []
        for file, kept, sure in zip(files, known, settled, strict=True):
            parts.append(kept.digest if kept else next(read))
            if sure and kept is None:
                self._cache.store_file(file.stamp, KnownFile(parts[-1], len(files)))
        return parts


def _identity(files: Sequence[OpenFile], parts: Sequence[bytes]) -> ArtifactId:
    return ArtifactId(identity_of([(file.size, part) for file, part in zip(files, parts, strict=True)]))
