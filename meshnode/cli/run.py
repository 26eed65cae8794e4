"""meshnode run MODEL "prompt" """

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..api.connect import Control
from ..api.requests import (
    MAX_GRAMMAR,
    MAX_PENALTY,
    MAX_SEED,
    MAX_TEMPERATURE,
    MAX_TOKENS,
    MAX_TOP_K,
    MAX_WINDOW,
    RunRequest,
)
from ..config import LISTEN, Home, NodeConfig
from ..errors import MeshError
from ..wire.messages import MAX_TEXT
from . import show
from .answer import Answer
from .identify import identity_of
from .joining import Joining, joining
from .options import common, home_of, is_path

if TYPE_CHECKING:
    from ..node import Node

F = TypeVar("F", bound=Callable[..., Any])
NOT_YET = "identified later"  # stands for a path, which is no name of a model
FIND_S = 4.0  # an ephemeral node's patience with a mesh that it has only just met

TEMPERATURE, SEED = click.FloatRange(0, MAX_TEMPERATURE), click.IntRange(0, MAX_SEED)
PENALTY = click.FloatRange(-MAX_PENALTY, MAX_PENALTY)


def asking(function: F) -> F:
    """The options of a prompt, which `run` and `lab run` share."""
    function = sampling(function)
    function = click.option("--system", metavar="TEXT", help="The system message of a chat.")(function)
    return click.option("--chat", is_flag=True, help="Apply the model's chat template to the prompt.")(function)


def sampling(function: F) -> F:
    """The options of an answer: how long it may be, and how its tokens are drawn."""
    for option in reversed(
        (
            click.option(
                "--max-tokens",
                type=click.IntRange(1, MAX_TOKENS),
                help="256, or what the context has room for, if not given.",
            ),
            click.option(
                "--temperature", type=TEMPERATURE, default=0.0, show_default=True, help="0: always the likeliest."
            ),
            click.option(
                "--top-k", type=click.IntRange(0, MAX_TOP_K), default=0, help="Draw from the K likeliest; 0: from all."
            ),
            click.option("--top-p", type=click.FloatRange(0, 1), default=1.0, show_default=True),
            click.option("--min-p", type=click.FloatRange(0, 1), default=0.0, show_default=True),
            click.option("--typical-p", type=click.FloatRange(0, 1), default=1.0, show_default=True),
            click.option("--repeat-penalty", type=click.FloatRange(0.01, MAX_PENALTY), default=1.0, show_default=True),
            click.option("--presence-penalty", type=PENALTY, default=0.0, show_default=True),
            click.option("--frequency-penalty", type=PENALTY, default=0.0, show_default=True),
            click.option(
                "--repeat-last-n",
                type=click.IntRange(0, MAX_WINDOW),
                default=64,
                show_default=True,
                help="Tokens that penalties look back on.",
            ),
            click.option("--logit-bias", metavar="ID=X", multiple=True, help="Add X to the logit of a token."),
            click.option(
                "--grammar",
                metavar="FILE",
                type=click.Path(dir_okay=False),
                help="GBNF that the answer follows.",
            ),
            click.option("--seed", type=SEED, help="Makes a drawn answer the same again; a random one if not given."),
        )
    ):
        function = option(function)
    return function


def request_of(model: str, prompt: str, *, chat: bool, system: str | None, **drawn: Any) -> RunRequest:
    """drawn: the options of `sampling`."""
    if system is not None and not chat:
        raise MeshError("usage", "--system needs --chat")
    if not chat:
        return RunRequest(model, prompt=prompt, **drawn_as(**drawn))
    turns = ([("system", system)] if system is not None else []) + [("user", prompt)]
    return RunRequest(model, messages=tuple(turns), **drawn_as(**drawn))


def drawn_as(
    *, seed: int | None, temperature: float, logit_bias: tuple[str, ...], grammar: str | None, **plain: Any
) -> dict[str, Any]:
    """The options of `sampling` as a RunRequest takes them."""
    return plain | {
        "temperature": temperature,
        "seed": secrets.randbits(32) if seed is None and temperature > 0 else seed or 0,
        "logit_bias": tuple(map(_bias, logit_bias)),
        "grammar": "" if grammar is None else _grammar(Path(grammar)),
    }


def _bias(given: str) -> tuple[int, float]:
    token, equals, bias = given.partition("=")
    try:
        if equals:
            return int(token), float(bias)
    except ValueError:
        pass
    raise MeshError("usage", f"--logit-bias is ID=X, not {given[:40]!r}")


def _grammar(path: Path) -> str:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_GRAMMAR + 1).decode()
    except OSError as error:
        message = f"the grammar {show.line(str(path))} cannot be read: {error.strerror}"
        raise MeshError("usage", message, hint="give a file that holds GBNF") from error
    except UnicodeDecodeError as error:
        raise MeshError("bad_grammar", f"the grammar {show.line(str(path))} is no text in UTF-8") from error
    if not text.strip():
        raise MeshError("bad_grammar", "the grammar is empty")
    return text


def prompt_of(argument: str | None) -> str:
    """The prompt given, or with `-` or a pipe what stdin holds."""
    if argument is not None and argument != "-":
        return argument
    if argument is None and sys.stdin.isatty():
        raise MeshError("bad_prompt", "there is no prompt", hint='meshnode run MODEL "prompt", or pipe it in')
    said = sys.stdin.buffer.read(MAX_TEXT + 2)  # one more than can be asked, and a line's end
    return said.decode(errors="surrogateescape").removesuffix("\n")


@click.command("run")
@click.argument("model")
@click.argument("prompt", required=False)
@asking
@click.option("--join", metavar="FILE|MULTIADDR", help="Without a node here: join for this one question.")
@common
def command(model: str, prompt: str | None, join: str | None, home: str | None, as_json: bool, **ask: Any) -> None:
    """Ask MODEL to go on from PROMPT; the answer comes as it is made. Ctrl-C cancels it.

    MODEL is a name, an identity, an unambiguous beginning of one, or the path of a GGUF file. PROMPT is raw text, or
    with --chat what a user says; without it, or with -, it is read from stdin.
    """
    where = home_of(home)
    request = request_of(NOT_YET if is_path(model) else model, prompt_of(prompt), **ask)
    joined = joining(join, where) if join is not None or where.holder() is None else None
    if joined is not None and join is None and not joined.addresses:
        raise MeshError("no_node", f"no node runs on {where.path}")
    request = RunRequest.from_json(request.to_json() | {"model": identity_of(model, where)})
    answer = Answer(as_json=as_json)
    if joined is None or _is_in(where, joined):
        with Control(where) as node:
            answer.take_all(node.run(request))
        return
    import trio

    trio.run(_ephemeral, joined, request, answer)


def _is_in(home: Home, joined: Joining) -> bool:
    """Whether the node that runs here is in that mesh already."""
    if home.holder() is None:
        return False
    with Control(home) as node:
        return bool(node.status()["mesh_id"] == joined.mesh.mesh_id)


async def _ephemeral(joined: Joining, request: RunRequest, answer: Answer) -> None:
    """Asks through a node that lives for this question alone, with a key that is thrown away."""
    import trio

    from ..node import open_node

    async with open_node(
        None, NodeConfig(listen=LISTEN), mesh=joined.mesh, bootstrap=joined.addresses, models=(), ephemeral=True
    ) as node:
        ends = trio.current_time() + FIND_S
        try:
            while True:
                last, alone = trio.current_time() > ends, node.status()["alone"]
                if last and alone:
                    raise _nobody(joined)
                if not alone and await _asked(node, request, answer, last=last):
                    break
                await trio.sleep(0.2)
        finally:
            answer.finish()


def _nobody(joined: Joining) -> MeshError:
    where = ", ".join(joined.addresses)
    hint = "does a member run there, and can it be reached from here? A private mesh is joined by an invite"
    return MeshError("unreachable", f"no member of {joined.mesh.mesh_id} lets us in at {where}", hint=hint)


async def _asked(node: Node, request: RunRequest, answer: Answer, *, last: bool) -> bool:
    """Whether it was answered. False, unless it is the last try, while offers have not reached the newcomer yet."""
    done = False
    try:
        async with node.run(request) as events:
            async for event in events:
                answer.take(event)
        done = True
    except* MeshError as group:
        if last or not group.subgroup(_not_found_yet):
            raise
    return done


def _not_found_yet(error: BaseException) -> bool:
    return isinstance(error, MeshError) and error.code in ("unknown_model", "no_route")
