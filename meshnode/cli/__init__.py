"""The command line: a command a file, each loaded only when it is asked for.

main(arguments) -> exit status. Every fault ends as `error code: message` with its next step; see endings.py.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence

import click

from . import endings, settings

COMMANDS = {
    "serve": "Run a node: hold layers of models, or none, and answer.",
    "chat": "Talk with a model of the mesh.",
    "run": "Ask a model of the mesh; the answer comes as it is made.",
    "identify": "Tell what a GGUF file is, and the identity of its bytes.",
    "invite": "Write an invite that lets another machine into this mesh.",
    "status": "Show the node of this home: holdings, sessions, addresses.",
    "peers": "List the peers that the node is connected to, or deny some.",
    "models": "List the models known in the mesh, and which layers are missing.",
    "route": "Show the route that a model would take, and why others cannot.",
    "receipts": "List, show, export and verify who computed what.",
    "audit": "Do the work of a session again, and compare.",
    "balance": "Show what peers did for others, and had done.",
    "key": "Show, keep or move the key that a node is known by.",
    "service": "Let this machine run a node by itself, as a service of its user.",
    "doctor": "Look for what keeps this machine from serving, and tell what mends it.",
    "config": "Show what is set, and where.",
    "completion": "Print the script that lets a shell complete commands.",
    "stop": "Stop the node of this home.",
    "lab": "Try a whole private mesh on this machine.",
}


GROUPS = ("lab", "key", "service", "receipts", "peers", "config")


class _Commands(click.Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f".{name}", __package__).command
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):  # without importing them
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=_Commands,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "auto_envvar_prefix": settings.PREFIX,
    },
    invoke_without_command=True,
)
@click.option("--debug", is_flag=True, envvar="MESHNODE_DEBUG", help="Show logs and tracebacks on the terminal.")
@click.version_option(package_name="meshnode")
@click.pass_context
def _cli(context: click.Context, debug: bool) -> None:
    """A mesh of machines that together run a language model too large for any one of them.

    Begin with `meshnode lab run --model MODEL.gguf --prompt "Hello"`, a mesh on this machine alone, or with
    `meshnode serve MODEL.gguf`, a node of a new private mesh that others can be invited to.
    """
    endings.set_up_logs(debug)
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
    elif isinstance(context.command, click.Group) and context.invoked_subcommand not in ("config", "completion"):
        context.default_map = settings.defaults(context.command, context, context.invoked_subcommand)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; the process's exit status. No exception leaves it."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    as_json = "--json" in arguments
    debug = "--debug" in arguments or bool(os.environ.get("MESHNODE_DEBUG"))
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was begun is taken down, as by Ctrl-C
    try:
        endings.keep_standard_files()
        if "_MESHNODE_COMPLETE" in os.environ:
            from .completion import complete

            if (status := complete(_cli)) is not None:
                return status
        with _cli.make_context("meshnode", arguments) as context:  # click's own main has endings of its own
            _cli.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except BaseException as error:
        return endings.end_with(error, as_json=as_json, debug=debug, command=_called(arguments))
    return 0


def _called(arguments: Sequence[str]) -> str:
    """`status`, `lab run`: the command among the arguments."""
    words = [word for word in arguments if not word.startswith("-")][:2]
    if not words or words[0] not in COMMANDS:
        return "COMMAND"
    return " ".join(words if words[0] in GROUPS and len(words) == 2 else words[:1])
