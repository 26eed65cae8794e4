import json
import os
import pty
import re
import subprocess
import sys
from io import StringIO

import pytest
import trio

from meshnode.config import Home
from meshnode.errors import MeshError
from tests.api.fake_node import FakeNode

from .conftest import Meshnode

END = b"\x04"
INTERRUPT = b"\x03"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO("one\n\ntwo\n"))


@pytest.mark.usefixtures("said")
def test_each_line_of_a_pipe_is_a_message_after_all_before(meshnode: Meshnode, node: FakeNode) -> None:
    ended = meshnode("chat", "smollm2", "--max-tokens", "2", "--system", "Be brief.")
    assert (ended.status, ended.out, ended.err) == (0, "The answer\nThe answer\n", "")
    begun = (("system", "Be brief."), ("user", "one"))
    assert [request.messages for request in node.requests] == [
        begun,
        (*begun, ("assistant", "The answer"), ("user", "two")),
    ]


@pytest.mark.usefixtures("said")
def test_json_is_a_line_an_answer(meshnode: Meshnode, node: FakeNode) -> None:
    ended = meshnode("chat", "smollm2", "--max-tokens", "2", "--json", "--temperature", "0.5", "--seed", "7")
    assert [json.loads(line)["text"] for line in ended.out.splitlines()] == ["The answer"] * 2
    assert {(request.temperature, request.seed) for request in node.requests} == {(0.5, 7)}


@pytest.mark.usefixtures("said")
def test_in_a_pipe_a_fault_ends_it(meshnode: Meshnode, node: FakeNode) -> None:
    node.on_open = MeshError("no_route", "nobody holds the middle")
    ended = meshnode("chat", "smollm2")
    assert ended.status == node.on_open.exit_status
    assert "error no_route: nobody holds the middle" in ended.err
    assert node.requests[1:] == []


def test_without_a_node(meshnode: Meshnode) -> None:
    assert meshnode("chat", "smollm2").err.startswith("error no_node: ")


class Terminal:
    """`meshnode chat` on a terminal of its own."""

    def __init__(self, home: Home, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "meshnode", "chat", "smollm2", *arguments, "--home", str(home.path)]
        environment = {**os.environ, "TERM": "dumb", "NO_COLOR": "1"}
        # a session of its own, whose controlling terminal is the pty: it turns a key into SIGINT
        self.process = subprocess.Popen(
            ["setsid", "--ctty", "--wait", *command], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
        )
        os.close(theirs)

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def until(self, pattern: str) -> str:
        """What is shown up to and with `pattern`, a regular expression."""
        shown = ""
        while not re.search(pattern, shown):
            shown += os.read(self._ours, 4096).decode(errors="replace")
        return shown

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


def test_an_interrupt_stops_the_answer_and_not_the_chat(home: Home, node: FakeNode) -> None:
    node.pace_s = 0.02
    terminal = Terminal(home, "--max-tokens", "1000")
    try:
        terminal.until(r"> ")
        terminal.type(b"on and on\n")
        terminal.until(r"The answer is 42\.The")
        terminal.type(INTERRUPT)
        terminal.until(r"stopped\s+> ")
        _until_none_runs(node)
        assert len(node.requests) == 1
        terminal.type(INTERRUPT)
        terminal.until(r"Ctrl-D ends the chat\s+> ")
        node.fault, node.fail_at = MeshError("hop_failed", "the middle is gone"), 2
        terminal.type(b"more\n")
        terminal.until(r"error hop_failed: the middle is gone")
        node.fail_at = None
        terminal.type(b"/new\n")
        terminal.until(r"a new chat\s+> ")
        node.pace_s = 0
        terminal.type(b"again\n")
        shown = terminal.until(r"tokens/s\s+> ")
        assert "route     " in shown
        terminal.type(END)
        assert terminal.process.wait(10) == 0
    finally:
        terminal.close()
    _, more, again = (request.messages for request in node.requests)
    assert more[0] == ("user", "on and on")
    assert more[1][1].startswith("The answer is 42.The")  # what had come
    assert more[2] == ("user", "more")
    assert again == (("user", "again"),)


def _until_none_runs(node: FakeNode) -> None:
    async def wait() -> None:
        with trio.fail_after(5):
            while node.runs:
                await trio.sleep(0.01)

    trio.run(wait)
