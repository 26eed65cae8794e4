"""Messages against the CDDL, and the rules every one of them follows."""

import dataclasses
import json
import re
from pathlib import Path

import cbor2
import pycddl
import pytest
from nacl.signing import SigningKey

from meshnode.errors import MeshError
from meshnode.keys import NodeKey, signed_bytes
from meshnode.wire import messages, schema, statements

from .examples import COMMAND, EXAMPLES, GRANT, KEY, SIGNED, VECTORS, vectors

CDDL = (Path(__file__).parents[2] / "protocol" / "meshnode.cddl").read_text()


def rule(name: str) -> pycddl.Schema:
    """The CDDL with `name` as its first rule, which is the one that counts."""
    return pycddl.Schema(f"start = {name}\n" + CDDL)


def test_every_message_has_an_example_and_a_rule_of_its_name() -> None:
    classes = set(schema.messages().values())
    assert {type(example) for example in EXAMPLES} == classes
    listed = set(re.search(r"message = (.*?)\n\n", CDDL, re.S)[1].replace("/", " ").split())  # type: ignore[index]
    assert {statements.domain(cls) for cls in classes} == listed


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
class TestEveryMessage:
    def test_survives_the_wire(self, example: object) -> None:
        assert schema.decode(schema.encode(example), type(example)) == example

    def test_is_what_the_cddl_says(self, example: object) -> None:
        rule(statements.domain(type(example))).validate_cbor(schema.encode(example))

    def test_has_the_keys_of_the_cddl(self, example: object) -> None:
        body = re.search(rf"^{statements.domain(type(example))} = \{{(.*?)\}}", CDDL, re.S | re.M)
        assert body
        stated = {(int(key), bool(mark)) for mark, key in re.findall(r"(\? )?\b(\d+): ", re.sub(r";.*", "", body[1]))}
        ours = {(f.metadata["key"], f.default is not dataclasses.MISSING) for f in dataclasses.fields(example)}  # type: ignore[arg-type]
        assert stated == ours | {(0, False)}

    def test_refuses_an_unknown_even_key_and_ignores_an_odd_one(self, example: object) -> None:
        value = cbor2.loads(schema.encode(example))
        assert schema.decode(cbor2.dumps(value | {1001: 1}, canonical=True), type(example)) == example
        with pytest.raises(MeshError, match="unknown even keys"):
            schema.decode(cbor2.dumps(value | {1000: 1}, canonical=True), type(example))

    def test_refuses_a_missing_field_a_wrong_type_and_another_message(self, example: object) -> None:
        value = cbor2.loads(schema.encode(example))
        for f in dataclasses.fields(example):  # type: ignore[arg-type]
            key = f.metadata["key"]
            for bad in ({k: v for k, v in value.items() if k != key}, value | {key: -1}):
                if key in bad or f.default is dataclasses.MISSING:
                    with pytest.raises(MeshError, match=f.name):
                        schema.decode(cbor2.dumps(bad, canonical=True), type(example))
        with pytest.raises(MeshError, match="was due"):
            schema.decode(schema.encode(example), next(c for c in schema.messages().values() if c is not type(example)))

    def test_every_cut_and_any_trailing_byte_is_refused(self, example: object) -> None:
        raw = schema.encode(example)
        for end in range(len(raw)):
            with pytest.raises(MeshError):
                schema.decode(raw[:end], type(example))
        with pytest.raises(MeshError):
            schema.decode(raw + b"\0", type(example))


def test_a_default_that_is_spelled_out_is_refused() -> None:
    value = cbor2.loads(schema.encode(messages.OfferQuery(b"n" * 16)))
    with pytest.raises(MeshError):
        schema.decode(cbor2.dumps(value | {3: None}, canonical=True), messages.OfferQuery)


def test_a_message_we_must_not_send_is_not_encoded() -> None:
    with pytest.raises(ValueError, match="nonce"):
        schema.encode(messages.OfferQuery(b"short"))


class TestSignatures:
    def test_hold_for_one_purpose_one_mesh_one_signer_and_these_bytes(self) -> None:
        assert statements.check(SIGNED, messages.Grant, "mesh", by=KEY.peer) == GRANT
        other = NodeKey(bytes(32))
        for bad, cls, mesh in (
            (SIGNED, messages.Lease, "mesh"),
            (SIGNED, messages.Grant, "mesh2"),
            (dataclasses.replace(SIGNED, signer=other.peer), messages.Grant, "mesh"),
        ):
            with pytest.raises(MeshError) as refused:
                statements.check(bad, cls, mesh)
            assert refused.value.code == "bad_signature"
        with pytest.raises(MeshError):
            statements.check(SIGNED, messages.Grant, "mesh", by=other.peer)

    def test_no_changed_byte_is_accepted(self) -> None:
        for index in range(len(SIGNED.raw)):
            raw = bytearray(SIGNED.raw)
            raw[index] ^= 1
            with pytest.raises(MeshError):
                statements.check(dataclasses.replace(SIGNED, raw=bytes(raw)), messages.Grant, "mesh")
        for index in range(64):
            signature = bytearray(SIGNED.signature)
            signature[index] ^= 0x80
            with pytest.raises(MeshError):
                statements.check(dataclasses.replace(SIGNED, signature=bytes(signature)), messages.Grant, "mesh")

    def test_borders_between_the_names_cannot_be_shifted(self) -> None:
        assert signed_bytes("a", "bc", b"") != signed_bytes("ab", "c", b"")


class TestVectors:
    def test_are_current(self) -> None:
        assert json.loads(VECTORS.read_text()) == vectors(), COMMAND

    def test_what_they_refuse_is_refused(self) -> None:
        for case in json.loads(VECTORS.read_text())["refused"]:
            with pytest.raises(MeshError) as refused:
                schema.decode(bytes.fromhex(case["hex"]), messages.Credit)
            assert refused.value.code == "bad_frame", case["why"]

    def test_the_signature_is_that_of_the_protocol_text(self) -> None:
        """Put together from protocol/03-messages.md alone."""
        case = json.loads(VECTORS.read_text())["signature"]
        names = (f"meshnode/1/{case['name']}".encode(), case["mesh_id"].encode())
        signed = b"".join(len(name).to_bytes(2, "big") + name for name in names) + bytes.fromhex(case["raw"])
        assert SigningKey(bytes.fromhex(case["seed"])).sign(signed).signature.hex() == case["signature"]


def test_what_is_said_to_people_is_cut_to_its_size_between_characters() -> None:
    sent = schema.decode(schema.encode(messages.Refusal("busy", "é\ud800" + "🦙" * 400)), messages.Refusal)
    assert sent.say == "é?" + "🦙" * 249
