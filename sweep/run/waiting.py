"""Memory that somebody else holds: waiting until it is free again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from sweep.failure import FailureKind
from sweep.model import Outcome

_KINDS: frozenset[FailureKind] = frozenset({"oom_free_memory_lt_requested", "gpu_busy_other_process"})
# Of the most that was ever free: drivers and other programs keep a little.
_NEARLY_ALL = 0.98


def needed_bytes(earlier: Sequence[Outcome], outcomes: Sequence[Outcome]) -> float | None:
    """Return how much has to be free before a trial is tried again; None where its last try says nothing of memory.

    earlier: its tries so far. That is what the server asked for, or nearly all that was free before any trial.
    """
    failure = earlier[-1].measured.failure if earlier else None
    if failure is None or failure.kind not in _KINDS:
        return None
    if requested := (failure.bounds or {}).get("requested_bytes"):
        return requested
    free = [outcome.measured.memory.free_bytes for outcome in outcomes if outcome.measured.memory]
    return _NEARLY_ALL * max(free) if free else None


@dataclass(frozen=True, slots=True)
class Patience:
    """How long memory is waited for. short_s: a server that is gone gives its memory back within seconds; what lasts
    longer is somebody's work. long_s: when nothing can run without it. poll_s: between two looks.
    """

    short_s: float = 60.0
    long_s: float = 600.0
    poll_s: float = 2.0


async def wait_for_room(
    there: Callable[[], bool], say: Callable[[str], None], *, patience_s: float, poll_s: float
) -> bool:
    """Wait until there is room, and return whether there is; after `patience_s` there is none."""
    end = monotonic() + patience_s
    while not there():
        if monotonic() > end:
            return False
        say("waiting for memory that something else holds")
        await asyncio.sleep(poll_s)
    return True
