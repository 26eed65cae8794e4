"""What a node and its worker say to each other: frozen messages. Their bytes are in worker.py beside this."""

from __future__ import annotations

from dataclasses import dataclass

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class ModelFile:
    """path of the node's open descriptor, and the file's stamp (as artifact.files.FileStamp)."""

    path: str
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


@dataclass(frozen=True, slots=True)
class Load:
    """The model's file, or all files of its set in order; what to hold and how.

    layers: half-open; (0, -1) is every layer. n_ctx: positions a session; max_step: positions a step.
    """

    files: tuple[ModelFile, ...]
    layers: tuple[int, int]
    n_sessions: int
    n_ctx: int
    max_step: int
    n_threads: int
    numerics: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tail chooses tokens. Every default is neutral: greedy, nothing filtered, nothing penalised.

    temperature 0: the highest logit, the lowest id among equals. top_k 0: off. repeat_last_n: the window of all three
    penalties, in tokens (0 none, 2^32 - 1 the whole history). logit_bias: (id, what is added to its logit), ids
    ascending. logprobs: how many of the likeliest tokens are told beside the chosen one, None to tell none. grammar:
    GBNF that the generated text follows; empty for none. In the order: biases, penalties, grammar, top_k, typical_p,
    top_p, min_p, temperature.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    typical_p: float = 1.0
    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str = ""


@dataclass(frozen=True, slots=True)
class Open:
    """A session under a handle that the node chose; prompt: the ids of its history, which a tail needs.

    start: position of the first generated token, from which on a grammar holds.
    """

    handle: int
    sampling: Sampling = Sampling()
    start: int = 0
    prompt: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Fork:
    """A session `handle` that begins as the first `keep` positions of `origin`; prompt: ids from there on."""

    handle: int
    origin: int
    keep: int
    sampling: Sampling = Sampling()
    start: int = 0
    prompt: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """n consecutive positions through layers, the effective range: tokens at 0, else residual [n, n_embd] f32 LE."""

    handle: int
    first_pos: int
    layers: tuple[int, int]
    sample: bool = False
    tokens: tuple[int, ...] | None = None
    residual: Buffer | None = None


@dataclass(frozen=True, slots=True)
class Truncate:
    handle: int
    keep: int


@dataclass(frozen=True, slots=True)
class Close:
    handle: int


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Either text with its flags, or the segments of a rendered chat: (the template's own, text) pairs."""

    text: str | None = None
    add_special: bool = False
    parse_special: bool = False
    segments: tuple[tuple[bool, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Pieces:
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DescribeChat:
    pass


@dataclass(frozen=True, slots=True)
class Hello:
    version: int
    engine: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the worker read back from the engine; the fields are those of native/stage.h. Sizes in bytes."""

    architecture: str
    layers: tuple[int, int]
    n_layer: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    n_sessions: int
    n_ctx: int
    max_step: int
    has_template: bool
    tensor_bytes: int
    kv_bytes: int
    recipe: str
    fingerprint: str
    certificate: str


@dataclass(frozen=True, slots=True)
class Opened:
    pass


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token after the last position pushed, its bytes (none for a control token), whether it ends the text.

    logprob: natural logarithm of its probability in the model's own distribution, and top: (id, logprob, bytes) of the
    likeliest, if they were asked for.
    """

    token: int
    piece: bytes
    is_end: bool
    logprob: float | None = None
    top: tuple[tuple[int, float, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Stepped:
    """residual: [n, n_embd] f32 LE, empty at the tail; sampled: at the tail, when it was asked for.

    compute_ns: this step's share, by positions, of the time its batch was computed in, and its own sampling.
    """

    compute_ns: int
    residual: bytes = b""
    sampled: Sampled | None = None


@dataclass(frozen=True, slots=True)
class Truncated:
    pass


@dataclass(frozen=True, slots=True)
class Closed:
    pass


@dataclass(frozen=True, slots=True)
class Tokens:
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PieceList:
    pieces: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class ChatFacts:
    """What rendering a chat takes: the model's template, and control tokens' texts as the vocabulary has them."""

    source: str
    bos: bytes = b""
    eos: bytes = b""
    controls: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Forked:
    pass


@dataclass(frozen=True, slots=True)
class Error:
    code: str
    message: str


Request = Load | Open | Step | Truncate | Close | Tokenize | Pieces | DescribeChat | Fork
Reply = Hello | Loaded | Opened | Stepped | Truncated | Closed | Tokens | PieceList | ChatFacts | Forked | Error
Message = Request | Reply
