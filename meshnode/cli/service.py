"""meshnode service install | uninstall: a unit of `systemd --user`"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import platformdirs

from ..config import Home, cache_dir
from ..errors import MeshError
from ..wire.invite import FAMILY
from . import show
from .options import common, home_of, path_of
from .serve import command as serve

UNIT = "meshnode.service"
STOP_S = 20  # a node closes its sessions in a few seconds; then systemd may kill it
ASK_S = 30.0  # for systemctl to answer
HIDDEN = ("/tmp", "/var/tmp")  # PrivateTmp gives a service folders of its own there

_TEMPLATE = """\
[Unit]
Description=meshnode, a node of a mesh that runs language models
Documentation=man:systemd.service(5)
After=network-online.target

[Service]
ExecStart={command}
Restart=on-failure
RestartSec=5
KillSignal=SIGTERM
TimeoutStopSec={stop_s}
UMask=0077
NoNewPrivileges=yes
PrivateTmp=yes
ProtectSystem=strict
ProtectHome=read-only
ReadWritePaths={writable}
ProtectKernelTunables=yes
ProtectControlGroups=yes
RestrictSUIDSGID=yes
RestrictRealtime=yes
RestrictNamespaces=yes
LockPersonality=yes
SystemCallArchitectures=native
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK

[Install]
WantedBy=default.target
"""


@click.group("service", context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """Let this machine run a node by itself: from login on, or from boot with `loginctl enable-linger`."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@command.command("install", context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[MODEL.gguf ...] [options of serve]")
@click.option("--dry-run", is_flag=True, help="Show the unit, and change nothing.")
@common
def install(arguments: tuple[str, ...], dry_run: bool, home: str | None, as_json: bool) -> None:
    """Write a hardened unit that runs `meshnode serve` with these arguments, and start it."""
    where = home_of(home)
    text = unit(where, absolute(arguments))
    path = unit_path()
    if dry_run:
        if as_json:
            show.as_json({"path": str(path), "unit": text})
        else:
            click.echo(text, nl=False)
        return
    systemctl = _systemctl()
    where.create()  # what a unit may write to has to be there
    cache_dir().mkdir(parents=True, exist_ok=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o644)  # systemd warns of units that others may write
    except OSError as error:
        raise MeshError("bad_output", f"{path} cannot be written: {error.strerror}") from error
    _call(systemctl, "daemon-reload")
    _call(systemctl, "enable", UNIT)
    _call(systemctl, "restart", UNIT)
    if as_json:
        show.as_json({"path": str(path), "started": True})
    else:
        show.note(f"{path} is installed and started; see `meshnode status`, or systemctl --user status {UNIT}")
        show.note("to run it also while nobody is logged in: loginctl enable-linger")


@command.command("uninstall")
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and change nothing.")
@common
def uninstall(dry_run: bool, home: str | None, as_json: bool) -> None:
    """Stop the service and remove its unit. The home stays, and with it the node's key."""
    where, path = home_of(home), unit_path()
    if not path.exists():
        raise MeshError("not_found", f"no service is installed: there is no {path}", hint="nothing is to be done")
    if not dry_run:
        systemctl = _systemctl()
        _call(systemctl, "disable", "--now", UNIT)
        path.unlink(missing_ok=True)
        _call(systemctl, "daemon-reload")
    if as_json:
        show.as_json({"path": str(path), "removed": not dry_run, "kept": str(where.path)})
    else:
        show.note(f"{path} {'would be' if dry_run else 'is'} removed; {where.path} stays, with the node's key")


def unit_path() -> Path:
    return platformdirs.user_config_path() / "systemd" / "user" / UNIT


def absolute(arguments: Sequence[str]) -> list[str]:
    """serve's arguments, checked as it checks them, with its paths made to hold from any folder.

    MeshError usage when an invite itself is among them: units are for everybody to read.
    """
    with serve.make_context("meshnode serve", list(arguments)) as context:
        named = context.params
    join = named["join"]
    if join is not None and join.startswith(FAMILY):
        message = "an invite in a unit could be read by others"
        raise MeshError("usage", message, hint="save it to a file of mode 600, and give --join FILE")
    if named["home"] is not None or named["as_json"] or join == "-":
        raise MeshError("usage", "--home and --json are the install's own here; stdin is nothing to a service")
    paths = {*named["models"], *([join] if join is not None and not join.startswith("/ip") else [])}
    return [_whole(argument, paths) for argument in arguments]


def _whole(argument: str, paths: set[str]) -> str:
    option, equals, value = argument.partition("=")
    if option == "--join" and equals and value in paths:
        return f"--join={_lasting(path_of(value))}"
    return str(_lasting(path_of(argument))) if argument in paths else argument


def _lasting(path: Path) -> Path:
    """From any folder. MeshError usage when a service, which has temporary folders of its own, would not see it."""
    whole = path.absolute()
    if any(whole.is_relative_to(folder) for folder in HIDDEN):
        raise MeshError("usage", f"a service does not see {show.line(whole)}", hint="move it elsewhere")
    return whole


def unit(home: Home, arguments: Sequence[str]) -> str:
    program = [sys.executable, "-m", "meshnode", "serve", *arguments, "--home", str(_lasting(home.path))]
    return _TEMPLATE.format(
        command=" ".join(map(_quoted, program)),
        stop_s=STOP_S,
        writable=" ".join(map(_quoted_path, (home.path, cache_dir()))),
    )


def _quoted(word: str) -> str:
    """A word as ExecStart takes it: systemd expands % and $, and reads escapes in quotes."""
    if any(not c.isprintable() for c in word):
        raise MeshError("usage", f"{show.line(word)} cannot be written into a unit", hint="rename it")
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def _quoted_path(path: Path) -> str:
    if any(not c.isprintable() for c in str(path)):
        raise MeshError("usage", f"{show.line(path)} cannot be written into a unit", hint="give another --home")
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"-{escaped}"'  # a folder that is not there yet does not keep the node from starting


def _systemctl() -> str:
    program = shutil.which("systemctl")
    if program is None:
        raise MeshError("missing_tool", "there is no systemctl", hint="see --dry-run, and use your own supervisor")
    return program


def _call(systemctl: str, *arguments: str) -> None:
    try:
        done = subprocess.run([systemctl, "--user", *arguments], capture_output=True, text=True, timeout=ASK_S)
    except subprocess.TimeoutExpired as error:
        raise MeshError("deadline", f"systemctl {arguments[0]} does not answer") from error
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        hint = "is a user session of systemd running? `--dry-run` shows the unit without it"
        raise MeshError("missing_tool", f"systemctl {arguments[0]}: {show.line(said[0])}", hint=hint)
