"""Stop strings: the answer ends before the first that occurs; nothing of it is shown, nothing before it is lost."""

from __future__ import annotations

from collections.abc import Sequence


class Stops:
    """Takes text as it comes and gives what can be shown.

    What may yet become a stop string is held back; where several end at the same character, the one that began first
    counts, so that no part of any is shown.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.found = False
        self.shown = 0  # characters given so far

    def feed(self, text: str) -> str:
        """What can be shown now; with `found` set, the last of it."""
        if not self._stops:
            self.shown += len(text)
            return text
        if self.found:
            return ""
        held = self._held + text
        ends = [(at + len(stop), at) for stop in self._stops if (at := held.find(stop)) >= 0]
        if ends:  # the one that is whole first: how the text came cut into tokens must not matter
            self.found = True
            self._held = ""
            return self._show(held[: min(ends)[1]])
        keep = next((n for n in range(min(self._longest - 1, len(held)), 0, -1) if self._may_begin(held[-n:])), 0)
        self._held = held[len(held) - keep :]
        return self._show(held[: len(held) - keep])

    def rest(self) -> str:
        """At the end of the text: what was held back in vain."""
        held, self._held = self._held, ""
        return self._show(held)

    def _may_begin(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stops)

    def _show(self, text: str) -> str:
        self.shown += len(text)
        return text
