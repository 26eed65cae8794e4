"""Find the one artifact that a person means; a name is only a label, and one that several share is refused.

match(text, labels) -> identity    labels: identity -> names. Used for what lies here and for what peers offer alike.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from ..errors import MeshError

MIN_PREFIX = 4  # hex digits: shorter ones are more likely a name
MIN_NAME = 3  # characters of a name that stand for it
SHOWN = 12  # artifacts listed in a message

_PREFIX = re.compile(rf"(?:(sha256|shards):)?([0-9a-f]{{{MIN_PREFIX},64}})")


def match(text: str, labels: Mapping[str, Collection[str]]) -> str:
    """The identity that is, is called, or begins with `text`; last, the one whose name begins with it.

    Errors: unknown_model (says what is known), ambiguous_model (lists the identities).
    """
    if text in labels:
        return text
    for found in (_called(text, labels), _beginning(text, labels), _named_like(text, labels)):
        if len(found) == 1:
            return found[0]
        if found:
            raise MeshError("ambiguous_model", f"{text!r} stands for {len(found)} artifacts:{_listed(found, labels)}")
    known = f"; known are:{_listed(sorted(labels), labels)}" if labels else ", and none is known"
    raise MeshError("unknown_model", f"no artifact is called {text!r}{known}")


def _called(text: str, labels: Mapping[str, Collection[str]]) -> list[str]:
    exact = sorted(identity for identity, names in labels.items() if text in names)
    folded = text.casefold()
    return exact or sorted(i for i, names in labels.items() if any(name.casefold() == folded for name in names))


def _beginning(text: str, labels: Mapping[str, Collection[str]]) -> list[str]:
    prefix = _PREFIX.fullmatch(text.lower())
    if prefix is None:
        return []
    scheme, digits = prefix[1], prefix[2]
    return sorted(
        identity
        for identity in labels
        if identity.partition(":")[2].startswith(digits) and scheme in (None, identity.partition(":")[0])
    )


def _named_like(text: str, labels: Mapping[str, Collection[str]]) -> list[str]:
    """Names that models give themselves are long; their beginning is what people type."""
    if len(text) < MIN_NAME:
        return []
    folded = text.casefold()
    return sorted(i for i, names in labels.items() if any(n.casefold().startswith(folded) for n in names))


def _listed(identities: Collection[str], labels: Mapping[str, Collection[str]]) -> str:
    lines = [f"\n  {identity}  {', '.join(sorted(labels[identity]))}" for identity in list(identities)[:SHOWN]]
    more = len(identities) - len(lines)
    return "".join(lines) + (f"\n  and {more} more" if more > 0 else "")
