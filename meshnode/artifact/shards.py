"""Models in several files: which files belong together, and one header for all of them.

set_files(path, count) -> [paths], warnings    the files of a set, entered at any of them
merge(headers, count) -> Header                one header of the whole set, or bad_shards
shard_name(path)                               (prefix, number, count) of "PREFIX-00002-of-00003.gguf"
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import MeshError
from .cursor import quote
from .files import show
from .header import Header, Tensor
from .keys import Keys

MAX_SHARDS = 512  # files kept open at once, of the 1,024 a process may have; the largest models come in fewer than 200
MAX_LINKS = 40  # the kernel's own bound on a chain of symbolic links

SPLIT_NO, SPLIT_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
UNSAID = -1  # what a shard after the first may leave out

_NAME = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ShardName:
    """prefix: the path up to "-00002-of-00003.gguf"; number counts from 1."""

    prefix: str
    number: int
    count: int

    def path(self, number: int) -> str:
        return f"{self.prefix}-{number:05d}-of-{self.count:05d}.gguf"


def shard_name(path: str) -> ShardName | None:
    """The shard that a path names; where it is a link of another name, what it points at is asked."""
    for _ in range(MAX_LINKS):
        if match := _NAME.fullmatch(path):
            return ShardName(match[1], int(match[2]), int(match[3]))
        try:
            path = os.path.join(os.path.dirname(path), os.readlink(path))
        except OSError:
            return None
    return None


def split_count(header: Header) -> int:
    """How many files the model of this header is in: 1 where it says nothing."""
    return Keys(header).whole(SPLIT_COUNT, 0, (1 << 16) - 1, 1, kind="u16") or 1


def set_files(path: str, count: int) -> tuple[list[str], tuple[str, ...]]:
    """The paths of all `count` shards of the set that `path` is one of, in order, and warnings about strays.

    Errors: bad_shards (its name is not that of a shard, or of a set of another size). Whether they are there shows
    when they are opened.
    """
    name = shard_name(path)
    if name is None or not 1 <= name.number <= name.count:
        raise MeshError(
            "bad_shards",
            f"{show(path)} is one shard of {count}, but its name does not say where the others are",
            hint=f"name the shards MODEL-00001-of-{count:05d}.gguf and so on, in one folder",
        )
    if count > MAX_SHARDS:
        raise MeshError("bad_shards", f"{show(path)} is one of {count} shards, more than the {MAX_SHARDS} supported")
    if name.count != count:
        raise MeshError("bad_shards", f"{show(path)} says it is one of {count} shards, its name says of {name.count}")
    return [name.path(number) for number in range(1, count + 1)], _strays(name)


def _strays(name: ShardName) -> tuple[str, ...]:
    folder, prefix = os.path.split(name.prefix)
    try:
        listing = sorted(os.listdir(folder or "."))
    except OSError:
        return ()  # a folder that may be entered but not read
    found = [match for file in listing if (match := _NAME.fullmatch(file)) and match[1] == prefix]
    return tuple(
        f"{show(match[0])} lies beside the set of {name.count} shards and is ignored"
        for match in found
        if int(match[3]) == name.count and not 1 <= int(match[2]) <= name.count
    )


def merge(headers: Iterable[Header], count: int) -> Header:
    """One header of a set: the first's metadata, every shard's tensors. Offsets stay those within each file.

    Each header is judged, and let go but for its tensors, before the next is taken: of a set that is none little is
    read and kept. Errors: bad_shards, naming the shard by its number (from 1) and its fault.
    """
    tensors: dict[str, Tensor] = {}
    totals: list[int] = []
    size, first = 0, None
    for index, header in enumerate(headers):
        keys = Keys(header)
        said = (keys.whole(SPLIT_NO, 0, 1 << 16, kind="u16"), split_count(header))
        if said != (index, count):
            raise _bad(f"shard {index + 1} of {count} says that it is shard {said[0] + 1} of {said[1]}")
        for tensor in header.tensors.values():
            if tensor.name in tensors:
                raise _bad(f"tensor {quote(tensor.name)} is in two shards, the second of them shard {index + 1}")
            tensors[tensor.name] = tensor
        totals.append(keys.whole(SPLIT_TENSORS, 0, 1 << 31, UNSAID if index else None, kind="i32"))
        size += header.size
        first = first or header
    for index, total in enumerate(totals):
        if total not in (len(tensors), UNSAID):
            raise _bad(f"shard {index + 1} says there are {total} tensors in all, but there are {len(tensors)}")
    assert first is not None, "a set has a first shard"
    metadata = {key: value for key, value in first.metadata.items() if not key.startswith("split.")}
    return first._replace(metadata=metadata, tensors=tensors, size=size)


def _bad(fault: str) -> MeshError:
    return MeshError("bad_shards", fault)
