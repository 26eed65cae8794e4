"""How a command ends when it cannot do what it was asked: one line that names the fault, one with the next step."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import sys
import traceback

import click

from ..errors import CODES, MeshError, root_cause

BROKEN_PIPE = 128 + 13  # as a shell shows a command that SIGPIPE ended
INTERRUPTED = 130
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


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


def keep_standard_files() -> None:
    """Puts /dev/null where a standard file is closed, so that nothing else is opened there and then written to.

    MeshError bad_output when it is the output: what a command has to say would be lost.
    """
    closed = sys.stdout is None
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115 - for as long as the process lives
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if closed:
        raise MeshError("bad_output", "the standard output is closed")


def end_with(error: BaseException, *, as_json: bool, debug: bool, command: str = "COMMAND") -> int:
    """Says what went wrong, on stderr or as a JSON document on stdout; the exit status.

    command: the one that was called, for the hint of how to call it.
    """
    cause = root_cause(error)
    if isinstance(cause, BrokenPipeError):
        _drop_output()
        return BROKEN_PIPE
    if isinstance(cause, Told):
        return cause.error.exit_status
    if debug and not isinstance(cause, MeshError | click.ClickException | KeyboardInterrupt | click.Abort):
        traceback.print_exception(error)
    fault = _fault(cause)
    if fault.code == "usage" and fault.hint == CODES["usage"][2]:
        fault = MeshError("usage", fault.message, hint=fault.hint.replace("COMMAND", command))
    if not (as_json and fault.code != "bad_output" and _said_as_json(fault)):
        with contextlib.suppress(OSError):  # there is nobody left to tell
            say_error(fault)
    return fault.exit_status


def _said_as_json(fault: MeshError) -> bool:
    try:
        print(json.dumps({"error": {"code": fault.code, "message": fault.message, "hint": fault.hint}}), flush=True)
    except BrokenPipeError:
        _drop_output()
    except OSError:
        _drop_output()
        return False
    return True


def say_error(fault: MeshError) -> None:
    """`error code: message` and its hint on stderr."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    color = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    click.echo(click.style("error ", fg="red") + f"{fault.code}: {fault.message}", err=True, color=color)
    if fault.hint:
        click.echo(click.style(f"  {fault.hint}", dim=True), err=True, color=color)


def _fault(cause: BaseException) -> MeshError:
    if isinstance(cause, MeshError):
        return cause
    if isinstance(cause, click.UsageError):
        message = cause.format_message().rstrip(".")
        if cause.ctx is None or (cause.ctx.parent is None and isinstance(cause, click.BadOptionUsage)):
            return MeshError("usage", message)  # click's parser does not tell whose option it was
        return MeshError("usage", message, hint=f"see `{cause.ctx.command_path} --help`")
    if isinstance(cause, click.ClickException):
        return MeshError("usage", cause.format_message())
    if isinstance(cause, KeyboardInterrupt | click.Abort):
        return MeshError("cancelled", "it was interrupted", hint="start it again")
    if isinstance(cause, OSError) and (reason := _unwritable(cause)):
        _drop_output()
        return MeshError("bad_output", f"the output cannot be written: {reason}")
    return MeshError(
        "internal",
        f"{type(cause).__name__}: {cause}",
        hint="this is a fault of meshnode; `meshnode --debug ...` shows where",
    )


def _unwritable(cause: OSError) -> str | None:
    """Why nothing more can be written to stdout; None when it can, and the fault is another's."""
    if cause.filename is not None or cause.errno not in _FULL:
        return None
    try:
        sys.stdout.write("\n")  # what was written before may be lost already
        sys.stdout.flush()
    except OSError as error:
        return error.strerror
    return None


def _drop_output() -> None:
    """Whoever read our output is gone; what is still buffered must not raise once more when Python ends."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
