"""Bars for what takes longer than a moment. They appear on a terminal alone, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from . import show


class Bars:
    """Named bars, each from 0 to 1. Without a terminal nothing is drawn."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def show(self, name: str, part: float | None) -> None:
        """part: 0..1, None when it cannot be told."""
        if self._progress is None:
            return
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(show.line(name), total=1.0)
        total = None if part is None else 1.0
        self._progress.update(self._tasks[name], completed=part or 0.0, total=total)

    def drop(self, name: str) -> None:
        task = self._tasks.pop(name, None)
        if self._progress is not None and task is not None:
            self._progress.remove_task(task)

    def keep(self, names: set[str]) -> None:
        """Drops all others."""
        for name in set(self._tasks) - names:
            self.drop(name)


@contextmanager
def bars() -> Iterator[Bars]:
    if not sys.stderr.isatty():
        yield Bars(None)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=show.console(stderr=True), transient=True) as progress:
        yield Bars(progress)
