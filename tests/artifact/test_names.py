"""Which artifact a person means."""

import pytest

from meshnode.artifact.names import match
from meshnode.errors import MeshError

A, B, C = "sha256:" + "ab" * 32, "sha256:" + "abcd" * 16, "shards:" + "ef" * 32
LABELS = {A: {"Tiny"}, B: {"tiny", "small"}, C: {"abab", "set"}}


@pytest.mark.parametrize(
    ("text", "meant"),
    [(A, A), ("Tiny", A), ("tiny", B), ("SMALL", B), ("ababab", A), ("sha256:abcd", B), ("shards:efef", C),
     ("EFEF", C), ("abab", C), ("Smal", B), ("aba", C)],
)  # fmt: skip
def test_one_is_meant(text: str, meant: str) -> None:
    assert match(text, LABELS) == meant


@pytest.mark.parametrize("text", ["TINY", "tin", "sha256:abab", "sha256:ab", "ab", "shards:abab", "sha256:", "", "*"])
def test_none_or_several_are_refused(text: str) -> None:
    several = {"TINY": {A, B}, "tin": {A, B}}.get(text, set())
    labels = LABELS if text != "sha256:abab" else {A: (), "sha256:" + "ab" * 31 + "ff": ()}
    with pytest.raises(MeshError) as caught:
        match(text, labels)
    if several or text == "sha256:abab":
        assert caught.value.code == "ambiguous_model"
        assert all(identity in caught.value.message for identity in several)
    else:
        assert caught.value.code == "unknown_model"


def test_long_lists_are_cut_and_an_empty_one_is_said() -> None:
    many = {f"sha256:{i:064x}": {"twin"} for i in range(40)}
    with pytest.raises(MeshError) as caught:
        match("twin", many)
    assert "and 28 more" in caught.value.message
    with pytest.raises(MeshError) as caught:
        match("twin", {})
    assert "none is known" in caught.value.message
