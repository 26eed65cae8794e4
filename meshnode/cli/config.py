"""meshnode config show, meshnode config path"""

from __future__ import annotations

import click

from . import settings, show
from .options import common


@click.group("config", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Show what is set, and where: on the command line, in the environment, in config.toml, or nowhere.

    config.toml lies in the XDG configuration folder, or where MESHNODE_CONFIG says. It has a section for each command,
    in it an option by its name: `threads = 4` below `[serve]`. The environment is over it, as MESHNODE_SERVE_THREADS,
    and the command line over both.
    """


@command.command("show")
@click.option("--all", "everything", is_flag=True, help="Also what nobody has set.")
@common
@click.pass_context
def show_settings(context: click.Context, everything: bool, home: str | None, as_json: bool) -> None:
    """List every option that has a value, the value, and where it comes from."""
    root = context.find_root()
    assert isinstance(root.command, click.Group)
    found = list(settings.explain(root.command, root))
    if not everything:
        found = [setting for setting in found if setting.source != "default"]
    if as_json:
        path = str(settings.path_of_file())
        show.as_json({"file": path, "settings": [vars(setting) for setting in found]})
        return
    rows = [(s.section, s.key, "-" if s.value is None else s.value, s.source) for s in found]
    show.table(("command", "option", "value", "from"), rows, nothing="Nothing is set. See: meshnode config show --all")


@command.command("path")
@common
def path(home: str | None, as_json: bool) -> None:
    """Tell where config.toml is looked for."""
    found = settings.path_of_file()
    if as_json:
        show.as_json({"file": str(found), "exists": found.exists()})
    else:
        click.echo(found)
