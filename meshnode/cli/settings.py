"""config.toml: values for the options of commands, under what the environment and the command line say.

    [serve]                         a section a command, `[lab.up]` for one of a group
    threads = 4                     an option by its name; one that can be repeated takes a list
    listen = ["4001"]

What is found has its place told: command line, environment, file, default. A section or key that nobody knows is
refused with the nearest that exists, for a misspelt one must not be ignored.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import platformdirs

from ..errors import MeshError

PREFIX = "MESHNODE"  # of MESHNODE_SERVE_THREADS and the like
OLDER = {"home": "MESHNODE_HOME", "join": "MESHNODE_INVITE"}  # variables that options had before they had a section
OLDER_OF_LAB = {"home": "MESHNODE_LAB"}
NOT_HERE = ("as_json", "help")  # what a call decides
MAX_FILE = 1 << 20


@dataclass(frozen=True)
class Setting:
    """source: default | the file's path | the variable's name."""

    section: str
    key: str
    value: Any
    source: str


def path_of_file(environ: Mapping[str, str] = os.environ) -> Path:
    """MESHNODE_CONFIG, else config.toml in the XDG configuration folder."""
    named = environ.get("MESHNODE_CONFIG")
    return Path(named).expanduser() if named else platformdirs.user_config_path("meshnode") / "config.toml"


def read(path: Path) -> dict[str, Any]:
    """Empty when there is no file. MeshError bad_config."""
    try:
        with path.open("rb") as file:
            return tomllib.loads(file.read(MAX_FILE).decode())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise MeshError("bad_config", f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MeshError("bad_config", f"{path} is no TOML: {error}") from error


def defaults(group: click.Group, context: click.Context, name: str, environ: Mapping[str, str] = os.environ) -> Any:
    """The default_map of the group's context when its command `name` is called. MeshError bad_config."""
    path = path_of_file(environ)
    found = read(path)
    _known(path, "", found, group.list_commands(context))
    command = group.get_command(context, name)
    if name not in found or command is None:
        return None
    return {name: _section(path, name, command, context, found[name], environ)}


def _section(
    path: Path, name: str, command: click.Command, context: click.Context, said: Any, environ: Mapping[str, str]
) -> dict[str, Any]:
    if not isinstance(said, dict):
        raise MeshError("bad_config", f"{path}: {name} is a section: [{name}]")
    keys = options_of(command)
    below = command.list_commands(context) if isinstance(command, click.Group) else []
    _known(path, name, said, [*keys, *below])
    found: dict[str, Any] = {}
    for key, value in said.items():
        if key in below and isinstance(command, click.Group):
            inner = command.get_command(context, key)
            assert inner is not None
            found[key] = _section(path, f"{name}.{key}", inner, context, value, environ)
        elif (option := keys[key]).name and _older(name, option) not in environ:
            found[option.name] = _value(path, f"{name}.{key}", option, context, value)
    return found


def _value(path: Path, name: str, option: click.Option, context: click.Context, value: Any) -> Any:
    """As TOML has it, if the option takes it."""
    if option.multiple != isinstance(value, list) or isinstance(value, dict) or option.is_flag != (type(value) is bool):
        wanted = "a list" if option.multiple else "true or false" if option.is_flag else "one value"
        raise MeshError("bad_config", f"{path}: {name} takes {wanted}, not {value!r:.60}")
    try:
        option.type_cast_value(context, value)
    except click.UsageError as error:
        raise MeshError("bad_config", f"{path}: {name}: {error.message}") from error
    return value


def _known(path: Path, section: str, said: Mapping[str, Any], names: list[str]) -> None:
    for key in said:
        if key not in names:
            near = difflib.get_close_matches(key, names, 1, 0.5)
            hint = f"did you mean {near[0]}?" if near else f"it may have: {', '.join(sorted(names))}"
            what = f"[{section}] has no {key[:60]!r}" if section else f"no command is called {key[:60]!r}"
            raise MeshError("bad_config", f"{path}: {what}", hint=hint)


def options_of(command: click.Command) -> dict[str, click.Option]:
    """The options that a file may set, by their names there: `max-tokens`."""
    found = (option for option in command.params if isinstance(option, click.Option))
    return {
        max(option.opts, key=len).lstrip("-"): option
        for option in found
        if not option.hidden and option.name not in NOT_HERE
    }


def _older(section: str, option: click.Option) -> str:
    """Empty when there is none."""
    return (OLDER_OF_LAB if section.split(".")[0] == "lab" else OLDER).get(option.name or "", "")


def explain(group: click.Group, context: click.Context, environ: Mapping[str, str] = os.environ) -> Iterator[Setting]:
    """Every option of every command, its value and where that comes from. MeshError bad_config."""
    path = path_of_file(environ)
    found = read(path)
    _known(path, "", found, group.list_commands(context))
    yield from _explained(path, "", group, context, found, environ)


def _explained(
    path: Path, above: str, group: click.Group, context: click.Context, found: Any, environ: Mapping[str, str]
) -> Iterator[Setting]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        section = f"{above}.{name}" if above else name
        said = found.get(name, {})
        values = _section(path, section, command, context, said, environ)
        for key, option in options_of(command).items():
            own = f"{PREFIX}_{section}_{option.name}".replace(".", "_").upper()
            variable = next((v for v in (own, _older(section, option)) if v and v in environ), None)
            if variable is not None:
                yield Setting(section, key, environ[variable], variable)
            elif option.name in values:
                yield Setting(section, key, values[option.name], str(path))
            else:
                default = option.get_default(context)
                yield Setting(
                    section, key, default if isinstance(default, str | int | float | bool) else None, "default"
                )
        if isinstance(command, click.Group):
            yield from _explained(path, section, command, context, said, environ)
