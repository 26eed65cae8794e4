"""What an entry node does when a hop of a running answer fails: a repaired route, a new one, or a clear end."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import trio

from ..config import NodeConfig
from ..errors import MeshError
from ..ids import PeerId
from ..route import repair
from .opening import NoRoute, Opener, Route, Wanted

log = logging.getLogger(__name__)

OPEN_AGAIN_S = 10.0  # for one try, beside a hop time-out in which survivors end the step that they are in
RETRY_S = 0.2  # between two tries, while a worker is started again
WORKER_FAULTS = ("worker_died", "worker_hung")  # the node is well, and has a new worker soon
IN_VAIN = 4  # repairs without a new token between them before the answer is given up


class HopFailed(MeshError):
    """A hop of the route has failed. node: which, if that is known; why: its code."""

    def __init__(self, code: str, message: str, node: PeerId | None, why: str) -> None:
        super().__init__(code, message)
        self.node = node
        self.why = why


@dataclass(frozen=True)
class Mended:
    """restarted: nobody could take the place, so that another route computes everything again, by its own recipe."""

    route: Route
    restarted: bool


class Mender:
    def __init__(self, opener: Opener, config: NodeConfig) -> None:
        self._opener = opener
        self._config = config

    async def mend(
        self, wanted: Wanted, route: Route, epoch: int, fault: HopFailed, ids: tuple[int, ...], generated: int
    ) -> Mended:
        """The next epoch, after `epoch`. ids: of the session so far; generated: how many of them were sampled.

        MeshError, the fault with why there is no other route.
        """
        excluded = [fault.node] if fault.node is not None and fault.why not in WORKER_FAULTS else []
        kept = repair.kept_of(route.leases)
        # a node that is gone is replaced or not; a worker that is gone comes back, mostly
        comes_back = fault.why in WORKER_FAULTS
        ends = trio.current_time() + (self._config.hop_timeout_s if comes_back else 0.0)
        last = False
        while not last:
            last = trio.current_time() >= ends
            # after a silence nobody knows whom to blame: who does not answer is passed over on the way
            for plan in (kept, ()) if last else (kept,):
                try:
                    found = await self._opener.open(
                        wanted,
                        self._opener.heads(wanted, plan, excluded),
                        epoch + 1,
                        ids,
                        generated,
                        OPEN_AGAIN_S + self._config.hop_timeout_s,
                        kept=plan,
                        excluded=excluded,
                    )
                    return Mended(found, not plan)
                except NoRoute as none:
                    log.info("epoch %d of a session cannot be opened: %s", epoch + 1, none)
                    epoch, why = max(epoch + 1, none.epoch), none.message
            if not last:
                await trio.sleep(RETRY_S)
        raise MeshError(fault.code, f"{fault.message}; {why}", hint=fault.hint)
