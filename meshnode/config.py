"""Where a node keeps what is its own (its home), which mesh it is in, and what can be set.

Home.resolve(option) -> Home        --home, else MESHNODE_HOME, else the XDG data folder; nothing is touched
Home.lock()                         makes the folder; one node a home
Home.known_mesh(), .remember(...)   mesh.json: the mesh, its secret, addresses to find it again
NodeConfig                          what a node can be told; every constant with its reason
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import platformdirs

from .errors import MeshError
from .mesh import KnownMesh, from_json, to_json

HOP_TIMEOUT_S = 10.0  # far above any step that was seen, far below a person's patience
LEASE_TTL_S = 30.0  # three renewals may be lost on the way
LEASE_IDLE_S = 10.0  # a lease that sees no prefill lapses: its entry node went elsewhere
CREDIT = 16  # tokens decoded for an entry node that may be gone; more than two round trips' worth of any link
CHUNK = 256  # positions of a prompt chunk: enough to fill matrix products, few enough to overlap stages
MAX_SESSIONS = 4  # sessions a holding serves at once: each has KV of its own
CONTEXT = 2048  # positions a session; KV is reserved for all of them
LISTEN = ("/ip4/0.0.0.0/tcp/0",)  # any free port: nothing to configure, nothing to collide with
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
INVITE_S = 7 * 24 * 3600.0  # a week: long enough for a person to act on it
MAX_HOME = 480  # bytes of a home's path: SQLite takes 512, of which its longest file there needs 25
MAX_REMEMBERED = 64  # addresses kept to find the mesh again
LIMITS: dict[str, tuple[float, float]] = {  # the least and the most that each may be: what is surely no slip
    "lease_ttl_s": (1, 600),
    "hop_timeout_s": (0.1, 600),
    "credit": (1, 4096),
    "chunk": (1, 4096),
    "max_sessions": (1, 256),
    "threads": (0, 1024),
    "context": (1, 1 << 24),
}

NUMERICS = ("invariant", "fast")

# A lock of the open file, which ends with its holder and which can be asked about without being taken (flock cannot).
_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length (0: all), pid
_WHOLE_FILE = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


@dataclass(frozen=True)
class NodeConfig:
    """What a node can be told. Times in seconds, chunk and context in positions."""

    listen: tuple[str, ...] = LISTEN  # multiaddrs
    lease_ttl_s: float = LEASE_TTL_S
    hop_timeout_s: float = HOP_TIMEOUT_S
    credit: int = CREDIT
    chunk: int = CHUNK
    max_sessions: int = MAX_SESSIONS
    context: int | None = None  # None: CONTEXT, or the model's own when that is smaller
    threads: int = 0  # threads of each worker; 0: one a core this process may use
    numerics: str = "invariant"
    lan: bool = True  # look for members on the LANs of the listen addresses
    retry_crashed: bool = False  # load also what crashed a worker before
    audits: bool | None = None  # consent that others do this node's requests again; None: in a private mesh
    trusted: tuple[str, ...] = ()  # peers whose findings count here, and to whose helpers this node owes, as to its own
    receipts: bool = True  # write them

    def __post_init__(self) -> None:
        for name, (low, high) in LIMITS.items():
            if name == "context" and self.context is None:
                continue
            if not low <= getattr(self, name) <= high:
                raise MeshError("bad_config", f"{name} is {getattr(self, name)}; it may be {low} to {high}")
        if self.numerics not in NUMERICS:
            raise MeshError("bad_config", f"numerics is {self.numerics!r}; it may be {' or '.join(NUMERICS)}")

    @property
    def worker_threads(self) -> int:
        return self.threads or cores()

    def context_of(self, trained: int) -> int:
        """Positions a session of a model trained on `trained` of them."""
        return min(self.context or CONTEXT, trained)


@dataclass(frozen=True)
class Home:
    """A node's folder. Everything in it is for its owner alone."""

    path: Path

    @classmethod
    def resolve(cls, option: str | os.PathLike[str] | None = None, environ: Mapping[str, str] = os.environ) -> Home:
        """`option`, else MESHNODE_HOME, else the XDG data folder. Nothing is made or opened.

        MeshError usage when `option` is empty, bad_home when the path is too long.
        """
        named = given(option) or environ.get("MESHNODE_HOME") or platformdirs.user_data_path("meshnode")
        return cls(Path(named).expanduser().absolute()).fitting()

    def fitting(self) -> Home:
        """Itself; MeshError bad_home when its path is too long for what is to lie in it."""
        if (size := len(os.fsencode(self.path))) > MAX_HOME:
            message = f"a home's path has at most {MAX_HOME} bytes, this one {size}: {str(self.path)[:40]}..."
            raise MeshError("bad_home", message, hint="give a shorter --home")
        return self

    @property
    def key_path(self) -> Path:
        return self.path / "node.key"

    @property
    def mesh_path(self) -> Path:
        return self.path / "mesh.json"

    @property
    def catalogue_path(self) -> Path:
        return self.path / "catalogue.sqlite"

    @property
    def ledger_path(self) -> Path:
        return self.path / "ledger.sqlite"

    @property
    def quarantine_path(self) -> Path:
        return self.path / "quarantine.json"

    @property
    def denied_path(self) -> Path:
        return self.path / "denied.json"

    @property
    def log_path(self) -> Path:
        return self.path / "node.log"

    @property
    def lock_path(self) -> Path:
        return self.path / "node.lock"

    def create(self) -> Home:
        """Makes the folder, mode 700. MeshError bad_home when it cannot be, or is somebody else's."""
        self.fitting()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            status = self.path.stat()
        except (OSError, ValueError) as error:
            raise MeshError("bad_home", f"{self.path} cannot be made: {_reason(error)}") from error
        if not self.path.is_dir():
            raise MeshError("bad_home", f"{self.path} is no folder")
        if status.st_uid != os.geteuid():
            raise MeshError("bad_home", f"{self.path} belongs to another user")
        if not os.access(self.path, os.R_OK | os.W_OK | os.X_OK):
            raise MeshError("bad_home", f"{self.path} cannot be written")
        return self

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Makes the folder if need be and holds it for one node. MeshError home_in_use while another has it."""
        self.create()
        try:
            descriptor = os.open(self.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise MeshError("bad_home", f"{self.lock_path} cannot be opened: {_reason(error)}") from error
        try:
            try:
                fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _WHOLE_FILE)
            except OSError as error:
                holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
                by = f" (process {holder})" if holder.isdigit() else ""
                raise MeshError("home_in_use", f"another node{by} runs on {self.path}") from error
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(descriptor)

    def holder(self) -> int | None:
        """The process id of the node that runs on this home, None when none does."""
        try:
            descriptor = os.open(self.lock_path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _WHOLE_FILE)
            if _FLOCK.unpack(found)[0] == fcntl.F_UNLCK:
                return None
            holder = os.pread(descriptor, 20, 0).strip()
            return int(holder) if holder.isdigit() else 0
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def connect_path(self) -> Iterator[str]:
        """Where control.sock can be reached while this lasts, short however long the home's own path is.

        A Unix socket's address has 108 bytes. MeshError no_node when the home does not exist.
        """
        try:
            folder = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise MeshError("no_node", f"no node runs on {self.path}") from error
        try:
            yield f"/proc/self/fd/{folder}/control.sock"
        finally:
            os.close(folder)

    def bind_control(self) -> socket.socket:
        """A listening socket at control.sock, mode 600. Only for who holds the lock: an old one is replaced."""
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(bound.fileno(), 0o600)  # before it has a name, so that it is never more open than this
            with self.connect_path() as path:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                bound.bind(path)
            bound.listen(64)
            bound.setblocking(False)
        except OSError as error:
            bound.close()
            raise MeshError("bad_home", f"no control socket can be made in {self.path}: {_reason(error)}") from error
        except MeshError:
            bound.close()
            raise
        return bound

    def unbind_control(self) -> None:
        """Removes control.sock. Only for who holds the lock."""
        with contextlib.suppress(OSError, MeshError), self.connect_path() as path:
            os.unlink(path)

    def known_mesh(self) -> KnownMesh | None:
        """What mesh.json says; None when there is none. MeshError bad_home when it cannot be understood."""
        try:
            text = self.mesh_path.read_text()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise MeshError("bad_home", f"{self.mesh_path} cannot be read: {_reason(error)}") from error
        try:
            return from_json(json.loads(text), MAX_REMEMBERED)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, MeshError) as error:
            raise MeshError(
                "bad_home", f"{self.mesh_path} is damaged: {_reason(error)}", hint="remove it and join again"
            ) from error

    def remember(self, known: KnownMesh) -> None:
        """Writes mesh.json, mode 600, whole or not at all."""
        value = to_json(replace(known, bootstrap=known.bootstrap[:MAX_REMEMBERED], peers=known.peers[:MAX_REMEMBERED]))
        self.create()
        write_private(self.mesh_path, json.dumps(value, indent=1) + "\n")


def write_private(path: Path, content: str | bytes) -> None:
    """Puts `content` into a file of mode 600, whole or not at all. MeshError bad_home when it cannot be."""
    beside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(beside)
    except OSError as error:
        raise MeshError("bad_home", f"{path} cannot be written: {_reason(error)}") from error


def given(option: str | os.PathLike[str] | None) -> str | os.PathLike[str] | None:
    """A folder's option as it is. MeshError usage when it is empty: a variable of a script was, most likely."""
    if option is not None and not os.fspath(option).strip():
        raise MeshError("usage", "--home is empty", hint="name a folder, or leave --home out")
    return option


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where built workers and fetched models lie, outside of any checkout: MESHNODE_CACHE, else the XDG's."""
    return Path(environ.get("MESHNODE_CACHE") or platformdirs.user_cache_path("meshnode")).expanduser().absolute()


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__
