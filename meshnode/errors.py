"""The one kind of error that people and peers see: a stable code, what is at fault, and the next step.

docs/errors.md is generated from CODES by `python -m meshnode.errors`; `--check` tells whether it is current.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

# code: (exit status of a command that ends with it, what it means, the next step when none closer is known)
CODES: dict[str, tuple[int, str, str]] = {
    # what a person asked for
    "usage": (2, "the command line cannot be read", "see `meshnode COMMAND --help`"),
    "bad_prompt": (2, "the prompt is empty or cannot be tokenized", "give a prompt of at least one token"),
    "unknown_model": (4, "no artifact of that name or identity is known here", "see `meshnode models`"),
    "ambiguous_model": (4, "the name stands for several artifacts", "give the identity, or more of it"),
    "context_exceeded": (5, "the prompt and the answer do not fit the context", "shorten the prompt, or ask for less"),
    "no_chat_template": (5, "the model has no chat template", "ask with a raw prompt"),
    "template_failed": (5, "the model's chat template failed, or took too much", "ask with a raw prompt"),
    "bad_bias": (2, "a token of a logit bias is not in the model's vocabulary", "name ids that the model has"),
    "bad_grammar": (2, "the grammar cannot be used, or no text goes on from here in it", "mend the grammar"),
    # files and layers
    "not_found": (3, "there is no such file", "check the path"),
    "not_a_file": (3, "it is not a regular file", "name a GGUF file"),
    "unreadable": (3, "the file cannot be read", "check its permissions and the disk"),
    "bad_gguf": (3, "the file is no sound GGUF model", "fetch the file again and compare its SHA-256"),
    "bad_shards": (3, "the set of shards is not whole", "put every shard of one set into one folder"),
    "identity_changed": (3, "the bytes are not those that were identified", "restore the file, or serve it anew"),
    "not_available": (3, "it can be named, but is not built yet", "see its documentation for what is"),
    "unsupported_architecture": (3, "the engine is not proven for this architecture", "serve another model"),
    "unproven_numerics": (3, "such numerics are not proven for these weights", "serve them with the other --numerics"),
    "bad_model": (3, "the engine could not load the model", "run `meshnode identify` on the file"),
    "quarantined": (3, "the file crashed a worker of this build", "serve with --retry-crashed to try it again"),
    "bad_layers": (2, "the layers are not a range of the model", "give A-B with 0 <= A < B <= number of layers"),
    "out_of_memory": (6, "memory does not suffice", "hold fewer layers, sessions or a shorter context"),
    "cancelled": (130, "it was cancelled", "ask again"),
    # this machine
    "home_in_use": (6, "another node runs on this home", "stop it with `meshnode stop`, or give another --home"),
    "unhealthy": (1, "`meshnode doctor` found a fault", "run the commands that it names"),
    "bad_home": (6, "the home folder cannot be used", "check its permissions, or give another --home"),
    "unknown_receipt": (4, "no receipt of that name is in the ledger", "see `meshnode receipts`"),
    "bad_export": (3, "the file holds no exported receipts", "name a file that `meshnode receipts export` wrote"),
    "unverified": (3, "not every chain in the file is verified", "see which, and why, above"),
    "bad_ledger": (6, "the ledger cannot be read or written", "make room on the disk, or move ledger.sqlite away"),
    "bad_key": (6, "the file holds no exported key", "name a file that `meshnode key export` wrote"),
    "bad_config": (6, "a setting cannot be used", "correct it"),
    "port_in_use": (6, "the port is taken", "give another --listen, or port 0"),
    "bad_output": (6, "the output cannot be written", "send it to a file with room, or to /dev/null"),
    "no_node": (6, "no node runs on this home", "start one with `meshnode serve`, or give --join to `run`"),
    "missing_tool": (6, "a program that the build needs is missing", "install it"),
    "unsupported_cpu": (6, "the CPU lacks what the worker needs", "build it in a checkout: `make worker`"),
    "build_failed": (6, "the worker could not be built", "see the end of the build's output"),
    "worker_died": (7, "the worker process ended", "ask again; see the node's log if it repeats"),
    "worker_hung": (7, "the worker process did not answer in time", "ask again; see the node's log if it repeats"),
    "internal": (70, "a fault of meshnode itself", "report it with the node's log"),
    # the mesh
    "bad_invite": (8, "the invite cannot be read", "ask a member for a new one"),
    "invite_expired": (8, "the invite has expired", "ask a member for a new one"),
    "not_member": (8, "the peer is no member of this mesh", "join with an invite of this mesh"),
    "denied": (8, "this node denies the peer", "take it off the list: `meshnode peers allow PEER`"),
    "version_mismatch": (8, "the peer speaks no version that we speak", "upgrade the older of the two"),
    "unreachable": (9, "the peer cannot be reached", "check that it runs and that its address is reachable"),
    "no_route": (9, "no route covers every layer of the model", "see `meshnode route MODEL`"),
    "deadline": (9, "it took longer than its time limit", "ask again, or with a longer limit"),
    "busy": (9, "no session is free", "ask again later"),
    # between nodes
    "bad_frame": (10, "bytes that are no valid frame or message", "the sender is faulty or speaks another version"),
    "bad_signature": (10, "a signature does not hold", "the sender is faulty or hostile"),
    "bad_lease": (10, "a lease does not fit its route", "the hop is faulty or hostile; ask again"),
    "bad_receipt": (10, "a receipt does not fit its route", "the hop is faulty or hostile"),
    "contract_mismatch": (10, "the hops do not agree on how to compute", "see `meshnode route MODEL`"),
    "stale_epoch": (10, "the epoch of the session has passed", "open the route anew"),
    "bad_step": (10, "a step that is repeated, reordered or out of place", "the sender is faulty or hostile"),
    "unknown_session": (10, "the session is not known here, or its lease has ended", "open the route anew"),
    "cache_miss": (10, "the positions expected in the cache are not there", "push the session again from its start"),
    "bad_activation": (10, "activations that are not finite, or absurd", "the sender is faulty or hostile"),
    "hop_failed": (9, "a hop of the route failed", "ask again; the mesh will choose another route"),
}


class MeshError(Exception):
    """A fault with a stable code.

    code: a key of CODES; message: names what is at fault, without a path when it may reach a peer;
    hint: the next step, the code's own when not given.
    """

    def __init__(self, code: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        if code not in CODES:  # a peer's newer code: keep what it said under the code we have for it
            message, code = f"{code}: {message}", "internal"
        self.code = code
        self.message = message
        self.hint = CODES[code][2] if hint is None else hint

    def __reduce__(self) -> tuple[Any, ...]:  # from one process to another
        return partial(MeshError, hint=self.hint), (self.code, self.message)

    @property
    def exit_status(self) -> int:
        return CODES[self.code][0]

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


def root_cause(error: BaseException) -> BaseException:
    """The first leaf of nested exception groups: what a person has to hear about."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def render_table() -> str:
    rows = "\n".join(f"| `{code}` | {status} | {what} | {step} |" for code, (status, what, step) in CODES.items())
    return (
        "# Errors\n\nGenerated from `meshnode/errors.py` by `python -m meshnode.errors`.\n\n"
        f"| code | exit | what it means | next step |\n|---|---|---|---|\n{rows}\n"
    )


def _main(arguments: list[str]) -> int:
    page = Path(__file__).parent.parent / "docs" / "errors.md"
    if "--check" in arguments:
        return 0 if page.read_text() == render_table() else 1
    page.write_text(render_table())
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
