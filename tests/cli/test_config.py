import json
from pathlib import Path

import pytest

from tests.api.fake_node import FakeNode

from .conftest import Meshnode


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"  # where conftest's MESHNODE_CONFIG points to


def settings(meshnode: Meshnode, *arguments: str) -> dict[tuple[str, str], tuple[object, str]]:
    ended = meshnode("config", "show", "--json", *arguments)
    assert ended.status == 0, ended.out
    return {(s["section"], s["key"]): (s["value"], s["source"]) for s in json.loads(ended.out)["settings"]}


def test_each_value_says_where_it_comes_from(meshnode: Meshnode, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text('[serve]\nthreads = 4\nlisten = ["4001"]\nlan = false\n[lab.up]\nnodes = 2\n')
    monkeypatch.setenv("MESHNODE_SERVE_THREADS", "7")
    found = settings(meshnode)
    assert found["serve", "threads"] == ("7", "MESHNODE_SERVE_THREADS")
    assert found["serve", "listen"] == (["4001"], str(file))
    assert found["serve", "lan"] == (False, str(file))
    assert found["lab.up", "nodes"] == (2, str(file))
    assert found["status", "home"][1] == "MESHNODE_HOME"
    assert ("run", "max-tokens") not in found
    assert settings(meshnode, "--all")["run", "max-tokens"] == (None, "default")
    assert f"serve\tlan\tFalse\t{file}\n" in meshnode("config", "show").out


def test_the_command_line_is_over_the_environment_and_that_over_the_file(
    meshnode: Meshnode, node: FakeNode, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*arguments: str) -> int | None:
        assert meshnode("run", "smollm2", "hi", *arguments).status == 0
        return node.requests[-1].max_tokens

    file.write_text("[run]\nmax-tokens = 11\n")
    assert asked() == 11
    monkeypatch.setenv("MESHNODE_RUN_MAX_TOKENS", "12")
    assert asked() == 12
    assert asked("--max-tokens", "13") == 13


def test_the_older_variables_are_over_the_file(meshnode: Meshnode, node: FakeNode, file: Path) -> None:
    file.write_text('[status]\nhome = "/nowhere"\n')  # MESHNODE_HOME is set for every test
    assert meshnode("status").status == 0


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[serve]\nthread = 4\n", "[serve] has no 'thread'", "did you mean threads?"),
        ("[server]\n", "no command is called 'server'", "did you mean serve?"),
        ("[lab.op]\n", "[lab] has no 'op'", ""),
        ("serve = 3\n", "serve is a section", ""),
        ("[serve]\nthreads = 'many'\n", "serve.threads: 'many' is not a valid integer", ""),
        ("[serve]\nlisten = '4001'\n", "serve.listen takes a list", ""),
        ("[serve]\nlan = 'no'\n", "serve.lan takes true or false", ""),
        ("[serve]\nthreads = [1]\n", "serve.threads takes one value", ""),
        ("[serve]\njson = true\n", "[serve] has no 'json'", ""),
        ("[serve\n", "is no TOML", ""),
    ],
)
def test_what_cannot_be_meant_is_refused(meshnode: Meshnode, file: Path, text: str, message: str, hint: str) -> None:
    file.write_text(text)
    ended = meshnode("config", "show", "--json")
    assert ended.status == 6
    error = json.loads(ended.out)["error"]
    assert error["code"] == "bad_config"
    assert message in error["message"]
    assert str(file) in error["message"]
    assert hint in error["hint"]
    command = "lab" if "lab" in text else "serve"
    assert meshnode(command, *(["up"] if command == "lab" else []), "--home", "/dev/null/x").err.count("bad_config")


def test_path(meshnode: Meshnode, file: Path) -> None:
    assert meshnode("config", "path").out == f"{file}\n"
    assert json.loads(meshnode("config", "path", "--json").out) == {"file": str(file), "exists": False}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell(meshnode: Meshnode, shell: str) -> None:
    ended = meshnode("completion", shell)
    assert ended.status == 0
    assert "_MESHNODE_COMPLETE" in ended.out


def test_completions(meshnode: Meshnode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_MESHNODE_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "meshnode ser")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert meshnode().out.splitlines() == ["plain,serve", "plain,service"]
    monkeypatch.setenv("COMP_WORDS", "meshnode serve --thr")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert meshnode().out.splitlines() == ["plain,--threads"]
