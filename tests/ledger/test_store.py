"""What was acknowledged is there, whatever ended the process."""

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from meshnode.errors import MeshError
from meshnode.ledger import chain, store
from meshnode.ledger.store import AHEAD_S, RETENTION_S, Entry, Ledger, open_ledger
from meshnode.wire import statements
from meshnode.wire.messages import Signed

from .sessions import MESH, NOW, Session, key_of, play

ENTRY, KEYS = key_of(1), [key_of(2), key_of(3)]


def entries(*sessions: Session) -> list[Entry]:
    return [Entry(chain.read(signed, MESH), signed) for session in sessions for signed in session.statements()]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return open_ledger(tmp_path / "ledger.sqlite")


def test_what_is_appended_is_there_again(ledger: Ledger, tmp_path: Path) -> None:
    said = entries(play(KEYS, ENTRY, prompt=5000))
    assert ledger.append(said, NOW) == said
    assert ledger.append(said, NOW) == []
    ledger.close()
    again = open_ledger(tmp_path / "ledger.sqlite")
    assert len(again) == len(said) == 6
    assert {entry.digest for entry in again.entries()} == {entry.digest for entry in said}
    [found] = chain.chains(again.receipts(), again.acceptances())
    assert found.verdict == chain.VERIFIED
    assert again.append(said, NOW) == []


def test_it_is_found_by_peer_session_and_kind(ledger: Ledger) -> None:
    one, other = play(KEYS, ENTRY), play([key_of(7)], key_of(8), session=b"o" * 16)
    ledger.append(entries(one, other), NOW)
    tag = one.receipts[0][0].tag
    assert len(list(ledger.entries(tag=tag))) == 3
    assert {e.signed.signer for e in ledger.entries(peer=key_of(8).peer)} == {key_of(8).peer}
    assert len(ledger.receipts()) == 3
    assert [signed.signer for signed in ledger.find(tag.hex()[:12])] != []
    [first] = ledger.get([entries(one)[0].digest, b"x" * 32])
    assert first == entries(one)[0].signed
    assert list(ledger.entries(since=NOW + 1)) == []


def test_leaves_open_own_receipts(ledger: Ledger) -> None:
    session = play(KEYS, ENTRY)
    [written] = session.written[1]
    digest = entries(session)[1].digest
    ledger.keep_leaves([(entries(session)[1].signed, written)])
    links = ledger.leaves(digest)
    assert links is not None
    assert {kind: len(leaves) for _, _, kind, leaves in links} == {"residual": 2, "answer": 2, "ring": 1}
    assert ledger.leaves(b"x" * 32) is None


@pytest.mark.parametrize(
    ("ended", "kept"), [(NOW, 1), (NOW - RETENTION_S, 0), (NOW + AHEAD_S, 1), (NOW + AHEAD_S + 1, 0)]
)
def test_what_is_too_old_or_from_the_future_is_not_kept(ledger: Ledger, ended: int, kept: int) -> None:
    said = [e for e in entries(play(KEYS[:1], ENTRY, now=ended)) if e.signed.signer == KEYS[0].peer]
    assert len(ledger.append(said, NOW)) == kept


def test_it_forgets_by_age_and_by_number(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        ledger.append(entries(play(KEYS, ENTRY, session=bytes([number]) * 16, now=NOW + number)), NOW + 5)
    before = len(ledger)
    gone = ledger.expire(NOW + RETENTION_S)
    assert (gone, len(ledger)) == (before - len(ledger), len(ledger))
    assert gone >= 2
    monkeypatch.setattr(store, "MAX_STATEMENTS", 3)
    ledger.expire(NOW + 5)
    assert len(ledger) == 3 == len(list(ledger.entries()))
    assert ledger.index.marks() == store.Index(e.digest for e in ledger.entries()).marks()


def test_nobody_fills_it_alone(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_A_SIGNER", 3)
    for number in range(5):
        ledger.append(entries(play([KEYS[0]], ENTRY, session=bytes([number]) * 16)), NOW)
    assert len(ledger.receipts()) == 3
    ledger.append(entries(play([KEYS[1]], key_of(8), session=b"z" * 16)), NOW)
    assert len(ledger.receipts()) == 4


WRITER = """
    import sys
    from meshnode.ledger.store import open_ledger
    from tests.ledger.sessions import NOW, key_of, play
    from tests.ledger.test_store import entries
    ledger = open_ledger(sys.argv[1])
    for number in range(10_000):
        said = entries(play([key_of(2), key_of(3)], key_of(1), session=number.to_bytes(16, "big")))
        ledger.append(said, NOW)
        print(number, flush=True)
"""


def test_what_was_acknowledged_survives_a_kill_at_any_write(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    for acknowledged in (1, 7, 20):
        path.unlink(missing_ok=True)
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITER), str(path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(acknowledged)]
        process.send_signal(signal.SIGKILL)
        rest = process.communicate()[0]
        number = int(([*said, *rest.split("\n")[:-1]])[-1])
        ledger = open_ledger(path)
        found = chain.chains(ledger.receipts(), ledger.acceptances())
        assert len(found) in (number + 1, number + 2)  # one may have been written and not been told yet
        assert {c.verdict for c in found} == {chain.VERIFIED}  # whole sessions: none is torn
        assert ledger._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        ledger.close()


def test_a_full_disk_loses_nothing_that_was_acknowledged(ledger: Ledger) -> None:
    ledger.append(entries(play(KEYS, ENTRY)), NOW)
    (pages,) = ledger._db.execute("PRAGMA page_count").fetchone()
    ledger._db.execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(MeshError, match="full") as refused:
        for number in range(100):
            ledger.append(entries(play(KEYS, ENTRY, session=bytes([number]) * 16)), NOW)
    assert refused.value.code == "bad_ledger"
    assert len(ledger) == len(list(ledger.entries()))
    found = chain.chains(ledger.receipts(), ledger.acceptances())
    assert {c.verdict for c in found} == {chain.VERIFIED}
    ledger._db.execute("PRAGMA max_page_count = 100000")
    assert len(ledger.append(entries(play(KEYS, ENTRY, session=b"n" * 16)), NOW)) == 3


def test_what_is_no_ledger_is_said(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(os.urandom(4096))
    with pytest.raises(MeshError) as refused:
        open_ledger(path)
    assert refused.value.code == "bad_ledger"
    path.unlink()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(MeshError, match="another version"):
        open_ledger(path)


def test_a_forged_statement_is_no_entry() -> None:
    [receipt, *_] = play(KEYS, ENTRY).statements()
    forged = statements.sign(key_of(9), MESH, chain.read(receipt, MESH))
    with pytest.raises(MeshError):
        chain.read(Signed(receipt.signer, forged.raw, forged.signature), MESH)


def test_it_keeps_balances_as_statements_come(ledger: Ledger) -> None:
    """In whatever order, and however few at once."""
    said = entries(play(KEYS, ENTRY, prompt=10, tokens=6))
    for entry in reversed(said):
        ledger.append([entry], NOW)
    assert {peer: b.served for peer, b in ledger.balances().items()} == {k.peer: 45 for k in KEYS} | {ENTRY.peer: 0}
    assert ledger.standing({ENTRY.peer}) == {k.peer: 45 for k in KEYS}
    assert ledger.standing({KEYS[0].peer}) == {}
    ledger.expire(NOW + RETENTION_S)
    assert ledger.balances() == {}
