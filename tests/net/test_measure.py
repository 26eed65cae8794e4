"""What a node knows of its neighbours' links."""

from __future__ import annotations

import math

import pytest

from meshnode.net.measure import LEAST_SAMPLE, RECENT, NeighbourMeasure

from .helpers import mesh, until


def test_nothing_is_told_before_it_is_measured():
    measure = NeighbourMeasure()
    assert math.isnan(measure.rtt)
    assert math.isnan(measure.least)
    assert math.isnan(measure.bandwidth)


def test_one_late_answer_moves_little_and_a_lasting_change_much():
    measure = NeighbourMeasure()
    for _ in range(10):
        measure.trip(0.010)
    measure.trip(0.110)
    assert measure.rtt == pytest.approx(0.035)
    assert measure.least == 0.010
    for _ in range(RECENT):
        measure.trip(0.100)
    assert measure.rtt == pytest.approx(0.100, rel=0.01)
    assert measure.least == 0.100


def test_what_is_small_says_nothing_of_the_bandwidth():
    measure = NeighbourMeasure()
    measure.sent(LEAST_SAMPLE - 1, 0.001)
    assert math.isnan(measure.bandwidth)
    measure.sent(1 << 20, 0.01)
    assert measure.bandwidth == pytest.approx((1 << 20) / 0.01)


async def test_a_neighbour_is_measured_and_remembered():
    async with mesh(2) as (a, b):

        async def sink(stream):
            while True:
                await stream.receive()
                await stream.send(b"ok")

        a.handle("/sink/1", sink)
        stream = await b.open(a.peer, "/sink/1")
        await stream.send(b"x", bytes(4 << 20))
        await stream.receive()
        await until(lambda: b.measures(a.peer).bandwidth > 1e6)
        await until(lambda: b.measures(a.peer).rtt < 1)
        (info,) = b.connected()
        assert info.measure is b.measures(a.peer)
        assert math.isnan(a.measures(b.peer).bandwidth)  # which has sent nothing
        rtt = info.rtt
        await b._members.connections[a.peer][0].close()
        await until(lambda: not b.connected())
        assert b.measures(a.peer).rtt == rtt
