"""meshnode chat MODEL"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
from typing import Any

import click

from ..api.connect import Control
from ..api.requests import RunRequest
from ..errors import MeshError
from . import endings, show
from .answer import Answer
from .identify import identity_of
from .options import common, home_of
from .run import drawn_as, sampling

HELP = "/new forgets what was said, /quit ends; Ctrl-C stops an answer, Ctrl-D ends"


@click.command("chat")
@click.argument("model")
@click.option("--system", metavar="TEXT", help="What the model is told before all else.")
@sampling
@common
def command(model: str, system: str | None, home: str | None, as_json: bool, **drawn: Any) -> None:
    """Talk with MODEL through the node that runs here: each line is a message, and the model sees all that was said.

    Ctrl-C stops an answer, and what came of it stays said; /new starts afresh; Ctrl-D ends. From a pipe each line of
    stdin is a message; with --json each answer is a line of JSON.
    """
    where = home_of(home)
    chat = Chat(identity_of(model, where), system, drawn_as(**drawn))
    with Control(where) as node:
        if not sys.stdin.isatty():
            for message in sys.stdin:
                if message.strip():
                    chat.say(node, message.rstrip("\n"), as_json=as_json)
            return
        node.status()  # that nobody answers is said before the first message is thought of
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # which gives the prompt its editing and its history
        show.note(HELP)
        while (message := _asked()) is not None:
            if message.strip() == "/quit":
                return
            _answer(node, chat, message, as_json=as_json)


class Chat:
    """What was said so far."""

    def __init__(self, model: str, system: str | None, drawn: dict[str, Any]) -> None:
        self._start = (("system", system),) if system is not None else ()
        self._first = RunRequest(model, messages=(*self._start, ("user", "-")), **drawn)
        self.turns: tuple[tuple[str, str], ...] = self._start

    def forget(self) -> None:
        self.turns = self._start

    def say(self, node: Control, message: str, *, as_json: bool, footer: bool = False) -> None:
        """Shows the answer as it comes. What came of an interrupted one stays said."""
        asked = (*self.turns, ("user", message))
        answer = Answer(as_json=as_json, footer=footer)
        said = ""
        try:
            with contextlib.closing(node.run(dataclasses.replace(self._first, messages=asked))) as events:
                for event in events:
                    answer.take(event)
                    if event["event"] == "token":
                        said += event["text"]
        finally:
            if said:
                self.turns = (*asked, ("assistant", said))
            answer.finish()


def _asked() -> str | None:
    """The next message; None when there will be none."""
    while True:
        try:
            return input("> ")
        except EOFError:
            click.echo()
            return None
        except KeyboardInterrupt:
            click.echo()
            show.note("Ctrl-D ends the chat")


def _answer(node: Control, chat: Chat, message: str, *, as_json: bool) -> None:
    """Whatever becomes of one answer, the chat goes on."""
    match message.strip():
        case "":
            return
        case "/new":
            chat.forget()
            show.note("a new chat")
            return
        case "/help":
            show.note(HELP)
            return
    try:
        chat.say(node, message, as_json=as_json, footer=True)
    except KeyboardInterrupt:
        show.note("stopped")
    except MeshError as error:
        endings.say_error(error)
