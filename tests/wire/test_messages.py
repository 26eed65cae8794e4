"""Messages against the CDDL, and the rules every one of them follows."""

import dataclasses
import re
from pathlib import Path

import cbor2
import pycddl
import pytest

from meshnode.errors import MeshError
from meshnode.ids import Layers
from meshnode.keys import NodeKey
from meshnode.wire import messages, schema, statements

CDDL = (Path(__file__).parents[2] / "protocol" / "meshnode.cddl").read_text()
KEY = NodeKey(bytes(range(32)))
CONTRACT = messages.Contract("sha256:" + "0" * 64, 1, "llama", "f32", "invariant", 30, 576)
GRANT = messages.Grant(b"s" * 16, 1, KEY.peer, CONTRACT, 100)
SIGNED = statements.sign(KEY, "mesh", GRANT)
D = b"d" * 32
SIDE = messages.LinkSide(KEY.peer, "in", "residual", 5, 2, D, True)

EXAMPLES = [
    messages.OfferQuery(b"n" * 16, CONTRACT.artifact),
    messages.Offer(b"n" * 16, KEY.peer, "m", CONTRACT, Layers(0, 10), D, D, 64, 4, 3, ((0, 900),), ("/a",), True),
    messages.Offers((SIGNED,)),
    messages.Refusal("busy", "why", (messages.Failed(KEY.peer, 3, "busy", "x"),), 7),
    messages.Tokenize(CONTRACT.artifact, None, (messages.Turn("user", "hi"),)),
    messages.Tokenized((1, 2)),
    GRANT,
    messages.RouteOpen(
        SIGNED, 0, (messages.Hop(KEY.peer, b"l" * 8, ("/a",)),), 5, 6, messages.Sampling(1, 2, 3, 4, 5), (1,), 9,
        (KEY.peer,), ("/b",),
    ),
    messages.Lease(
        b"l" * 8, b"s" * 16, 1, 0, KEY.peer, KEY.peer, KEY.peer, Layers(0, 10), Layers(0, 10), D, D, D, 64, 1000,
        ("/a",),
    ),
    messages.RouteReady((SIGNED,), 3, (messages.Failed(KEY.peer, 3, "busy"),)),
    messages.Pushes(
        (messages.Push(b"l" * 8, b"s" * 16, 1, 0, 0, 2, 10, 0, True, 4),),
        (messages.Tensor("residual", "f32", (2, 4), "raw", D),)
    ),
    messages.Tokens(b"s" * 16, 1, 5, (7,), b"l" * 8, (b"x",), "stop"),
    messages.Credit(b"l" * 8, b"s" * 16, 1, 16),
    messages.Renew(b"l" * 8, b"s" * 16, 1),
    messages.Failure(b"s" * 16, 1, KEY.peer, "busy", "x", b"l" * 8),
    messages.Close(b"l" * 8, b"s" * 16, 1, "done"),
    messages.Closed((SIGNED,)),
    messages.Receipt(
        D, b"s" * 16, 1, 0, 0, KEY.peer, KEY.peer, KEY.peer, Layers(0, 10), Layers(0, 10), CONTRACT, D, D, 0, 5, 2, 77,
        (SIDE,), True, D,
    ),
    messages.Acceptance(b"s" * 16, 1, KEY.peer, (D,), 5, (SIDE,)),
]  # fmt: skip


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
        from meshnode.keys import signed_bytes

        assert signed_bytes("a", "bc", b"") != signed_bytes("ab", "c", b"")
