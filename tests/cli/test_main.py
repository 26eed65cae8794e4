import json
import subprocess
import sys

import pytest

from meshnode.cli import COMMANDS, GROUPS, endings, show
from meshnode.errors import CODES, MeshError

from .conftest import Meshnode

NESTED = [
    *(f"lab {name}" for name in ("up", "run", "status", "down")),
    *(f"key {name}" for name in ("show", "export", "import")),
    *(f"receipts {name}" for name in ("show", "export", "verify")),
    *(f"service {name}" for name in ("install", "uninstall")),
    *(f"config {name}" for name in ("show", "path")),
]


def test_no_argument_is_help(meshnode: Meshnode) -> None:
    ended = meshnode()
    assert ended.status == 0
    for name in COMMANDS:
        assert f"\n  {name} " in ended.out


def test_the_lab_alone_is_help(meshnode: Meshnode) -> None:
    ended = meshnode("lab")
    assert ended.status == 0
    assert "\n  up " in ended.out


@pytest.mark.parametrize("name", [*COMMANDS, *NESTED])
def test_help_of_each(meshnode: Meshnode, name: str) -> None:
    ended = meshnode(*name.split(), "--help")
    assert ended.status == 0
    if name not in GROUPS:
        assert "--json" in ended.out
        assert "--home" in ended.out
    first = ended.out.split("\n\n")[1].strip().splitlines()[0]
    assert first


@pytest.mark.parametrize(
    "arguments",
    [
        ("nothing",),
        ("run",),
        ("status", "--jsn"),
        ("run", "m", "p", "--max-tokens", "many"),
        ("serve", "--numerics", "exact"),
        ("lab", "sideways"),
    ],
)
def test_usage(meshnode: Meshnode, arguments: tuple[str, ...]) -> None:
    ended = meshnode(*arguments)
    assert ended.status == 2
    assert ended.err.startswith("error usage: ")
    assert "--help" in ended.err
    ended = meshnode(*arguments, "--json")
    assert ended.status == 2
    assert json.loads(ended.out)["error"]["code"] == "usage"
    assert ended.err == ""


@pytest.mark.parametrize("command", ["status", "peers", "models", "stop", "invite"])
def test_no_node(meshnode: Meshnode, command: str) -> None:
    ended = meshnode(command)
    assert ended.status == CODES["no_node"][0]
    assert ended.err.startswith("error no_node: no node runs on ")
    assert ended.out == ""
    ended = meshnode(command, "--json")
    assert json.loads(ended.out)["error"]["code"] == "no_node"


class TestEndings:
    def end(self, error: BaseException, capfd: pytest.CaptureFixture[str], *, debug: bool = False) -> tuple[int, str]:
        status = endings.end_with(error, as_json=False, debug=debug)
        return status, capfd.readouterr().err

    def test_in_groups(self, capfd: pytest.CaptureFixture[str]) -> None:
        error = BaseExceptionGroup("", [ExceptionGroup("", [MeshError("bad_gguf", "cut short", hint="fetch it")])])
        assert self.end(error, capfd) == (3, "error bad_gguf: cut short\n  fetch it\n")

    def test_ctrl_c(self, capfd: pytest.CaptureFixture[str]) -> None:
        status, said = self.end(BaseExceptionGroup("", [KeyboardInterrupt()]), capfd)
        assert status == 130
        assert said.startswith("error cancelled")

    def test_unforeseen(self, capfd: pytest.CaptureFixture[str]) -> None:
        status, said = self.end(ZeroDivisionError("by zero"), capfd)
        assert status == 70
        assert said.startswith("error internal: ZeroDivisionError: by zero\n")
        assert "Traceback" not in said
        assert "ZeroDivisionError" in self.end(ZeroDivisionError("by zero"), capfd, debug=True)[1]

    def test_every_code_has_its_status(self, capfd: pytest.CaptureFixture[str]) -> None:
        for code, (status, _, hint) in CODES.items():
            assert self.end(MeshError(code, "so"), capfd) == (status, f"error {code}: so\n  {hint}\n")


class TestShow:
    def test_strangers_words_cannot_command_a_terminal(self) -> None:
        assert show.visible("a\x1b[2Jb\n\tc\u202ed é 👨‍👩").startswith("a\\x1b[2Jb\n\tc\\u202ed é ")
        assert "\n" not in show.line("a\nb")
        assert show.line("\ud800") == "\\ud800"

    def test_in_a_pipe_rows_alone(self, capsys: pytest.CaptureFixture[str]) -> None:
        show.table(("a", "b"), [(1, "x\ty"), (2, "z")], nothing="none")
        assert capsys.readouterr().out == "1\tx\\ty\n2\tz\n"
        show.table(("a", "b"), [], nothing="none")
        assert capsys.readouterr().out == ""


def test_as_a_process() -> None:
    for command in ([sys.executable, "-m", "meshnode"], [sys.executable, "-m", "meshnode", "--help"]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0
        assert "Usage: meshnode" in done.stdout


def test_a_reader_that_leaves(tmp_path) -> None:  # type: ignore[no-untyped-def]
    command = f"{sys.executable} -m meshnode --help; echo $? >{tmp_path}/status"
    done = subprocess.run(["bash", "-c", f"({command}) | true"], capture_output=True, text=True, timeout=30)
    assert done.stderr == ""


@pytest.mark.parametrize("redirection", [">&-", "<&- >&-", ">/dev/full", ">/dev/full 2>/dev/full", ">&- 2>&-"])
@pytest.mark.parametrize("arguments", ["--help", "status --json --home /nowhere"])
def test_an_output_that_takes_nothing(redirection: str, arguments: str) -> None:
    command = f"{sys.executable} -m meshnode {arguments} {redirection}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30)
    assert "Traceback" not in done.stderr
    assert "fault of meshnode" not in done.stderr
    assert done.returncode == CODES["bad_output"][0]
    if "2>" not in redirection and arguments == "--help":
        assert done.stderr.startswith("error bad_output: ")
    if redirection == ">/dev/full" and arguments != "--help":
        assert done.stderr.startswith("error no_node: ")


def test_more_than_a_buffer_to_a_full_disk() -> None:
    program = (
        "import click, sys; from meshnode import cli\n"
        "@click.command()\ndef command(): click.echo('x' * 100000)\n"
        "sys.modules['meshnode.cli.status'] = sys.modules[__name__]; sys.exit(cli.main(['status']))"
    )
    done = subprocess.run(
        ["bash", "-c", '"$0" -c "$1" >/dev/full', sys.executable, program], capture_output=True, text=True, timeout=30
    )
    assert done.stderr.startswith("error bad_output: the output cannot be written: No space left on device\n")
    assert done.returncode == CODES["bad_output"][0]


def test_the_hint_names_the_command(meshnode: Meshnode) -> None:
    ended = meshnode("run", "model", "prompt", "--system", "so")
    assert ended.err == "error usage: --system needs --chat\n  see `meshnode run --help`\n"


def test_start_is_quick() -> None:
    """What costs a second to import is imported by what needs it."""
    program = (
        "import sys, meshnode.cli, meshnode.cli.status; print([m for m in ('libp2p', 'trio') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "[]\n"
