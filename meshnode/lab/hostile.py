"""Stale, replayed, reordered and forged messages, held against the code that has to refuse them."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable
from typing import Any

from ..errors import MeshError
from ..ids import Layers, PeerId, SessionId
from ..keys import NodeKey
from ..route.lease import Event, LeaseBook
from ..session import Answer, HopSession
from ..wire import statements
from ..wire.messages import Contract, Grant, Lease, Push, Signed, Tokens
from .world import ARTIFACT

SESSION = SessionId(b"s" * 16)
D = b"d" * 32
ENTRY, A, B = PeerId("entry"), PeerId("a"), PeerId("b")
EPOCH = 7
LEASE = Lease(b"l" * 8, SESSION, EPOCH, 1, B, A, A, Layers(4, 9), Layers(4, 9), D, D, D, 512, 30_000, ())


def messages(seed: int, count: int) -> dict[str, Any]:
    """How many of `count` hostile messages were accepted, or changed anything."""
    chance = random.Random(f"hostile {seed}")
    kinds: list[Callable[[random.Random], bool]] = [_push, _ring, _answer, _lease, _statement]
    accepted: dict[str, int] = {}
    for number in range(count):
        kind = kinds[number % len(kinds)]
        if kind(chance):
            accepted[kind.__name__] = accepted.get(kind.__name__, 0) + 1
    return {"hostile_messages": count, "hostile_accepted": sum(accepted.values()), "hostile_kinds": accepted}


def _changes(state: Any, act: Callable[[], object]) -> bool:
    """Whether a call was not refused, or was and left something behind."""
    before = copy.deepcopy(state)
    try:
        act()
    except MeshError:
        return bool(state != before)
    return True


def _push(chance: random.Random) -> bool:
    at, steps = chance.randint(1, 400), chance.randint(1, 50)
    session = HopSession(LEASE, positions=at, steps=steps, segment=2)
    due = Push(LEASE.lease, SESSION, EPOCH, steps, at, chance.randint(1, 8), 4, at, segment=2)
    wrong = chance.choice(
        (
            {"epoch": chance.choice((EPOCH - 1, EPOCH + 1, 0, chance.randint(0, 6)))},
            {"session": SessionId(chance.randbytes(16))},
            {"step": chance.randrange(steps)},  # a replay
            {"step": steps + chance.randint(1, 9)},  # out of order
            {"first": chance.randrange(at), "cached": at},
            {"cached": chance.randrange(at)},
            {"cached": at + chance.randint(1, 99), "first": at + 1},
            {"begin": chance.choice((0, 3, 5, 9))},
            {"count": 4096},
            {"keep": chance.randrange(at)},
            {"segment": chance.choice((0, 1, 4, 99))},
        )
    )
    return _changes(session, lambda: session.accept(dataclasses.replace(due, **wrong)))


def _ring(chance: random.Random) -> bool:
    at = chance.randint(1, 400)
    session = HopSession(LEASE, positions=at, steps=1)
    due = Tokens(SESSION, EPOCH, at, (5,), lease=LEASE.lease)
    wrong = chance.choice(
        ({"epoch": EPOCH - 1}, {"session": SessionId(chance.randbytes(16))}, {"first": chance.randrange(at)},
         {"first": at + chance.randint(1, 9)}, {"ids": ()}, {"segment": 9})
    )  # fmt: skip
    return _changes(session, lambda: session.accept_ring(dataclasses.replace(due, **wrong)))


def _answer(chance: random.Random) -> bool:
    made = chance.randint(1, 20)
    answer = Answer((1, 2, 3), 30, ids=list(range(made)), text="x" * made)
    due = Tokens(SESSION, EPOCH, 3 + made, (5,), pieces=(b"p",))
    wrong = chance.choice(
        ({"first": 3 + chance.randrange(made)}, {"first": 4 + made}, {"pieces": ()}, {"pieces": (b"a", b"b")},
         {"ids": (), "pieces": ()}, {"ids": (1,) * 40, "pieces": (b"",) * 40})
    )  # fmt: skip
    before = list(answer.ids), answer.text, answer.finish
    try:
        answer.take(dataclasses.replace(due, **wrong))
    except MeshError:
        return (answer.ids, answer.text, answer.finish) != before
    return True


def _lease(chance: random.Random) -> bool:
    book, key = LeaseBook(2, 30.0), (ENTRY, SESSION, 0)
    book.reserve(key, EPOCH, 0.0, within=5)
    book.apply(key, EPOCH, Event.SIGN, 0.0)
    book.apply(key, EPOCH, Event.PUSH, 0.0)
    ended = chance.random() < 0.5
    if ended:
        book.apply(key, EPOCH, Event.CLOSE, 1.0)
    stranger = (PeerId("other"), SESSION, 0)
    stale = chance.randint(0, EPOCH if ended else EPOCH - 1)
    event = chance.choice((Event.PUSH, Event.RENEW, Event.SIGN, Event.CLOSE, Event.LAPSE))
    acts: list[Callable[[], object]] = [
        lambda: book.reserve(key, stale, 2.0, within=5),
        lambda: book.apply(key, stale, event, 2.0),
        lambda: book.apply(stranger, EPOCH, event, 2.0),
        lambda: book.apply(key, EPOCH + chance.randint(1, 9), event, 2.0),
        lambda: book.advance(key, EPOCH, stale, 2.0),
        lambda: book.advance(stranger, EPOCH, EPOCH + 1, 2.0),
    ]
    return _changes(book, chance.choice(acts))


_KEY, _OTHER = NodeKey(b"k" * 32), NodeKey(b"o" * 32)
_GRANT = Grant(SESSION, EPOCH, _KEY.peer, Contract(ARTIFACT, 1, "toy", "f32", "invariant", 12, 1), 99)
_SIGNED = statements.sign(_KEY, "mesh", _GRANT)


def _statement(chance: random.Random) -> bool:
    """A grant with a bit turned, of another mesh, under another name, or said to be something else."""
    raw, signature = bytearray(_SIGNED.raw), bytearray(_SIGNED.signature)
    mesh, cls, signer = "mesh", Grant, _KEY.peer
    how = chance.randrange(5)
    if how == 0:
        raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
    elif how == 1:
        signature[chance.randrange(64)] ^= 1 << chance.randrange(8)
    elif how == 2:
        mesh = chance.choice(("other", "mesh ", ""))
    elif how == 3:
        cls = Lease  # type: ignore[assignment]
    else:
        signer = _OTHER.peer
    forged = Signed(signer, bytes(raw), bytes(signature))
    try:
        statements.check(forged, cls, mesh, by=_KEY.peer if chance.random() < 0.5 else None)
    except MeshError:
        return False
    return True
