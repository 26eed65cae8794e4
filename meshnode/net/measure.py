"""What a neighbour's link is like, as this node itself has measured it: round trip and bandwidth, smoothed."""

from __future__ import annotations

import math
from collections import deque

SHARE = 0.25  # of the newest sample in what is told: a jump is half told after three
RECENT = 30  # round trips among which the least is looked for: a minute of pings
LEAST_SAMPLE = 256 << 10  # bytes: what is smaller says more of the round trip than of the bandwidth


class NeighbourMeasure:
    """rtt: s, smoothed; least: s, the shortest of late, which no queue lengthened; bandwidth: bytes/s that the
    neighbour took from us in bulk, smoothed. Each is NaN until it is measured."""

    def __init__(self) -> None:
        self.rtt = math.nan
        self.bandwidth = math.nan
        self._trips: deque[float] = deque(maxlen=RECENT)

    @property
    def least(self) -> float:
        return min(self._trips, default=math.nan)

    def trip(self, seconds: float) -> None:
        """A ping was answered."""
        self._trips.append(seconds)
        self.rtt = _smoothed(self.rtt, seconds)

    def sent(self, size: int, seconds: float) -> None:
        """The neighbour took so many bytes in so long a time."""
        if size >= LEAST_SAMPLE and seconds > 0:
            self.bandwidth = _smoothed(self.bandwidth, size / seconds)


def _smoothed(before: float, sample: float) -> float:
    return sample if math.isnan(before) else before + SHARE * (sample - before)
