import json
from pathlib import Path

import pytest

from meshnode.config import Home
from meshnode.ledger import chain
from meshnode.ledger.store import Entry, open_ledger
from meshnode.mesh import KnownMesh, Mesh
from tests.api.fake_node import FakeNode
from tests.ledger.sessions import Session, digest, key_of, play

from .conftest import Meshnode

ENTRY, KEYS = key_of(1), [key_of(2), key_of(3)]


@pytest.fixture
def session(home: Home, monkeypatch: pytest.MonkeyPatch) -> Session:
    """One that is in the home's ledger; its tail's leaves are kept there, as those of an own receipt."""
    monkeypatch.setattr("tests.ledger.sessions.MESH", "mesh-x")
    import time

    made = play(KEYS, ENTRY, prompt=10, tokens=6, now=int(time.time()))
    home.create()
    home.remember(KnownMesh(Mesh("mesh-x", bytes(32)), (), ()))
    ledger = open_ledger(home.ledger_path)
    entries = [Entry(chain.read(signed, "mesh-x"), signed) for signed in made.statements()]
    ledger.append(entries, int(time.time()))
    ledger.keep_leaves([(entries[1].signed, made.written[1][0])])
    ledger.close()
    return made


def test_list_show_and_balance(meshnode: Meshnode, session: Session) -> None:
    tag = session.receipts[0][0].tag.hex()
    [listed] = json.loads(meshnode("receipts", "--json").out)["receipts"]
    assert (listed["id"], listed["verdict"], listed["entry"]) == (tag, "verified", ENTRY.peer)
    assert f"{tag[:12]}\t" in meshnode("receipts").out
    assert meshnode("receipts", "--peer", key_of(9).peer).out == ""
    shown = meshnode("receipts", "show", tag[:6])
    assert "verdict\tverified" in shown.out
    assert KEYS[1].peer in shown.out
    [row] = json.loads(meshnode("balance", KEYS[0].peer, "--json").out)["balances"]
    assert row == {"peer": KEYS[0].peer, "served": 45, "used": 0}
    assert f"{ENTRY.peer}\t0\t90" in meshnode("balance").out


def test_one_step_is_shown_with_its_proof(meshnode: Meshnode, session: Session) -> None:
    tag = session.receipts[0][0].tag.hex()
    steps = json.loads(meshnode("receipts", "show", tag, "--step", "12").out)["steps"]
    assert {step["kind"] for step in steps} == {"residual", "ring", "answer"}
    [answer] = [step for step in steps if step["kind"] == "answer"]
    assert answer["leaf"]["sha256"] == digest("", "token", 12).hex()
    assert meshnode("receipts", "show", tag, "--step", "999").err.startswith("error unknown_receipt")


def test_what_is_exported_anybody_can_verify(meshnode: Meshnode, session: Session, tmp_path: Path) -> None:
    file = tmp_path / "x"
    assert meshnode("receipts", "export", "--out", str(file)).status == 0
    ended = meshnode("receipts", "verify", str(file), "--home", str(tmp_path / "nothing"))
    assert (ended.status, ended.err) == (0, "1 session verified of 1\n")
    assert not (tmp_path / "nothing").exists()
    lines = file.read_text().splitlines()
    for changed, why in (
        (lines[:2] + lines[3:], "missing"),
        ([*lines, lines[1].replace('"raw": "', '"raw": "00')], "line 5: bad_"),
        ([*lines, "{"], "line 5: bad_receipt"),
    ):
        file.write_text("\n".join(changed) + "\n")
        ended = meshnode("receipts", "verify", str(file))
        assert ended.status == 3
        assert why in ended.out
    for nothing in ("", "{}\n", lines[0] + "\n", "\x00" * 300_000, "[" * 100_000):
        file.write_text(nothing)
        assert meshnode("receipts", "verify", str(file)).err.startswith("error bad_export")
    assert meshnode("receipts", "verify", str(tmp_path / "no")).err.startswith("error not_found")


def test_what_is_not_there(meshnode: Meshnode, session: Session, tmp_path: Path) -> None:
    assert meshnode("receipts", "show", "ffff").err.startswith("error unknown_receipt")
    assert meshnode("receipts", "show", "x").err.startswith("error usage")
    assert meshnode("receipts", "--home", str(tmp_path / "no")).err.startswith("error not_found")
    assert meshnode("balance", "--home", str(tmp_path / "no")).err.startswith("error not_found")


def test_an_audit_that_does_not_agree_is_no_success(meshnode: Meshnode, node: FakeNode) -> None:
    ended = meshnode("audit", "abcd")
    assert (ended.status, ended.out.split("\t")[1]) == (0, "agrees")
    ended = meshnode("audit", "bad0", "--json")
    assert (ended.status, json.loads(ended.out)["findings"][0]["verdict"]) == (10, "differs")
    assert meshnode("audit").status == 2
