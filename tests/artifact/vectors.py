"""Writes protocol/vectors/identity.json: python -m tests.artifact.vectors [--check]

The preimages are put together here by hand, not by the code under test.
"""

import hashlib
import json
import struct
import sys
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[2] / "protocol" / "vectors" / "identity.json"
A, B, C = b"first shard", b"the second shard, longer", bytes(range(256))


def preimage(files: list[bytes]) -> bytes:
    body = b"meshnode/1/shards\0" + struct.pack(">I", len(files))
    for position, file in enumerate(files):
        body += struct.pack(">IQ", position, len(file)) + hashlib.sha256(file).digest()
    return body


def artifact(name: str, *files: bytes) -> dict[str, Any]:
    vector: dict[str, Any] = {"name": name, "files": [file.hex() for file in files]}
    if len(files) > 1:
        vector["preimage"] = preimage(list(files)).hex()
        vector["identity"] = "shards:" + hashlib.sha256(preimage(list(files))).hexdigest()
    else:
        vector["identity"] = "sha256:" + hashlib.sha256(files[0]).hexdigest()
    return vector


def render() -> str:
    digest = hashlib.sha256(A).hexdigest()
    vectors = {
        "what": "content identity of artifacts; see protocol/01-identity.md",
        "provenance": "python -m tests.artifact.vectors",
        "version": 1,
        "artifacts": [
            artifact("one file", A),
            artifact("another file", C),
            artifact("two shards", A, B),
            artifact("the same two the other way round", B, A),
            artifact("the first twice", A, A),
            artifact("three shards", A, B, C),
            artifact("the second foreign", A, B[:-1] + b"R", C),
            artifact("a file that holds the preimage of two shards", preimage([A, B])),
        ],
        "texts": [
            {"text": f"sha256:{digest}", "valid": True},
            {"text": f"shards:{digest}", "valid": True},
            {"text": digest, "valid": False, "why": "no scheme"},
            {"text": f"sha256:{digest[:-1]}", "valid": False, "why": "63 digits"},
            {"text": f"sha256:{digest}0", "valid": False, "why": "65 digits"},
            {"text": f"sha256:{digest.upper()}", "valid": False, "why": "upper-case digits"},
            {"text": f"SHA256:{digest}", "valid": False, "why": "upper-case scheme"},
            {"text": f"md5:{digest}", "valid": False, "why": "unknown scheme"},
            {"text": f"sha256:{digest}\n", "valid": False, "why": "trailing newline"},
            {"text": f" sha256:{digest}", "valid": False, "why": "leading space"},
            {"text": "", "valid": False, "why": "empty"},
        ],
    }
    return json.dumps(vectors, indent=1) + "\n"


def main(arguments: list[str]) -> int:
    if "--check" in arguments:
        return 0 if PATH.read_text() == render() else 1
    PATH.write_text(render())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
