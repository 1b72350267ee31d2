"""How far a launch's word can be trusted: another process may have grown while it loaded or profiled. Pure.

vLLM takes whatever a GPU lost meanwhile for its own need. No figure of one launch shows that; other launches do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from sweep.memory.launches import Launch, Point

# What is free moves by so much of the whole from launch to launch while nobody else is there.
FREE_SPREAD = {"nvml": 0.001, "numa": 0.03}


def kept(launches: Sequence[Launch], rounding: float) -> dict[Launch, float]:
    """Return what each launch kept from the KV cache, in bytes, and no more than the others make possible.

    A launch whose batches and sequences are at most r times another's keeps at most its weights and r times what that
    one kept beside them. What is missing at the next look was another's, if anybody's.
    """
    least: dict[tuple[object, ...], Launch] = {}  # of launches with the same sizes one is enough
    for launch in sorted((x for x in launches if x.exact), key=lambda x: x.outside_least or 0.0):
        least.setdefault((launch.point.others, launch.point.tokens, launch.point.seqs), launch)
    gone = taken_by_others(launches, rounding)
    found = {}
    for launch in launches:
        if launch.outside_least is None:
            continue
        limits = [_limit(launch.point, other) for other in least.values() if other.point.others == launch.point.others]
        own = launch.outside_least - gone.get(launch, 0.0)
        found[launch] = min([own, *(limit for limit in limits if limit is not None)])
    return found


def confirmed(launch: Launch, launches: Sequence[Launch], rounding: float) -> bool:
    """Tell whether the figure of a launch was held against another's, or needs not to be.

    Against one with the same other flags, or, of any, one that kept as much beside its weights for batches like these.
    The CPU backend counts its own pages, so nobody else's come in.
    """
    if launch.memory is not None and launch.memory.source == "numa":
        return True
    others = [other for other in launches if other is not launch and other.exact]
    if any(other.point.others == launch.point.others for other in others):
        return True
    had = _beside_weights(launch)
    return had is not None and any(
        (times := _times(launch.point, other.point)) is not None
        and (theirs := _beside_weights(other)) is not None
        and had <= times * theirs + rounding
        for other in others
    )


def _beside_weights(launch: Launch) -> float | None:
    if launch.outside_least is None or launch.weights is None:
        return None
    return launch.outside_least - launch.weights


def taken_by_others(launches: Sequence[Launch], rounding: float) -> dict[Launch, float]:
    """Return what was free before a launch and no longer before the next, in bytes: others have it."""
    gone = {}
    looked = [(launch, launch.memory) for launch in launches if launch.memory is not None]
    for (launch, before), (_, after) in pairwise(looked):
        missing = before.free_bytes - after.free_bytes
        if missing > FREE_SPREAD[before.source] * before.total_bytes + rounding:
            gone[launch] = float(missing)
    return gone


def unexplained(short: Launch, launches: Sequence[Launch], spare: Mapping[Launch, float]) -> bool:
    """Tell whether a launch ran short of memory beside the KV cache though it had more of it than others needed.

    spare: what launches had beside their share. Another ran with its batch or a smaller one and with 1/r of its
    sequences, in 1/r of that; and no launch with as much and no more sequences ran short as well.
    """
    here = spare.get(short)
    if here is None:
        return False
    alike = [other for other in launches if other is not short and other.point.others == short.point.others]
    again = any(
        other.kind == short.kind and spare.get(other, 0.0) >= here and _times(other.point, short.point) == 1.0
        for other in alike
    )
    return not again and any(
        other.kind is None
        and (times := _times(short.point, other.point)) is not None
        and (had := spare.get(other)) is not None
        and had > 0
        and here > times * had
        and (other.point.tokens or 0) <= (short.point.tokens or 0)
        for other in alike
    )


def _limit(point: Point, other: Launch) -> float | None:
    times = _times(point, other.point)
    if times is None or other.outside_least is None:
        return None
    weights = min(max(other.weights or 0.0, 0.0), max(other.outside_least, 0.0))
    return weights + times * (other.outside_least - weights)


def _times(point: Point, other: Point) -> float | None:
    """Return how many times larger batches or sequences are, at least 1; None where that is not known."""
    times = 1.0
    for ours, theirs in ((point.tokens, other.tokens), (point.seqs, other.seqs)):
        if (ours is None) != (theirs is None):
            return None
        if ours is not None and theirs is not None:
            times = max(times, ours / theirs)
    return times
