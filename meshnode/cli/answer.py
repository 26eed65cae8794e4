"""How an answer is shown: its text as it comes, then a footer that names the route and how fast it went."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import click

from . import show


class Answer:
    """Takes the events of a run one by one. footer: show it even without a terminal."""

    def __init__(self, *, as_json: bool, footer: bool = False) -> None:
        self._as_json = as_json
        self._footer = footer or (sys.stderr.isatty() and sys.stdout.isatty())
        self._terminal = sys.stdout.isatty()
        self._open_line = False
        self.result: dict[str, Any] | None = None

    def take(self, event: dict[str, Any]) -> None:
        if event["event"] == "done":
            self.result = event["result"]
        elif event["event"] == "token" and not self._as_json:
            self._write(event["text"])

    def finish(self) -> None:
        """After the last event; also after a fault, so that what is said of it begins a line."""
        if self._open_line:
            click.echo()
            self._open_line = False
        if self.result is None:
            return
        if self._as_json:
            show.as_json(self.result)
        elif self._footer:
            sys.stdout.flush()
            for text in footer(self.result):
                show.note(text)

    def take_all(self, events: Iterable[dict[str, Any]]) -> None:
        try:
            for event in events:
                self.take(event)
        finally:
            self.finish()

    def _write(self, text: str) -> None:
        if text:
            sys.stdout.write(show.visible(text) if self._terminal else text)
            sys.stdout.flush()
            self._open_line = not text.endswith("\n")


def footer(result: dict[str, Any]) -> list[str]:
    """The route, the receipts and the speed, a line each."""
    hops = " → ".join(f"{show.short(hop['peer'])} {show.layers(hop['effective'])}" for hop in result["route"])
    timing, usage = result["timing"], result["usage"]
    speeds = [f"first token after {timing['ttft_s']:.2f} s"]
    for name in ("prefill", "decode"):
        if timing.get(f"{name}_tok_s"):
            speeds.append(f"{name} {timing[f'{name}_tok_s']:.1f} tokens/s")
    receipts = show.count(len(result["receipts"]), "receipt")
    agreed = "checked and countersigned" if result.get("accepted") else "NOT accepted"
    return [
        f"route     {hops}",
        f"receipts  {receipts}, {agreed}",
        f"tokens    {usage['prompt_tokens']} + {usage['completion_tokens']} ({result['finish_reason']}), "
        + ", ".join(speeds),
    ]
