"""The ledger on disk: signed statements, appended and never changed, bounded by age and number.

SQLite in WAL mode with full synchronisation: what append() has returned for is there after any end of the process, and
what it has not is there whole or not at all. Not safe for use from several threads at once: its owner takes turns.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import cbor2

from ..errors import MeshError
from ..ids import PeerId, SessionId
from ..wire import schema, statements
from ..wire.accounts import ACCOUNTS, Acceptance, Finding, Receipt
from ..wire.accounts import Account as Statement
from ..wire.messages import Signed
from .account import LinkLog, Written, blind
from .balance import Balance, Credit, balances, credits, standing
from .chain import chains, signer_of
from .index import Index
from .rules import Filed

RETENTION_S = 30 * 24 * 3600  # long enough to settle what anybody disputes; then a receipt has served
AHEAD_S = 600  # a clock may be that far ahead of ours
MAX_STATEMENTS = 200_000  # about 250 MB on disk, and 30 MB in memory for the digests
MAX_A_SIGNER = 20_000  # of these; nobody fills the ledger alone
SCHEMA = 1
_TABLES = f"""
PRAGMA user_version = {SCHEMA};
CREATE TABLE statements (
    digest BLOB PRIMARY KEY, kind TEXT NOT NULL, tag BLOB, epoch INTEGER, node TEXT NOT NULL, entry TEXT,
    ended INTEGER NOT NULL, signer TEXT NOT NULL, raw BLOB NOT NULL, signature BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX by_session ON statements (tag, epoch);
CREATE INDEX by_end ON statements (ended);
CREATE INDEX by_signer ON statements (signer);
CREATE TABLE credits (
    tag BLOB NOT NULL, work BLOB NOT NULL, node TEXT NOT NULL, entry TEXT, amount INTEGER NOT NULL,
    PRIMARY KEY (work, node)
) WITHOUT ROWID;
CREATE INDEX credits_by_session ON credits (tag);
CREATE TABLE leaves (digest BLOB PRIMARY KEY, opened BLOB NOT NULL) WITHOUT ROWID;
"""
_BY_DIGEST = "SELECT signer, raw, signature FROM statements WHERE digest = ?"
_BY_PREFIX = "SELECT signer, raw, signature FROM statements WHERE hex(digest) LIKE ? OR hex(tag) LIKE ?"
_ENTRIES = """
SELECT signer, raw, signature FROM statements
WHERE ended >= :since AND kind = coalesce(:kind, kind) AND (:peer IS NULL OR :peer IN (node, entry, signer))
ORDER BY ended, digest
"""
_OF_SESSION = """
SELECT signer, raw, signature FROM statements
WHERE tag = :tag AND ended >= :since AND kind = coalesce(:kind, kind)
    AND (:peer IS NULL OR :peer IN (node, entry, signer))
ORDER BY ended, digest
"""


@dataclass(frozen=True)
class Entry:
    """A statement that was checked, and the signed bytes of it."""

    statement: Statement
    signed: Signed

    @property
    def digest(self) -> bytes:
        return statements.digest(self.signed)


class Ledger:
    """Made by open_ledger."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection
        self.index = Index(digest for (digest,) in connection.execute("SELECT digest FROM statements ORDER BY ended"))
        self._signed = dict(connection.execute("SELECT signer, count(*) FROM statements GROUP BY signer"))

    def __len__(self) -> int:
        return len(self.index)

    def append(self, entries: Sequence[Entry], now: int) -> list[Entry]:
        """Those that are new and kept: not too old, nor of a signer that has too many. MeshError bad_ledger."""
        kept: dict[bytes, Entry] = {}
        counts: dict[str, int] = {}
        for entry in entries:
            signer: str = entry.signed.signer
            new = entry.digest not in self.index and entry.digest not in kept
            timely = now - RETENTION_S < entry.statement.ended <= now + AHEAD_S
            if new and timely and self._signed.get(signer, 0) + counts.get(signer, 0) < MAX_A_SIGNER:
                kept[entry.digest] = entry
                counts[signer] = counts.get(signer, 0) + 1
        if kept:
            with self._writing():
                self._db.executemany(
                    "INSERT OR IGNORE INTO statements VALUES (?,?,?,?,?,?,?,?,?,?)", map(_row, kept.values())
                )
                self._credit({e.statement.tag for e in kept.values() if not isinstance(e.statement, Finding)})
            for digest in kept:
                self.index.add(digest)
            for name, count in counts.items():
                self._signed[name] = self._signed.get(name, 0) + count
        return list(kept.values())

    def keep_leaves(self, own: Iterable[tuple[Signed, Written]]) -> None:
        """Keeps what opens the leaves of own receipts; it tells nobody anything until it is shown."""
        rows = [(statements.digest(signed), _opened(w.session, w.links)) for signed, w in own]
        with self._writing():
            self._db.executemany("INSERT OR IGNORE INTO leaves VALUES (?,?)", rows)

    def leaves(self, digest: bytes) -> list[tuple[str, str, str, list[tuple[int, int, bytes, bytes]]]] | None:
        """(peer, direction, kind, [(first, count, digest, blind)]) of each link of an own receipt; None of others'."""
        found = self._db.execute("SELECT opened FROM leaves WHERE digest = ?", (digest,)).fetchone()
        if found is None:
            return None
        return [(peer, way, kind, [tuple(leaf) for leaf in log]) for peer, way, kind, log in cbor2.loads(found[0])]

    def expire(self, now: int) -> int:
        """Forgets what is too old, and the oldest of what is too much; how many."""
        with self._writing():
            old = self._db.execute(
                "SELECT digest, signer FROM statements WHERE ended <= ? UNION"
                " SELECT digest, signer FROM (SELECT digest, signer FROM statements ORDER BY ended LIMIT ?)",
                (now - RETENTION_S, max(0, len(self) - MAX_STATEMENTS)),
            ).fetchall()
            self._db.executemany("DELETE FROM statements WHERE digest = ?", [(digest,) for digest, _ in old])
            self._db.executemany("DELETE FROM leaves WHERE digest = ?", [(digest,) for digest, _ in old])
            if old:
                self._db.execute("DELETE FROM credits WHERE tag NOT IN (SELECT tag FROM statements WHERE tag NOT NULL)")
        for digest, name in old:
            self.index.discard(digest)
            self._signed[name] -= 1
        return len(old)

    def get(self, digests: Iterable[bytes]) -> list[Signed]:
        """Those that are here."""
        found = [self._db.execute(_BY_DIGEST, (digest,)).fetchone() for digest in digests]
        return [Signed(PeerId(row[0]), *row[1:]) for row in found if row is not None]

    def find(self, prefix: str) -> list[Signed]:
        """The statements whose digest, or whose session's tag, begins with these hexadecimal digits."""
        like = f"{prefix.upper()}%"
        return [Signed(PeerId(row[0]), *row[1:]) for row in self._db.execute(_BY_PREFIX, (like, like))]

    def entries(
        self, *, kind: str | None = None, tag: bytes | None = None, peer: str | None = None, since: int = 0
    ) -> Iterator[Entry]:
        """Statements by their age. peer: whoever did the work, signed it or asked for it."""
        given = {"kind": kind, "tag": tag, "peer": peer, "since": since}
        for signer, raw, signature in self._db.execute(_ENTRIES if tag is None else _OF_SESSION, given).fetchall():
            signed = Signed(PeerId(signer), raw, signature)
            yield Entry(decoded(raw), signed)

    def receipts(self, **narrower: object) -> list[Filed]:
        found = self.entries(kind="receipt", **narrower)  # type: ignore[arg-type]
        return [Filed(e.statement, e.signed) for e in found if isinstance(e.statement, Receipt)]

    def acceptances(self, **narrower: object) -> list[Acceptance]:
        found = self.entries(kind="acceptance", **narrower)  # type: ignore[arg-type]
        return [e.statement for e in found if isinstance(e.statement, Acceptance)]

    def findings(self, **narrower: object) -> list[Finding]:
        found = self.entries(kind="finding", **narrower)  # type: ignore[arg-type]
        return [e.statement for e in found if isinstance(e.statement, Finding)]

    def balances(self) -> dict[PeerId, Balance]:
        """Of everybody who did work, or had it done, in layer-positions."""
        return balances(Credit(*row) for row in self._db.execute("SELECT node, entry, work, amount FROM credits"))

    def standing(self, trusted: Collection[PeerId]) -> dict[PeerId, int]:
        return standing(
            (Credit(*row) for row in self._db.execute("SELECT node, entry, work, amount FROM credits")), trusted
        )

    def _credit(self, tags: Iterable[bytes]) -> None:
        """Judges sessions anew of which something was heard."""
        for tag in tags:
            found = chains(self.receipts(tag=tag), self.acceptances(tag=tag))
            rows = [(tag, c.work, c.node, c.entry, c.amount) for c in credits(found)]
            self._db.execute("DELETE FROM credits WHERE tag = ?", (tag,))
            self._db.executemany("INSERT OR REPLACE INTO credits VALUES (?,?,?,?,?)", rows)

    def close(self) -> None:
        self._db.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with self._db:
                yield
        except sqlite3.Error as error:  # the transaction was rolled back
            raise MeshError("bad_ledger", f"the ledger cannot be written: {error}") from error


def open_ledger(path: Path | str) -> Ledger:
    """The ledger in a file, made when there is none; ":memory:" for one that is forgotten. MeshError bad_ledger."""
    try:
        db = sqlite3.connect(path, timeout=5.0, check_same_thread=False)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version == 0:
            db.executescript("BEGIN;" + _TABLES + "COMMIT;")
        elif version != SCHEMA:
            raise MeshError(
                "bad_ledger", f"{path} was written by another version of meshnode", hint="update, or move it away"
            )
        return Ledger(db)
    except sqlite3.Error as error:
        raise MeshError("bad_ledger", f"{path} cannot be used: {error}") from error


def decoded(raw: bytes) -> Statement:
    statement = schema.decode(raw, *ACCOUNTS)
    assert isinstance(statement, ACCOUNTS)
    return statement


def _row(entry: Entry) -> tuple[object, ...]:
    s, signed = entry.statement, entry.signed
    kind = statements.domain(type(s))
    tag, epoch, node, entry_node = None, None, signer_of(s), None
    if isinstance(s, Finding):
        node = s.node
    else:
        tag, epoch = s.tag, s.epoch
        entry_node = s.entry if isinstance(s, Acceptance) else None
    return entry.digest, kind, tag, epoch, node, entry_node, s.ended, signed.signer, signed.raw, signed.signature


def _opened(session: SessionId, links: Sequence[LinkLog]) -> bytes:
    return cbor2.dumps(
        [
            [log.peer, log.direction, log.kind, [[*leaf, blind(session, log.kind, leaf[0])] for leaf in log.leaves]]
            for log in links
        ]
    )
