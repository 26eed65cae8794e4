"""Only one encoding of a value is accepted, and none that grows."""

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnode.errors import MeshError
from meshnode.wire import cbor

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.binary(max_size=40) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.integers(0, 1000), inner, max_size=4),
    max_leaves=6,  # nested less deeply than what is refused
)

BAD = {
    "empty": b"",
    "trailing bytes": b"\x01\x01",
    "duplicate key": b"\xa2\x01\x01\x01\x02",
    "keys out of order": b"\xa2\x02\x01\x01\x01",
    "integer not in its shortest form": b"\x18\x01",
    "16 bits for 255": b"\x19\x00\xff",
    "length not in its shortest form": b"\x58\x01\x00",
    "indefinite map": b"\xbf\x01\x02\xff",
    "indefinite bytes": b"\x5f\x41\x00\xff",
    "text that is not UTF-8": b"\x61\xff",
    "bytes of 2^40": b"\x5b\x00\x00\x01\x00\x00\x00\x00\x00",
    "array of 2^40": b"\x9b\x00\x00\x01\x00\x00\x00\x00\x00",
    "map of 2^40": b"\xbb\x00\x00\x01\x00\x00\x00\x00\x00",
    "a million arrays": b"\x9a\x00\x0f\x42\x40" + b"\x80" * 1_000_000,
    "nested 500 deep": b"\x81" * 500 + b"\x01",
    "half a float": b"\xf9\x7e\x00",
    "a float": b"\xfb\x3f\xf1\x99\x99\x99\x99\x99\x9a",
    "a tag": b"\xc1\x01",
    "shared reference": b"\xd8\x1c\x81\xd8\x1d\x00",
    "undefined": b"\xf7",
    "a simple value": b"\xf8\xff",
    "reserved length": b"\x1c",
    "break alone": b"\xff",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_bytes_are_refused(name: str) -> None:
    with pytest.raises(MeshError) as refused:
        cbor.loads(BAD[name])
    assert refused.value.code == "bad_frame"


@given(VALUES)
def test_what_we_write_is_what_we_read(value: object) -> None:
    assert cbor.loads(cbor.dumps(value)) == value


@given(st.binary(max_size=60))
def test_what_is_accepted_has_no_other_encoding(raw: bytes) -> None:
    try:
        value = cbor.loads(raw)
    except MeshError:
        return
    assert cbor2.dumps(value, canonical=True) == raw
