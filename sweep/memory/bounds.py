"""What the launches of a study teach about memory: flags that cannot run on this device, and why. Pure.

Only directions that hold are used. More memory for the server (gpu-memory-utilization) cures a KV cache that is too
small and causes other shortages, so no bound on it holds for all kinds; larger batches, more sequences and longer
requests never need less. Everything is kept in bytes, as the server saw it, and compared with what the next launch
would ask for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from sweep.failure import FailureKind
from sweep.memory.card import ModelCard
from sweep.memory.launches import KV_BYTES, UTILIZATION, Launch, Point, launch_of, point_of, seen_total, total_of
from sweep.memory.pool import pool_of
from sweep.memory.shortage import Shortage
from sweep.model import DeviceMemory, Flags, Outcome

GIB = 2**30
# Whatever the utilization is, these come before or beside the KV cache.
BEFORE_CACHE: frozenset[FailureKind] = frozenset({"oom_weights", "oom_activation_profile"})
# These come after it was set aside: the more of it, the less is left for them.
_FREE: FailureKind = "oom_free_memory_lt_requested"
_NONE: FailureKind = "oom_kv_cache_none"
_SMALL: FailureKind = "oom_kv_cache_too_small"
AFTER_CACHE: frozenset[FailureKind] = frozenset({"oom_sampler_warmup", "oom_cudagraph_capture", "oom_runtime"})
_WORDS: dict[FailureKind, str] = {
    "oom_weights": "the weights did not fit",
    "oom_activation_profile": "the largest batch did not fit",
    "oom_sampler_warmup": "the sampler's warm-up ran out of memory",
    "oom_cudagraph_capture": "capturing graphs ran out of memory",
    "oom_runtime": "memory ran out under load",
}
# Logs round to 0.01 GiB, two figures make a difference, and a launch is repeated to within half a per cent of what it
# keeps from the cache; a process of the CPU backend to within two (its pages come and go with the host's).
ROUNDING = 0.02 * GIB
_SPREAD = {"nvml": 0.005, "numa": 0.02}
# What is free on a host moves by some per cent of the whole while nothing of note happens; on a GPU it hardly moves.
_FREE_SPREAD = {"nvml": 0.001, "numa": 0.03}
# Blocks may be cut anew: a request then needs up to a block less than it was seen to need.
_LARGEST_BLOCK = 256


class Bounds:
    """What outcomes teach. To be built anew when there are more; that takes milliseconds."""

    def __init__(
        self, outcomes: Sequence[Outcome], fixed: Flags, defaults: Flags | None = None, card: ModelCard | None = None
    ) -> None:
        """Read the outcomes of one device.

        fixed: flags of every launch. defaults: the values that hold where a flag is absent.
        """
        self._fixed, self._defaults, self._card = fixed, defaults or {}, card
        self.total = total_of(outcomes)
        found = (launch_of(outcome, fixed, self._defaults, self.total) for outcome in outcomes)
        self.launches = [launch for launch in found if launch is not None]

    def excluded(self, flags: Flags, memory: DeviceMemory | None) -> Shortage | None:
        """Return why a launch with these flags is sure to fail, or None.

        memory: of the device, as the launch would find it; None: as the last one found it.
        """
        point = self.point(flags)
        return (
            self._more_than_free(point, memory)
            or self._short_again(point, memory)
            or self._no_room(point, flags, memory)
        )

    def point(self, flags: Flags) -> Point:
        return point_of({**self._fixed, **flags}, self._defaults)

    def requested(self, point: Point, memory: DeviceMemory | None) -> float | None:
        """Return what the server would take for itself; None where that is not known."""
        total = self.total if self.total is not None else seen_total(memory)
        return None if total is None or point.utilization is None else point.utilization * total

    def free(self, memory: DeviceMemory | None) -> tuple[float, float, Launch | None] | None:
        """Return how much a server would find free, by how much that may be too little, and the launch that told.

        None where it is not known.
        """
        told = [launch for launch in self.launches if launch.free is not None and launch.lasting]
        last = told[-1] if told else None
        if memory is None:
            if last is None or last.free is None:
                return None
            spread = _FREE_SPREAD[_source(last, memory)] * (last.total or last.free)
            return last.free, spread + ROUNDING / 2, last
        # Before it looks, a server takes a part for itself.
        gaps = [launch.memory.free_bytes - launch.free for launch in told if launch.memory and launch.free is not None]
        gap = min(gaps, default=0.0)
        for launch in self.launches:
            if launch.started and launch.memory and launch.requested is not None and launch.point.kv_bytes is None:
                gap = min(gap, launch.memory.free_bytes - launch.requested)
        spread = _FREE_SPREAD[memory.source] * memory.total_bytes
        return memory.free_bytes - gap, spread + ROUNDING / 2, last

    def _more_than_free(self, point: Point, memory: DeviceMemory | None) -> Shortage | None:
        wanted, free = self.requested(point, memory), self.free(memory)
        if free is not None and point.kv_bytes is not None and point.kv_bytes > free[0] + free[1]:
            return Shortage(_FREE, f"{KV_BYTES} asks for {gib(point.kv_bytes)} GiB, and {gib(free[0])} are free")
        if wanted is None or free is None or wanted <= free[0] + free[1]:
            return None
        if point.kv_bytes is not None and (memory is None or memory.source == "numa"):
            return None  # the CPU backend does not look at its utilization then
        known, _, teacher = free
        if self._ran_with(wanted, after=teacher, memory=memory):
            return None
        asked = f"{UTILIZATION} {point.utilization:g} asks for {gib(wanted)} GiB"
        if teacher is None or teacher.free is None or teacher.total is None:
            return Shortage(_FREE, f"{asked}, and {gib(known)} GiB are free")
        words = (
            f"trial {teacher.trial} with {UTILIZATION} {plain(teacher.point.utilization)} found only "
            f"{gib(teacher.free)} of {gib(teacher.total)} GiB free; this asks for {gib(wanted)}"
        )
        changed = memory is not None and abs(known - teacher.free) > 0.02 * teacher.total
        return Shortage(_FREE, f"{words}, and about {gib(known)} are free now" if changed else words)

    def _ran_with(self, wanted: float, after: Launch | None, memory: DeviceMemory | None) -> bool:
        """Tell whether a later launch was given as much, and what was free before it does not explain that."""
        return any(
            launch.started
            and launch.requested is not None
            and launch.requested >= wanted
            and launch.point.kv_bytes is None
            and (after is None or launch.trial > after.trial)
            and (memory is None or launch.memory is None)
            for launch in self.launches
        )

    def _short_again(self, point: Point, memory: DeviceMemory | None) -> Shortage | None:
        """Compare with launches that ran out of memory beside the KV cache."""
        for launch in self.launches:
            if launch.kind in _WORDS and self._repeats(point, launch) and not _roomier(launch, memory):
                assert launch.kind is not None
                if any(self._repeats(other.point, launch) for other in self.launches if _got_past(other, launch)):
                    continue
                share = "" if launch.kind in BEFORE_CACHE else f", {UTILIZATION} {plain(launch.point.utilization)}"
                words = f"trial {launch.trial} with {launch.point.sized()}{share} failed: {_WORDS[launch.kind]}"
                return Shortage(launch.kind, f"{words}; this needs no less")
        return None

    @staticmethod
    def _repeats(point: Point, launch: Launch) -> bool:
        """Tell whether flags need no less of what a launch ran out of, and find no more."""
        if launch.kind == "oom_weights":
            return point.others == launch.point.others  # loading comes before anything that has a size
        if not point.needs_no_less_than(launch.point):
            return False
        if launch.kind in BEFORE_CACHE:
            return True
        # A larger batch is given room while the cache is measured, and that room is free again afterwards: it can cure
        # a later shortage.
        return point.leaves_no_more_than(launch.point) and point.tokens == launch.point.tokens

    def _no_room(self, point: Point, flags: Flags, memory: DeviceMemory | None) -> Shortage | None:
        need, needing = self.request(point, flags)
        if point.kv_bytes is not None:
            if need is None or point.kv_bytes + ROUNDING >= need:
                return None
            words = f"one request of {point.length} tokens needs {gib(need)} GiB of KV cache{needing}; this sets less"
            return Shortage(_SMALL, words)
        wanted, taken = self.requested(point, memory), self.taken(point)
        if wanted is None or taken is None or point.cache_is_set:
            return None
        outside, launch, what = taken
        left = wanted - outside + ROUNDING + _SPREAD[_source(launch, memory)] * outside
        if left > 0 and (need is None or left >= need):
            return None
        words = (
            f"{what} {gib(outside)} GiB beside the KV cache in trial {launch.trial} ({launch.point.sized()}); "
            f"of the {gib(wanted)} GiB that {UTILIZATION} {plain(point.utilization)} gives, "
        )
        if left <= 0 or need is None:
            return Shortage(_NONE, f"{words}nothing is left for the cache")
        short = f"{gib(max(0.0, wanted - outside))} are left, and one request of {point.length} tokens needs"
        return Shortage(_SMALL, f"{words}{short} {gib(need)}{needing}")

    def taken(self, point: Point) -> tuple[float, Launch, str] | None:
        """Return the least that a launch would keep from the KV cache, who showed it, and how that is said."""
        found = [(*shown, launch) for launch in self.launches for shown in self._shown(point, launch)]
        if not found:
            return None
        least, what, launch = max(found, key=lambda entry: entry[0])
        return least, launch, what

    def _shown(self, point: Point, launch: Launch) -> Iterator[tuple[float, str]]:
        if launch.weights is not None and launch.point.others == point.others:
            yield launch.weights, "the weights took"
        if launch.outside_least is None or not point.needs_no_less_than(launch.point):
            return
        yield self._corrected[launch.trial], "weights and batches took" if launch.exact else "there went at least"

    @cached_property
    def _corrected(self) -> dict[int, float]:
        """What each launch kept from the cache, and no more than any that needed no less has kept."""
        exact = [(launch.point, launch.outside_least) for launch in self.launches if launch.exact]
        return {
            launch.trial: min(
                [
                    launch.outside_least,
                    *(kept for p, kept in exact if kept is not None and p.needs_no_less_than(launch.point)),
                ]
            )
            for launch in self.launches
            if launch.outside_least is not None
        }

    def request(self, point: Point, flags: Flags) -> tuple[float | None, str]:
        """Return the least KV cache that one request of full length needs, and whose word that is; None: not known."""
        if point.length is None:
            return None, ""
        told = [
            (self._scaled(needed, length, launch.point, point), f" by trial {launch.trial}")
            for launch in self.launches
            if launch.point.others == point.others and not _fewer(point.tokens, launch.point.tokens)
            for length, needed in launch.requests
            if length <= point.length
        ]
        pool = pool_of(self._card, {**self._defaults, **self._fixed, **flags}) if self._card is not None else None
        if pool is not None:
            told.append((0.98 * pool.request_bytes(point.length, point.tokens or 0), ""))
        if not told:
            return None, ""
        need, words = max(told)
        # Whoever ran with less has shown that less will do.
        enough = [
            launch.available
            for launch in self.launches
            if launch.started and launch.available is not None and launch.point.needs_no_less_than(point)
        ]
        return min([need, *enough]), words

    @staticmethod
    def _scaled(needed: float, length: int, seen: Point, point: Point) -> float:
        return needed if seen.block == point.block else needed * max(0.0, 1 - _LARGEST_BLOCK / length)


def _source(launch: Launch, memory: DeviceMemory | None) -> str:
    known = memory or launch.memory
    return known.source if known is not None else "numa"


def _fewer(value: int | None, other: int | None) -> bool:
    return value != other if value is None or other is None else value < other


def _got_past(other: Launch, launch: Launch) -> bool:
    """Tell whether a launch came further than another one, which ran out of memory."""
    return other.kind is None if launch.kind == "oom_runtime" else other.started


def _roomier(launch: Launch, memory: DeviceMemory | None) -> bool:
    """Tell whether clearly more is free now than when a launch failed."""
    if memory is None or launch.memory is None:
        return not launch.lasting
    return memory.free_bytes > launch.memory.free_bytes + _FREE_SPREAD[memory.source] * memory.total_bytes


def gib(value: float) -> str:
    return f"{value / GIB:.1f}" if abs(value) >= GIB else f"{value / GIB:.2f}"


def plain(value: float | None) -> str:
    return "unknown" if value is None else f"{value:g}"
