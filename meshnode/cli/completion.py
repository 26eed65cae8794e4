"""meshnode completion bash|zsh|fish"""

from __future__ import annotations

import os

import click
from click.shell_completion import get_completion_class, shell_complete

from . import show
from .options import common

VARIABLE = "_MESHNODE_COMPLETE"  # what the script of a shell sets when it asks for completions
PROGRAM = "meshnode"


@click.command("completion")
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@common
@click.pass_context
def command(context: click.Context, shell: str, home: str | None, as_json: bool) -> None:
    """Print the script that lets SHELL complete our commands and options.

    For bash, put into ~/.bashrc: eval "$(meshnode completion bash)"
    """
    kind = get_completion_class(shell)
    assert kind is not None
    made = kind(context.find_root().command, {}, PROGRAM, VARIABLE)
    script = made.source_template % made.source_vars()  # source() would start the shell, to ask for its version
    if as_json:
        show.as_json({"shell": shell, "script": script})
    else:
        click.echo(script)


def complete(root: click.Command) -> int | None:
    """Answers a shell that asks for completions: the exit status. None when none does."""
    if not (instruction := os.environ.get(VARIABLE)):
        return None
    return shell_complete(root, {}, PROGRAM, VARIABLE, instruction)
