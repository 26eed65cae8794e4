"""Leases a node has given: one table of states, one book of what is reserved.

    reserved   a route-open is under way; the session's place is taken
    ready      signed; no prefill has come yet
    running    pushes come
    (closed)   gone from the book; its epoch stays remembered so that it is never served again

| state    | sign  | push    | renew   | lapse  | close  |
|----------|-------|---------|---------|--------|--------|
| reserved | ready |         |         | closed | closed |
| ready    |       | running | ready   | closed | closed |
| running  |       | running | running | closed | closed |

What the table lacks is an error. A lease that is ready or running may also advance: its session goes on in a later
epoch, in the same place and state, and from then on every earlier epoch is stale.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from ..config import LEASE_IDLE_S
from ..errors import MeshError
from ..ids import PeerId, SessionId

Key: TypeAlias = tuple[PeerId, SessionId, int]  # a session is its entry node's: nobody else can name it; first layer

Ran: TypeAlias = tuple[int, frozenset[int]]  # the newest epoch, and the first layers of its leases

FIRST_PUSH_S = 120.0  # renewals keep a lease that long while hops before it work on the prompt, but not for ever
REMEMBERED = 4096  # epochs of ended sessions kept to fence late frames; older ones are refused as unknown anyway


class State(Enum):
    RESERVED = "reserved"
    READY = "ready"
    RUNNING = "running"
    CLOSED = "closed"


class Event(Enum):
    SIGN = "sign"
    PUSH = "push"
    RENEW = "renew"
    LAPSE = "lapse"
    CLOSE = "close"


_TABLE: dict[tuple[State, Event], State] = {
    (State.RESERVED, Event.SIGN): State.READY,
    (State.READY, Event.PUSH): State.RUNNING,
    (State.READY, Event.RENEW): State.READY,
    (State.RUNNING, Event.PUSH): State.RUNNING,
    (State.RUNNING, Event.RENEW): State.RUNNING,
    **{(s, e): State.CLOSED for s in list(State)[:3] for e in (Event.LAPSE, Event.CLOSE)},
}


def after(state: State, event: Event) -> State:
    """The state that follows; MeshError unknown_session where the table has none."""
    try:
        return _TABLE[state, event]
    except KeyError:
        raise MeshError("unknown_session", f"a {state.value} lease takes no {event.value}") from None


@dataclass
class Reservation:
    """One lease's place in the book. Times are monotonic seconds of the caller's clock."""

    key: Key
    epoch: int
    ends: float
    wait_ends: float = 0.0
    state: State = State.RESERVED


@dataclass
class LeaseBook:
    """What a holding has reserved: at most `places` sessions at once, and no epoch of a session twice."""

    places: int
    ttl: float
    _held: dict[Key, Reservation] = field(default_factory=dict)
    _ran: dict[tuple[PeerId, SessionId], tuple[int, frozenset[int]]] = field(
        default_factory=dict
    )  # epoch, first layers

    @property
    def free(self) -> int:
        return self.places - len(self._held)

    def reserve(self, key: Key, epoch: int, now: float, *, within: float) -> None:
        """Takes a place for `within` seconds. MeshError stale_epoch, or busy when none is free.

        An epoch that has run is never leased again; one that was only negotiated may be asked for anew.
        """
        if self._stale(key, epoch):
            raise MeshError("stale_epoch", f"epoch {epoch} of the session has run here before")
        if key in self._held:
            raise MeshError("busy", "the session is held here already", hint="close it first, or let its lease end")
        if not self.free:
            raise MeshError("busy", f"every session of this holding is taken ({self.places})")
        self._held[key] = Reservation(key, epoch, now + within)

    def idle(self, key: Key) -> Reservation | None:
        """The session's lease when it is signed and nothing has come for it: an attempt that was given up."""
        held = self._held.get(key)
        return held if held and held.state is State.READY else None

    def find(self, key: Key, epoch: int) -> Reservation:
        """MeshError stale_epoch for an epoch that has passed, unknown_session for what was never here."""
        held = self._held.get(key)
        if held and held.epoch == epoch:
            return held
        if self._stale(key, epoch):
            raise MeshError("stale_epoch", f"epoch {epoch} of the session has passed")
        raise MeshError("unknown_session", "no lease of that session and epoch is held here")

    def apply(self, key: Key, epoch: int, event: Event, now: float) -> State:
        """Moves a lease along the table; its time begins anew where that is due."""
        held = self.find(key, epoch)
        before, held.state = held.state, after(held.state, event)
        if held.state is State.CLOSED:
            del self._held[key]
        elif event is Event.SIGN:
            held.ends = now + min(LEASE_IDLE_S, self.ttl)
            held.wait_ends = now + FIRST_PUSH_S
        elif event is Event.PUSH and before is State.READY:
            held.ends = now + self.ttl
        elif event is Event.RENEW:
            held.ends = now + self.ttl if before is State.RUNNING else min(now + self.ttl, held.wait_ends)
        if event is Event.PUSH and before is State.READY:
            self._remember(key, epoch)
        return held.state

    def advance(self, key: Key, epoch: int, to: int, now: float) -> None:
        """A session's next epoch, on what it holds here. MeshError stale_epoch or unknown_session changes nothing."""
        held = self.find(key, epoch)
        if to <= epoch or self._stale(key, to):
            raise MeshError("stale_epoch", f"epoch {to} of the session does not come after {epoch}")
        after(held.state, Event.RENEW)  # one that is only reserved has nothing to go on with
        held.epoch, held.ends = to, now + self.ttl
        held.wait_ends = now + FIRST_PUSH_S
        self._remember(key, to)

    def _stale(self, key: Key, epoch: int) -> bool:
        """Whether a later epoch has run here, or this one at the same layers: a route may come by twice."""
        ran, layers = self._ran.get(key[:2], (-1, frozenset()))
        return epoch < ran or (epoch == ran and key[2] in layers)

    def _remember(self, key: Key, epoch: int) -> None:
        ran, layers = self._ran.pop(key[:2], (-1, frozenset()))
        if epoch > ran:
            ran, layers = epoch, frozenset()
        self._ran[key[:2]] = ran, layers | {key[2]}
        while len(self._ran) > REMEMBERED:
            del self._ran[next(iter(self._ran))]

    def lapsed(self, now: float) -> list[Reservation]:
        """Those whose time is over; the caller closes each with Event.LAPSE once its work has stopped."""
        return [held for held in self._held.values() if held.ends <= now]
