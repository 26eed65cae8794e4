"""What the HTTP API counts, as Prometheus reads it. Prefill and decode are counted apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TOTALS = {
    "prompt_tokens": "Tokens of prompts that were pushed.",
    "completion_tokens": "Tokens of answers.",
    "prefill_seconds": "Seconds from a route's opening to the first token.",
    "decode_seconds": "Seconds from the first token to the last.",
}

_NEIGHBOURS = {  # of each: where a peer has it, in units of the base unit
    "neighbour_round_trip_seconds": ("rtt_ms", 1e-3, "Smoothed round trip to a connected peer."),
    "neighbour_bandwidth_bytes_per_second": ("bandwidth_mb_s", 1e6, "Smoothed bandwidth of bulk to a connected peer."),
}


class Meter:
    def __init__(self) -> None:
        self._answers: Counter[str] = Counter()
        self._totals: dict[str, float] = dict.fromkeys(_TOTALS, 0)

    def answered(self, outcome: str) -> None:
        """A request is over: `ok`, or the code of its fault."""
        self._answers[outcome] += 1

    def made(self, prompt: int, completion: int, prefill_s: float, decode_s: float) -> None:
        for name, value in zip(_TOTALS, (prompt, completion, prefill_s, decode_s), strict=True):
            self._totals[name] += value

    def text(self, gauges: dict[str, tuple[float, str]], peers: Sequence[dict[str, Any]] = ()) -> str:
        """All of it; gauges: name -> (value, what it is), as they are now; peers: as the control API lists them."""
        lines = [
            "# HELP meshnode_answers_total Requests for answers, by outcome.",
            "# TYPE meshnode_answers_total counter",
        ]
        lines += [f'meshnode_answers_total{{outcome="{one}"}} {count}' for one, count in sorted(self._answers.items())]
        for name, help_ in _TOTALS.items():
            lines += [f"# HELP meshnode_{name}_total {help_}", f"# TYPE meshnode_{name}_total counter"]
            lines.append(f"meshnode_{name}_total {self._totals[name]:g}")
        for name, (value, help_) in gauges.items():
            lines += [f"# HELP meshnode_{name} {help_}", f"# TYPE meshnode_{name} gauge", f"meshnode_{name} {value:g}"]
        for name, (key, unit, help_) in _NEIGHBOURS.items():
            lines += [f"# HELP meshnode_{name} {help_}", f"# TYPE meshnode_{name} gauge"]
            known = [(one["peer"], one[key] * unit) for one in peers if one.get(key) is not None]
            lines += [f'meshnode_{name}{{peer="{peer}"}} {value:g}' for peer, value in known]
        return "\n".join(lines) + "\n"
