"""Every message between nodes. protocol/meshnode.cddl is the authority; a test holds the two together.

Durations are in milliseconds, costs in microseconds, sampling parameters in millionths: the wire has no floats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ..errors import CODES
from ..ids import SESSION_BYTES, ArtifactId, Layers, PeerId, SessionId
from .schema import (
    field,
    flag,
    integer,
    integers,
    layers,
    listing,
    message,
    nested,
    octets,
    pair,
    prose,
    shaped,
    text,
    uint,
    word,
)

WIRE_VERSION = 1
MAX_PROMPT = 1 << 16  # tokens in one message
MAX_TEXT = 1 << 19  # bytes of prompt that a head tokenizes at once; leaves room in a header for many messages
MAX_HOPS = 64  # longer routes spend their time on the way
MAX_RECEIPTS = 640  # of an epoch, in one message: 1,200 bytes each leave room in a header
MAX_ADDRESSES = 8
MAX_PAIRS = 16
MAX_EXCLUDED = 64  # nodes that a route may not use
MAX_PUSHES = 64  # pushes a frame
TOKEN_LIMIT = (1 << 31) - 1

PEER = text(64, 1)
SESSION = octets(SESSION_BYTES)
EPOCH = uint((1 << 32) - 1)
POSITION = uint(1 << 24)
SEGMENT = uint((1 << 32) - 1)
DIGEST = octets(32)
ARTIFACT = shaped("(sha256|shards):[0-9a-f]{64}")
CODE = text(40, 1)
SAY = prose(1000)
LEASE_ID = octets(8)
TOKENS = integers(TOKEN_LIMIT, MAX_PROMPT)
BIAS = pair(uint(TOKEN_LIMIT), integer(-100_000_000, 100_000_000))
ADDRESSES = listing(text(200, 1), MAX_ADDRESSES)


@dataclass(frozen=True)
class Signed:
    """A statement as its signer wrote it: the raw bytes are what counts, and what is passed on."""

    signer: PeerId = field(1, PEER)
    raw: bytes = field(2, octets(1, 1 << 16))
    signature: bytes = field(3, octets(64))


SIGNED = nested(Signed)


@dataclass(frozen=True)
class Contract:
    """What a whole route agrees on."""

    artifact: ArtifactId = field(1, ARTIFACT)
    wire: int = field(2, uint(255))
    architecture: str = field(3, text(64, 1))
    boundary: str = field(4, word("f32"))
    numerics: str = field(5, word("invariant", "fast"))
    n_layer: int = field(6, integer(1, 4096))
    n_embd: int = field(7, integer(1, 1 << 20))


@dataclass(frozen=True)
class Sampling:
    """How the tail picks a token. Temperature 0 is exact argmax; the seed is used above it."""

    temperature: int = field(1, uint(100_000_000), default=0)  # millionths
    top_k: int = field(3, uint(1 << 20), default=0)  # 0: all
    top_p: int = field(5, uint(1_000_000), default=1_000_000)  # millionths
    min_p: int = field(7, uint(1_000_000), default=0)  # millionths
    seed: int = field(9, uint((1 << 64) - 1), default=0)
    typical_p: int = field(10, uint(1_000_000), default=1_000_000)  # millionths
    repeat_penalty: int = field(12, integer(1, 100_000_000), default=1_000_000)  # millionths
    repeat_last_n: int = field(14, uint((1 << 32) - 1), default=64)  # the window of all three penalties
    presence_penalty: int = field(16, integer(-100_000_000, 100_000_000), default=0)  # millionths
    frequency_penalty: int = field(18, integer(-100_000_000, 100_000_000), default=0)  # millionths
    biases: tuple[tuple[int, int], ...] = field(20, listing(BIAS, 1024), default=())  # (id, millionths), ids ascending
    grammar: str = field(22, text(1 << 16), default="")  # GBNF
    logprobs: int | None = field(24, uint(20), default=None)  # of so many of the likeliest, and the chosen one's


@dataclass(frozen=True)
class Likely:
    """A token that was likely, in millionths of the natural logarithm of its probability, without their sign."""

    id: int = field(1, uint(TOKEN_LIMIT))
    cost: int = field(2, uint())
    piece: bytes = field(3, octets(0, 1024))


@dataclass(frozen=True)
class Logprobs:
    """What is told of one token: its own, and the likeliest instead of it."""

    cost: int = field(1, uint())
    top: tuple[Likely, ...] = field(2, listing(nested(Likely), 20))


@message(1)
class OfferQuery:
    """Asks a node for its offers; the nonce makes the answer fresh."""

    nonce: bytes = field(2, octets(16))
    artifact: ArtifactId | None = field(3, ARTIFACT, default=None)


@message(2)
class Offer:
    """A node's signed statement of one holding and what is free of it."""

    nonce: bytes = field(2, octets(16))
    node: PeerId = field(4, PEER)
    name: str = field(6, prose(200))
    contract: Contract = field(8, nested(Contract))
    holding: Layers = field(10, layers)
    recipe: bytes = field(12, DIGEST)
    fingerprint: bytes = field(14, DIGEST)
    context: int = field(16, POSITION)  # KV cells a session
    sessions: int = field(18, uint(256))
    free: int = field(20, uint(256))  # sessions
    pairs: tuple[tuple[int, int], ...] = field(
        22, listing(integers((1 << 53) - 1, 2, 2), MAX_PAIRS)
    )  # (entry layer, default=us)
    addresses: tuple[str, ...] = field(24, ADDRESSES)
    chat: bool = field(26, flag)


@message(3)
class Offers:
    offers: tuple[Signed, ...] = field(2, listing(SIGNED, 64))


@dataclass(frozen=True)
class Failed:
    """A candidate that was tried in vain."""

    node: PeerId = field(1, PEER)
    layer: int = field(2, uint(4096))  # where it was to begin
    code: str = field(3, CODE)
    say: str = field(5, SAY, default="")


@message(4)
class Refusal:
    """The answer to a request that is not granted."""

    code: str = field(2, CODE)
    say: str = field(4, SAY)
    failed: tuple[Failed, ...] = field(6, listing(nested(Failed), 256), default=())
    attempts: int = field(8, uint(1000), default=0)  # left of the budget


@dataclass(frozen=True)
class Turn:
    role: str = field(1, text(64, 1))
    content: str = field(2, text(MAX_TEXT))


@message(5)
class Tokenize:
    """Asks a head for the ids of a raw text, or of a chat rendered with the model's template. One of the two."""

    artifact: ArtifactId = field(2, ARTIFACT)
    text: str | None = field(3, text(MAX_TEXT), default=None)
    chat: tuple[Turn, ...] = field(5, listing(nested(Turn), 1024), default=())


@message(6)
class Tokenized:
    tokens: tuple[int, ...] = field(2, TOKENS)


@message(7)
class Grant:
    """The entry node's signed word that opens an epoch of a session. Only the entry node signs one."""

    session: SessionId = field(2, SESSION)
    epoch: int = field(4, EPOCH)
    entry: PeerId = field(6, PEER)
    contract: Contract = field(8, nested(Contract))
    context: int = field(10, POSITION)  # positions that the session may come to hold
    audit: bool = field(11, flag, default=False)  # others may be shown what it takes to do the work again


@dataclass(frozen=True)
class Hop:
    """A hop that the route has so far."""

    node: PeerId = field(1, PEER)
    lease: bytes = field(2, LEASE_ID)
    addresses: tuple[str, ...] = field(4, ADDRESSES, default=())
    cached: int = field(6, POSITION, default=0)  # positions that it holds from earlier epochs


@dataclass(frozen=True)
class Kept:
    """A hop of the epoch before: it goes on with what it holds, or somebody of equal recipe takes its place."""

    node: PeerId = field(1, PEER)
    effective: Layers = field(2, layers)
    recipe: bytes = field(3, DIGEST)
    fingerprint: bytes = field(4, DIGEST)


@message(8)
class RouteOpen:
    """Asks a node to run the layers from `begin` on as far as it will, and to find who runs the rest."""

    grant: Signed = field(2, SIGNED)
    begin: int = field(4, uint(4096))
    chain: tuple[Hop, ...] = field(6, listing(nested(Hop), MAX_HOPS))  # hops before this one, the head first
    deadline: int = field(8, uint(600_000))  # ms left
    attempts: int = field(10, uint(1000))  # left of the budget
    sampling: Sampling = field(12, nested(Sampling))
    prompt: tuple[int, ...] = field(14, TOKENS)  # history for the tail's sampling
    max_tokens: int = field(16, POSITION)
    excluded: tuple[PeerId, ...] = field(18, listing(PEER, MAX_EXCLUDED), default=())
    entry_addresses: tuple[str, ...] = field(20, ADDRESSES, default=())
    generated: int = field(22, POSITION, default=0)  # how many of the last ids of the prompt were sampled before
    failed: tuple[Failed, ...] = field(21, listing(nested(Failed), 64), default=())  # tried before for this request
    repair: tuple[Kept, ...] = field(24, listing(nested(Kept), MAX_HOPS), default=())  # the epoch before, head first


@message(9)
class Lease:
    """A hop's signed word that it holds an effective range for a session's epoch."""

    lease: bytes = field(2, LEASE_ID)
    session: SessionId = field(4, SESSION)
    epoch: int = field(6, EPOCH)
    hop: int = field(8, uint(MAX_HOPS))
    node: PeerId = field(10, PEER)
    predecessor: PeerId = field(12, PEER)
    successor: PeerId = field(14, PEER)  # the tail's is the head: decode is a ring
    holding: Layers = field(16, layers)
    effective: Layers = field(18, layers)
    contract: bytes = field(20, DIGEST)
    recipe: bytes = field(22, DIGEST)
    fingerprint: bytes = field(24, DIGEST)
    context: int = field(26, POSITION)
    ttl: int = field(28, uint(600_000))  # ms, from when it is signed and again from each renewal
    addresses: tuple[str, ...] = field(30, ADDRESSES)
    cached: int = field(32, POSITION, default=0)  # positions that it holds from earlier epochs


@message(10)
class RouteReady:
    leases: tuple[Signed, ...] = field(2, listing(SIGNED, MAX_HOPS, 1))  # this hop's first, the tail's last
    attempts: int = field(4, uint(1000))  # left of the budget
    failed: tuple[Failed, ...] = field(6, listing(nested(Failed), 256), default=())


@dataclass(frozen=True)
class Push:
    """n positions of one session. Its rows of the payload follow those of the push before it in the frame."""

    lease: bytes = field(1, LEASE_ID)  # the receiver's
    session: SessionId = field(2, SESSION)
    epoch: int = field(3, EPOCH)
    step: int = field(4, POSITION)  # counts the pushes of an epoch on this link, from 0
    first: int = field(5, POSITION)
    count: int = field(6, integer(1, 4096))
    begin: int = field(8, uint(4096))  # effective start: the layer that these rows enter
    cached: int = field(10, POSITION)  # positions that the receiver must have in its cache
    sample: bool = field(
        12, flag, default=False
    )  # the last position is the prompt's or the answer's end: the tail samples
    keep: int | None = field(14, POSITION, default=None)  # reserved: positions retained before this push
    segment: int = field(7, SEGMENT, default=0)  # of the epoch, that the hops account for these positions in


@dataclass(frozen=True)
class Tensor:
    """One tensor of the payload."""

    name: str = field(1, word("tokens", "residual"))
    dtype: str = field(2, word("i32", "f32"))
    shape: tuple[int, ...] = field(3, integers(1 << 24, 4))
    codec: str = field(4, word("raw"))
    sha256: bytes = field(5, DIGEST)  # of its uncompressed bytes


@message(11)
class Pushes:
    """Steps of one or several sessions on one link: ids [n] at layer 0, elsewhere rows [n, n_embd]."""

    pushes: tuple[Push, ...] = field(2, listing(nested(Push), MAX_PUSHES, 1))
    bundle: tuple[Tensor, ...] = field(4, listing(nested(Tensor), 1, 1))


@message(12)
class Tokens:
    """What the tail sampled: ids to the head (the ring), ids and bytes to the entry node."""

    session: SessionId = field(2, SESSION)
    epoch: int = field(4, EPOCH)
    first: int = field(6, POSITION)  # position of the first token in the session
    ids: tuple[int, ...] = field(8, integers(TOKEN_LIMIT, 256))
    lease: bytes | None = field(10, LEASE_ID, default=None)  # the head's, in the ring; to the entry node none
    pieces: tuple[bytes, ...] = field(9, listing(octets(0, 1024), 256), default=())  # to the entry node
    finish: str | None = field(11, word("stop", "length"), default=None)
    logprobs: tuple[Logprobs, ...] = field(13, listing(nested(Logprobs), 256), default=())  # to the entry node
    segment: int = field(15, SEGMENT, default=0)


@message(13)
class Credit:
    """How many tokens of this epoch, in all, the entry node will take. To the tail."""

    lease: bytes = field(2, LEASE_ID)
    session: SessionId = field(4, SESSION)
    epoch: int = field(6, EPOCH)
    total: int = field(8, POSITION)


@message(14)
class Renew:
    """Extends every lease of an epoch by its time to live; passed on from hop to hop."""

    lease: bytes = field(2, LEASE_ID)
    session: SessionId = field(4, SESSION)
    epoch: int = field(6, EPOCH)


@message(15)
class Failure:
    """A hop cannot go on. Goes back along the route to the entry node."""

    session: SessionId = field(2, SESSION)
    epoch: int = field(4, EPOCH)
    node: PeerId = field(6, PEER)  # who failed, as far as the sender can tell
    code: str = field(8, CODE)
    say: str = field(10, SAY)
    lease: bytes | None = field(12, LEASE_ID, default=None)  # the receiver's; to the entry node none


@message(16)
class Close:
    """Ends an epoch: each hop stops, frees what it holds and passes it on; receipts come back with the answer."""

    lease: bytes = field(2, LEASE_ID)
    session: SessionId = field(4, SESSION)
    epoch: int = field(6, EPOCH)
    reason: str = field(8, word("done", "cancelled", "failed"))


@message(17)
class Closed:
    receipts: tuple[Signed, ...] = field(2, listing(SIGNED, MAX_RECEIPTS))  # a hop's own, its segments in order, first


REQUESTS = (OfferQuery, Tokenize, RouteOpen, Close)
ON_LINKS = (Pushes, Tokens, Credit, Renew, Failure)

LinkMessage: TypeAlias = Pushes | Tokens | Credit | Renew | Failure


def code_here(code: str) -> str:
    """A peer's error code, as far as this version knows it."""
    return code if code in CODES else "hop_failed"
