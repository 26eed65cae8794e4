"""How a command ends when it cannot do what it was asked: one line that names the fault, one with the next step."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import traceback

import click

from ..errors import MeshError, root_cause

BROKEN_PIPE = 128 + 13  # as a shell shows a command that SIGPIPE ended
INTERRUPTED = 130


class Told(Exception):
    """A fault that the command has shown in its own output already: only its exit status is left to give."""

    def __init__(self, error: MeshError) -> None:
        super().__init__(str(error))
        self.error = error


def set_up_logs(debug: bool) -> None:
    """Nothing on the terminal but what a command says itself, unless asked for."""
    root = logging.getLogger()
    handler = logging.StreamHandler() if debug else logging.NullHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
    root.addHandler(handler)
    root.setLevel(logging.INFO if debug else logging.WARNING)


def end_with(error: BaseException, *, as_json: bool, debug: bool) -> int:
    """Says what went wrong, on stderr or as a JSON document on stdout; the exit status."""
    cause = root_cause(error)
    if isinstance(cause, BrokenPipeError):
        _drop_output()
        return BROKEN_PIPE
    if isinstance(cause, Told):
        return cause.error.exit_status
    if debug and not isinstance(cause, MeshError | click.ClickException | KeyboardInterrupt | click.Abort):
        traceback.print_exception(error)
    fault = _fault(cause)
    with contextlib.suppress(BrokenPipeError):
        if as_json:
            print(json.dumps({"error": {"code": fault.code, "message": fault.message, "hint": fault.hint}}), flush=True)
        else:
            say_error(fault)
    return fault.exit_status


def say_error(fault: MeshError) -> None:
    """`error code: message` and its hint on stderr."""
    sys.stdout.flush()
    color = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    click.echo(click.style("error ", fg="red") + f"{fault.code}: {fault.message}", err=True, color=color)
    if fault.hint:
        click.echo(click.style(f"  {fault.hint}", dim=True), err=True, color=color)


def _fault(cause: BaseException) -> MeshError:
    if isinstance(cause, MeshError):
        return cause
    if isinstance(cause, click.UsageError):
        path = cause.ctx.command_path if cause.ctx else "meshnode"
        return MeshError("usage", cause.format_message().rstrip("."), hint=f"see `{path} --help`")
    if isinstance(cause, click.ClickException):
        return MeshError("usage", cause.format_message())
    if isinstance(cause, KeyboardInterrupt | click.Abort):
        return MeshError("cancelled", "it was interrupted", hint="")
    return MeshError(
        "internal",
        f"{type(cause).__name__}: {cause}",
        hint="this is a fault of meshnode; `meshnode --debug ...` shows where",
    )


def _drop_output() -> None:
    """Whoever read our output is gone; what is still buffered must not raise once more when Python ends."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
