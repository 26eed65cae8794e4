"""What commands print: tables on a terminal, tab-separated lines in a pipe, one JSON document when asked."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

_KEPT = "\n\t"


def as_json(value: Any) -> None:
    click.echo(json.dumps(value))


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, nothing: str = "") -> None:
    """A table with a heading on a terminal; in a pipe the rows alone, their cells parted by tabs.

    nothing: what is said on a terminal when there is no row.
    """
    cells = [[line(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        for row in cells:
            click.echo("\t".join(row))
        return
    if not cells:
        click.echo(nothing)
        return
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        drawn.add_column(column, overflow="fold")
    for row in cells:
        drawn.add_row(*map(Text, row))
    console().print(drawn)


def facts(pairs: Sequence[tuple[str, Any]]) -> None:
    """Names and values, one a line."""
    if not sys.stdout.isatty():
        for name, value in pairs:
            click.echo(f"{name}\t{line(value)}")
        return
    drawn = Table(box=None, pad_edge=False, show_header=False)
    drawn.add_column(style="dim")
    drawn.add_column(overflow="fold")
    for name, value in pairs:
        drawn.add_row(name, Text(line(value)))
    console().print(drawn)


def console(*, stderr: bool = False) -> Console:
    return Console(stderr=stderr, highlight=False, markup=False, soft_wrap=False)


def note(text: str) -> None:
    """A remark beside the output: dim, on stderr."""
    color = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    click.echo(click.style(visible(text), dim=True), err=True, color=color)


def line(value: Any) -> str:
    """A value on one line, without anything that could move a terminal's cursor: peers choose their names."""
    return visible(str(value), kept="")


def visible(text: str, kept: str = _KEPT) -> str:
    """Text with control characters written out; strangers' words must not command a terminal."""
    return "".join(c if c.isprintable() or c in kept else _written_out(c) for c in text)


def _written_out(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode()


def layers(pair: Sequence[int]) -> str:
    """[a, b] -> a-b"""
    return f"{pair[0]}-{pair[1]}"


def ranges(pairs: Sequence[Sequence[int]]) -> str:
    return ", ".join(map(layers, pairs)) or "-"


def short(peer: str) -> str:
    """The end of a peer id, which is what differs between peers."""
    return f"…{peer[-8:]}" if len(peer) > 12 else peer


def count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
