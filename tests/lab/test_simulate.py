"""A thousand simulated meshes with faults, in two halves: the other is in test_figures."""

import pytest

from meshnode.errors import MeshError
from meshnode.lab import hostile, world
from meshnode.lab.simulate import simulate
from meshnode.session import HopSession

from .seeds import check


@pytest.mark.timeout(300)
def test_the_first_half_of_a_thousand_meshes() -> None:
    check(range(500))


def test_a_seed_gives_the_same_events_again() -> None:
    for seed in (3, 11):
        first, second = simulate(seed), simulate(seed)
        assert first.log == second.log
        assert first.log
    assert simulate(3).digest != simulate(4).digest


def test_a_simulation_sees_a_wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = world.FakeWorker.step

    async def odd(self: world.FakeWorker, handle: int, first: int, *args: object, **options: object) -> object:
        if first == 12:
            for kept in self.sessions[handle]:
                kept[-1:] = [n + 1 for n in kept[-1:]]
        return await sound(self, handle, first, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(world.FakeWorker, "step", odd)
    assert any("wrong tokens" in fault for seed in range(5) for fault in simulate(seed).faults)


def test_hostile_messages_are_counted_when_they_are_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hostile.messages(1, 500)["hostile_accepted"] == 0
    monkeypatch.setattr(HopSession, "accept", lambda session, push: None)
    assert hostile.messages(1, 500)["hostile_kinds"] == {"_push": 100}

    def half(session: HopSession, push: object) -> None:
        session.steps += 1
        raise MeshError("bad_step", "refused, but not without a trace")

    monkeypatch.setattr(HopSession, "accept", half)
    assert hostile.messages(1, 500)["hostile_kinds"] == {"_push": 100}
