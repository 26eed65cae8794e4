"""The identities in protocol/vectors/identity.json are those that the code gives."""

import hashlib
import json
from pathlib import Path

import pytest

from meshnode.artifact.identity import DOMAIN, identity_of
from meshnode.errors import MeshError
from meshnode.ids import artifact_id

from . import vectors

VECTORS = json.loads(vectors.PATH.read_text())


def test_file_of_vectors_is_current() -> None:
    assert vectors.main(["--check"]) == 0


@pytest.mark.parametrize("vector", VECTORS["artifacts"], ids=lambda v: v["name"])
def test_identity(vector: dict) -> None:
    files = [bytes.fromhex(text) for text in vector["files"]]
    assert identity_of([(len(file), hashlib.sha256(file).digest()) for file in files]) == vector["identity"]


def test_identities_differ_and_the_domain_ends_every_other_reading() -> None:
    assert len({vector["identity"] for vector in VECTORS["artifacts"]}) == len(VECTORS["artifacts"])
    assert DOMAIN.endswith(b"\0")


@pytest.mark.parametrize("vector", VECTORS["texts"], ids=lambda v: v.get("why", v["text"][:7]))
def test_text_of_an_identity(vector: dict) -> None:
    if vector["valid"]:
        assert artifact_id(vector["text"]) == vector["text"]
    else:
        with pytest.raises(MeshError) as caught:
            artifact_id(vector["text"])
        assert caught.value.code == "unknown_model"


def test_vectors_name_no_folder_of_this_machine() -> None:
    assert str(Path.home()) not in vectors.PATH.read_text()
