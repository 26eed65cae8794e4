import base64
import contextlib
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnode.errors import MeshError
from meshnode.wire import cbor
from meshnode.wire.invite import PREFIX, Invite, parse

GOOD = Invite("mesh-1", bytes(range(32)), ("/ip4/192.0.2.1/tcp/4001/p2p/12D3KooW", "/ip4/192.0.2.2/tcp/4001"), 1000)


def packed(raw: bytes) -> str:
    check = hashlib.sha256(b"meshnode/1/invite\0" + raw).digest()[:8]
    return PREFIX + base64.urlsafe_b64encode(raw + check).rstrip(b"=").decode()


def code_of(line: str) -> str:
    with pytest.raises(MeshError) as error:
        parse(line)
    assert error.value.hint
    return error.value.code


def test_there_and_back() -> None:
    for invite in (GOOD, Invite("public", None, (), 0)):
        line = invite.to_line()
        assert len(line.splitlines()) == 1
        assert parse(line) == invite
        assert parse(f"  {line}\n") == invite
    assert parse(GOOD.to_line()).mesh.secret == GOOD.secret


def test_the_helper_packs_as_the_code_does() -> None:  # else the refusals below would be the check sum's
    raw = cbor.dumps({2: "mesh-1", 4: GOOD.secret, 6: list(GOOD.addresses), 8: 1000})
    assert packed(raw) == GOOD.to_line()


def test_it_lapses() -> None:
    assert GOOD.current(999.9) is GOOD
    with pytest.raises(MeshError, match="h ago") as error:
        GOOD.current(1000 + 7200)
    assert error.value.code == "invite_expired"
    with pytest.raises(MeshError):
        GOOD.current(1000)


@given(st.integers(0, len(GOOD.to_line()) - 1), st.integers(1, 127))
def test_any_slip_is_found(at: int, flip: int) -> None:
    line = GOOD.to_line()
    changed = line[:at] + chr(ord(line[at]) ^ flip) + line[at + 1 :]
    if changed.strip() == line:
        return
    if at == len(line) - 1:  # its unused bits may differ
        with contextlib.suppress(MeshError):
            assert parse(changed) == GOOD
        return
    assert code_of(changed) == "bad_invite"


def test_the_other_alphabet_of_base64_is_none_of_ours() -> None:
    line = GOOD.to_line()
    assert "-" in line[len(PREFIX) :] or "_" in line
    assert code_of(PREFIX + line[len(PREFIX) :].replace("-", "+").replace("_", "/")) == "bad_invite"


def test_cut_anywhere() -> None:
    line = GOOD.to_line()
    for end in range(len(line) - 1):
        assert code_of(line[:end]) == "bad_invite"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "garbage",
        PREFIX,
        PREFIX + "AAAA",
        PREFIX + "é" * 20,
        PREFIX + "A" * 5000,
        GOOD.to_line() + "\n" + GOOD.to_line(),
        "meshnode-invite-2." + GOOD.to_line()[len(PREFIX) :],
    ],
)
def test_garbage(line: str) -> None:
    assert code_of(line) == "bad_invite"


@pytest.mark.parametrize(
    "value",
    [
        [],
        7,
        {},
        {2: "m", 4: None, 6: [], 8: -1},
        {2: "m", 4: None, 6: [1], 8: 1},
        {2: "", 4: None, 6: [], 8: 1},
        {2: "\n", 4: None, 6: [], 8: 1},
        {2: "m", 4: b"short", 6: [], 8: 1},
        {2: "m", 6: [], 8: 1},
        {2: "m", 4: None, 6: ["/ip4/1.2.3.4"] * 9, 8: 1},
        {2: "m", 4: None, 6: [], 8: 1, 10: "what a later version must understand"},
    ],
)
def test_sound_packing_of_nonsense(value: object) -> None:
    assert code_of(packed(cbor.dumps(value))) == "bad_invite"


def test_a_later_versions_odd_keys_are_ignored() -> None:
    assert parse(packed(cbor.dumps({2: "m", 4: None, 6: [], 8: 1, 99: "news"}))) == Invite("m", None, (), 1)


def test_a_secret_is_not_shown() -> None:
    assert GOOD.secret is not None
    assert GOOD.secret.hex() not in repr(GOOD)
    assert str(GOOD.secret) not in repr(GOOD)
