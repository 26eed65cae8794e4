"""What was found out about files, kept across runs: a file's digest by its stamp, a model's summary by its identity.

IdentityCache(path)                     SQLite (WAL); one connection, usable from any thread
  .file(stamp) -> KnownFile | None      the digest of a file whose stamp has not moved, and the size of its set
  .store_file(stamp, known)             only for what OpenFile.settled() vouches for
  .summary(identity) -> Summary | None  what validate() said of these bytes
  .store_summary(identity, summary)

Nothing here is needed: a cache that is gone, damaged or on a full disk costs time, never an answer.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sqlite3
import threading
from typing import Any, NamedTuple

from .files import FileStamp, PathLike
from .gguf import RULES, Summary

FORMAT = 1  # of the tables; another one is thrown away
BUSY_S = 5.0  # another process may be writing

_log = logging.getLogger(__name__)

_TABLES = """
CREATE TABLE IF NOT EXISTS files (
    device INTEGER, inode INTEGER, size INTEGER, mtime_ns INTEGER, ctime_ns INTEGER,
    digest BLOB NOT NULL, shards INTEGER NOT NULL,
    PRIMARY KEY (device, inode, size, mtime_ns, ctime_ns)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS summaries (
    identity TEXT, rules INTEGER, summary TEXT NOT NULL, PRIMARY KEY (identity, rules)
) WITHOUT ROWID;
"""
_FIND_FILE = (
    "SELECT digest, shards FROM files WHERE device = ? AND inode = ? AND size = ? AND mtime_ns = ? AND ctime_ns = ?"
)


class KnownFile(NamedTuple):
    """digest: SHA-256, 32 bytes; shards: the number of files of the set it belongs to, 1 for a single file."""

    digest: bytes
    shards: int


class IdentityCache:
    """Opens or creates the cache at `path` (":memory:" for none on disk)."""

    def __init__(self, path: PathLike) -> None:
        self._lock = threading.Lock()
        try:
            self._db = _connect(os.fspath(path))
        except sqlite3.DatabaseError as error:
            _log.warning("the identity cache is damaged and starts anew: %s", error)
            for suffix in ("", "-wal", "-shm"):
                if os.path.lexists(os.fspath(path) + suffix):
                    os.unlink(os.fspath(path) + suffix)
            self._db = _connect(os.fspath(path))

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def file(self, stamp: FileStamp) -> KnownFile | None:
        row = self._read(_FIND_FILE, _key(stamp))
        return None if row is None or len(row[0]) != 32 else KnownFile(bytes(row[0]), int(row[1]))

    def store_file(self, stamp: FileStamp, known: KnownFile) -> None:
        # what the same file was before is of no use any more
        self._write("DELETE FROM files WHERE device = ? AND inode = ?", _key(stamp)[:2])
        self._write("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", (*_key(stamp), *known))

    def summary(self, identity: str) -> Summary | None:
        row = self._read("SELECT summary FROM summaries WHERE identity = ? AND rules = ?", (identity, RULES))
        return None if row is None else _decode(row[0])

    def store_summary(self, identity: str, summary: Summary) -> None:
        text = json.dumps(dataclasses.asdict(summary))
        self._write("INSERT OR REPLACE INTO summaries VALUES (?, ?, ?)", (identity, RULES, text))

    def _read(self, query: str, values: tuple[Any, ...]) -> tuple[Any, ...] | None:
        with self._lock:
            try:
                row: tuple[Any, ...] | None = self._db.execute(query, values).fetchone()
            except sqlite3.Error as error:
                _log.warning("the identity cache cannot be read: %s", error)
                return None
        return row

    def _write(self, query: str, values: tuple[Any, ...]) -> None:
        with self._lock:
            try:
                self._db.execute(query, values)
            except sqlite3.Error as error:
                _log.warning("the identity cache cannot be written: %s", error)


def _connect(path: str) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")  # a lost row is hashed again
        if db.execute("PRAGMA user_version").fetchone()[0] != FORMAT:
            db.executescript("DROP TABLE IF EXISTS files; DROP TABLE IF EXISTS summaries;")
        db.executescript(_TABLES)
        db.execute(f"PRAGMA user_version = {FORMAT}")
    except sqlite3.Error:
        db.close()
        raise
    return db


def _key(stamp: FileStamp) -> tuple[int, ...]:
    # SQLite's integers have a sign; device and inode numbers use all 64 bits on some file systems
    numbers = (stamp.device, stamp.inode, stamp.size, stamp.mtime_ns, stamp.ctime_ns)
    return tuple(n - (1 << 64) if n >= 1 << 63 else n for n in numbers)


def _decode(text: str) -> Summary | None:
    fields: dict[str, Any] = json.loads(text)
    if fields.keys() != {field.name for field in dataclasses.fields(Summary)}:
        return None  # written by another version
    return Summary(**{**fields, "layer_bytes": tuple(fields["layer_bytes"])})
