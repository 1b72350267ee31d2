"""Memory that somebody else holds: waiting until it is free again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic

from sweep.failure import FailureKind
from sweep.model import DeviceMemory, Outcome

_KINDS: frozenset[FailureKind] = frozenset({"oom_free_memory_lt_requested", "gpu_busy_other_process"})
# A server that is gone gives its memory back within seconds; what lasts longer than this is somebody's work.
_PATIENCE_S = 60.0
_POLL_S = 2.0
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


async def wait_for_memory(
    see: Callable[[], DeviceMemory | None],
    needed: float,
    say: Callable[[str], None],
    *,
    patience_s: float = _PATIENCE_S,
    poll_s: float = _POLL_S,
) -> None:
    """Wait until this much memory is free. Where it does not become so, the server itself will say what is amiss."""
    end = monotonic() + patience_s
    while (memory := see()) is not None and memory.free_bytes < needed and monotonic() < end:
        say(f"waiting for memory: {memory.free_bytes / 2**30:.1f} of {needed / 2**30:.1f} GiB are free")
        await asyncio.sleep(poll_s)
