"""Applies unified diffs exactly: every context line has to match at the place the hunk names, nothing is guessed."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class PatchError(ValueError):
    """The patch is malformed, or does not fit the tree."""


def apply(text: str, root: Path) -> list[Path]:
    """Applies a patch as `git format-patch` writes it (paths with a/ and b/) to the files below root.

    Files are changed or made, none is removed. Returns them. Raises PatchError, before anything is written.
    """
    changed: dict[Path, list[str]] = {}
    lines = text.splitlines(keepends=True)
    at = 0
    while at < len(lines):
        is_new = lines[at] == "--- /dev/null\n"
        if not (is_new or lines[at].startswith("--- a/")) or not lines[at + 1].startswith("+++ b/"):
            at += 1
            continue
        path = _inside(root, lines[at + 1][6:].strip())
        if is_new and path.exists():
            raise PatchError(f"the patch makes a file that is there: {path.name}")
        at, changed[path] = _file(lines, at + 2, [] if is_new else changed.get(path) or _read(path), path)
    if not changed:
        raise PatchError("the patch changes nothing")
    for path, content in changed.items():
        path.write_text("".join(content), encoding="utf-8")
    return list(changed)


def _inside(root: Path, name: str) -> Path:
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise PatchError(f"the patch leaves its tree: {name}")
    return root / name


def _read(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError as error:
        raise PatchError(f"the patch changes a file that is not there: {path.name}") from error


def _file(lines: list[str], at: int, old: list[str], path: Path) -> tuple[int, list[str]]:
    """Applies the hunks from lines[at] on to old; returns where they end, and the new lines."""
    new: list[str] = []
    done = 0  # lines of old that are in new, or were removed
    while at < len(lines) and (hunk := _HUNK.match(lines[at])):
        removed, added = int(hunk[2] or 1), int(hunk[4] or 1)
        start = int(hunk[1]) - 1 if removed else int(hunk[1])  # without a line of the old file: after which one
        if not done <= start <= len(old):
            raise PatchError(f"hunks out of order in {path.name}")
        new += old[done:start]
        done = start
        at += 1
        while removed or added:
            mark, content = (lines[at][:1], lines[at][1:]) if at < len(lines) else ("", "")
            if mark in (" ", "-"):
                if done >= len(old) or old[done] != content:
                    raise PatchError(f"{path.name}: line {done + 1} is not what the patch expects")
                done, removed = done + 1, removed - 1
            if mark in (" ", "+"):
                new.append(content)
                added -= 1
            if mark not in (" ", "-", "+") or removed < 0 or added < 0:
                raise PatchError(f"a malformed hunk for {path.name}")
            at += 1
    return at, new + old[done:]
