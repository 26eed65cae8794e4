"""Renders chat templates in a process of its own: a template is a program that came with a model from anywhere.

`template.py` starts this file with `python -I`, talks to it in lines of JSON, and kills it. It imports nothing of ours.

What comes out is a list of segments (own, text): own is what the template itself wrote, where a control token's text is
one; the rest came with the messages, and never becomes one. Joined they are what the template makes of the messages.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import resource
import secrets
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TextIO

import jinja2
import jinja2.ext
import jinja2.sandbox

MEMORY = 512 << 20  # bytes of address space; 100 MiB are in use before anything is rendered

Messages = Sequence[tuple[str, str]]  # role, content
Segment = tuple[bool, str]


class TemplateError(Exception):
    """The template fails, or does what cannot be followed; the text is for people."""


class Template:
    """A model's chat template, compiled. bos, eos, controls: texts of control tokens; most: bytes that it may give."""

    def __init__(self, source: str, bos: str, eos: str, controls: Sequence[str], most: int) -> None:
        self._most = most
        self._now = datetime.datetime.now()
        # as models' templates are written for
        env = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        env.filters["tojson"] = _to_json
        env.globals |= {"raise_exception": _raise, "strftime_now": self._strftime}
        self._template = env.from_string(source)
        self._variables = {
            "bos_token": bos, "eos_token": eos, "add_generation_prompt": True, "tools": None, "documents": None,
        }  # fmt: skip
        texts = sorted(filter(None, controls), key=len, reverse=True)
        self._controls = re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    def segments(self, messages: Messages) -> list[Segment]:
        """The rendered chat, up to where the answer begins. Raises TemplateError.

        A rendering with stand-ins for the contents shows what is the template's own. A template that does not pass
        contents on as they are (it looks into them, or takes parts) is rendered with only the texts of control tokens
        replaced; its own control tokens must then be those that it wrote around the stand-ins.
        """
        self._now = datetime.datetime.now()  # one for all renderings
        contents = [content for _, content in messages]
        marks = [f"content{secrets.token_hex(8)}" for _ in messages]
        plain = self._render(messages)
        marked = self._render([(role, mark) for (role, _), mark in zip(messages, marks, strict=True)])
        aligned = _align(plain, marked, dict(zip(marks, contents, strict=True)))
        return _merge(self._guarded(messages, plain, marked) if aligned is None else aligned)

    def _strftime(self, form: str) -> str:
        return self._now.strftime(form)

    def _guarded(self, messages: Messages, plain: str, marked: str) -> list[Segment]:
        texts: dict[str, str] = {}

        def guard(match: re.Match[str]) -> str:
            name = f"control{secrets.token_hex(8)}"
            texts[name] = match[0]
            return name

        guarded = self._render([(role, self._controls.sub(guard, content)) for role, content in messages])
        segments: list[Segment] = []
        for part in _split(guarded, texts):
            segments.append((False, texts[part]) if part in texts else (True, part))
        same = "".join(text for _, text in segments) == plain
        own = [control for is_own, text in segments if is_own for control in self._controls.findall(text)]
        if not same or own != self._controls.findall(marked):
            raise TemplateError("it changes messages so that their text cannot be told from its own")
        return segments

    def _render(self, messages: Messages) -> str:
        parts, size = [], 0
        turns = [{"role": role, "content": content} for role, content in messages]
        try:
            for part in self._template.generate(messages=turns, **self._variables):
                size += len(part.encode())
                if size > self._most:
                    raise TemplateError(f"it gives more than {self._most} bytes")
                parts.append(part)
        except TemplateError:
            raise
        except MemoryError:
            raise TemplateError("it takes too much memory") from None
        except Exception as error:  # a template can raise whatever Python can
            raise TemplateError(f"{type(error).__name__}: {error}"[:300]) from None
        return "".join(parts)


def _align(plain: str, marked: str, contents: dict[str, str]) -> list[Segment] | None:
    """marked with contents, trimmed where the template trims them, in place of their marks, if that gives plain."""
    parts = [*_split(marked, contents), ""]
    segments: list[Segment] = []
    at = 0
    for part, following in pairwise(parts):
        if part not in contents:
            choices, own = [part], True
        else:
            content, own = contents[part], False
            choices = [content, content.lstrip(), content.rstrip(), content.strip()]
        after = "" if following in contents else following
        fitting = [c for c in choices if plain.startswith(c + after, at)]
        if not fitting:
            return None
        chosen = max(fitting, key=len)
        segments.append((own, chosen))
        at += len(chosen)
    return segments if at == len(plain) else None


def _split(text: str, marks: dict[str, str]) -> list[str]:
    """Cut before and after each mark."""
    return re.split(f"({'|'.join(marks)})", text) if marks else [text]


def _merge(segments: Sequence[Segment]) -> list[Segment]:
    merged: list[Segment] = []
    for own, text in segments:
        if merged and merged[-1][0] == own:
            merged[-1] = (own, merged[-1][1] + text)
        elif text:
            merged.append((own, text))
    return merged


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: object) -> None:
    raise TemplateError(f"it says: {message}"[:300])


def warm_up() -> None:
    """Loads what is loaded late, which cannot be read any more once locked down: above all what a fault takes."""
    source = "{{ messages | tojson }}{{ strftime_now('%d %b %Y') }}{{ raise_exception('') }}"
    with contextlib.suppress(TemplateError):
        Template(source, "", "", (), 1000).segments([("user", "")])
    with contextlib.suppress(jinja2.TemplateSyntaxError):
        Template("{% for %}", "", "", (), 0)


def lock_down() -> None:
    """No new files, sockets or processes; little memory. What is needed has to be imported before."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


def serve(requests: TextIO, replies: TextIO, seconds: int) -> None:
    """First the template, then messages, a line each; a line comes back for each. seconds: of computing for one."""
    template: Template | None = None

    def answer(request: dict[str, Any]) -> Any:
        nonlocal template
        if template is None:
            template = Template(**request)
            return []
        return template.segments(request["messages"])

    for line in requests:
        # should the node be gone it cannot kill this process
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + seconds + 1, resource.RLIM_INFINITY))
        try:
            reply: dict[str, Any] = {"segments": answer(json.loads(line))}
        except TemplateError as error:
            reply = {"error": str(error)}
        except jinja2.TemplateSyntaxError as error:
            reply = {"error": f"line {error.lineno}: {error.message}"[:300]}
        except (MemoryError, RecursionError) as error:
            reply = {"error": type(error).__name__}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    warm_up()
    lock_down()
    serve(sys.stdin, sys.stdout, int(sys.argv[1]))
