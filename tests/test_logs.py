import json
import logging
import sys

from meshnode import logs


def record(message: str, *arguments: object, fault: bool = False, **extra: str) -> logging.LogRecord:
    made = logging.LogRecord("meshnode.stage", logging.WARNING, __file__, 1, message, arguments, None)
    vars(made).update(extra)
    if fault:
        try:
            raise ExceptionGroup("several", [FileNotFoundError(2, "No such file", "/home/me/secret.gguf")])
        except ExceptionGroup as error:
            made.exc_info = (type(error), error, error.__traceback__)
    return made


def test_an_event_is_a_line_whatever_it_says() -> None:
    line = logs.formatter("text").format(record("%s joined", "evil\nname\x1b[2J", **logs.of(bytes(16))))
    assert "\n" not in line
    assert "\x1b" not in line
    assert line.endswith(r"meshnode.stage: evil\nname\x1b[2J joined request=00000000")


def test_json() -> None:
    said = json.loads(logs.formatter("json").format(record("a\nb", **logs.of(b"\xab" * 16))))
    assert said.pop("time").endswith("Z")
    assert said.pop("process")
    assert said == {"level": "warning", "logger": "meshnode.stage", "event": "a\nb", "request": "abababab"}


def test_a_fault_is_told_without_a_path() -> None:
    for kind in logs.FORMATS:
        line = logs.formatter(kind).format(record("dialling failed", fault=True))
        assert "FileNotFoundError: No such file" in line
        assert "/" not in line
        assert "secret" not in line


def test_a_fault_says_where_it_came_up() -> None:
    made = record("failed")
    try:
        raise ValueError("no")
    except ValueError:
        made.exc_info = sys.exc_info()
    assert " fault=ValueError: no at test_logs.py:" in logs.formatter("text").format(made)
