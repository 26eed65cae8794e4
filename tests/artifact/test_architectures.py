"""The list of architectures: read from one file, said to the worker in C++."""

from __future__ import annotations

import pytest

from meshnode.artifact import architectures
from meshnode.errors import MeshError


def test_what_is_proven_is_not_refused() -> None:
    assert "llama" in architectures.ARCHITECTURES
    assert not architectures.ARCHITECTURES.keys() & architectures.REFUSED.keys()
    assert all(c.truncate in ("any", "none") and c.planes in (1, 4) for c in architectures.ARCHITECTURES.values())


def test_a_refusal_names_the_architecture_and_the_reason() -> None:
    for name, why in [*architectures.REFUSED.items(), ("never\nheard of", architectures.NEVER_SWEPT)]:
        with pytest.raises(MeshError) as caught:
            architectures.check(name)
        assert caught.value.code == "unsupported_architecture"
        assert caught.value.message == f"architecture '{name.replace(chr(10), '?')}' is refused: {why}"
    assert architectures.check("llama") == architectures.ARCHITECTURES["llama"]


def test_the_worker_gets_the_same_list() -> None:
    text = architectures.header()
    for name, certificate in architectures.ARCHITECTURES.items():
        row = f'{{"{name}", {"true" if certificate.truncate == "any" else "false"}, {certificate.planes}, 0x'
        assert row in text
    for name, why in architectures.REFUSED.items():
        assert f'{{"{name}", "{why}"}}' in text
    assert text.count("},\n") == len(architectures.ARCHITECTURES) + len(architectures.REFUSED)
