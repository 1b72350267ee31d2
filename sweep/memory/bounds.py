"""What the launches of a study teach about memory: flags that cannot run on this device, and why. Pure.

Only directions that hold are used. More memory for the server (gpu-memory-utilization) cures a KV cache that is too
small and causes other shortages, so no bound on it holds for all kinds; larger batches, more sequences and longer
requests never need less. Everything is kept in bytes, as the server saw it, and compared with what the next launch
would ask for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from statistics import median_low

from sweep.failure import FailureKind
from sweep.memory.card import ModelCard
from sweep.memory.launches import (
    KV_BYTES,
    UTILIZATION,
    Launch,
    Point,
    launch_of,
    on_device,
    point_of,
    seen_total,
    total_of,
)
from sweep.memory.plain_flags import unusual_flags
from sweep.memory.pool import Pool, pool_of
from sweep.memory.shortage import Shortage
from sweep.memory.witnesses import FREE_SPREAD, confirmed, kept, taken_by_others, unexplained
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
# What a server takes before it looks is seldom more; and how it was in the last launches is how it is.
_LARGEST_GAP, _GAP_SPREAD, _RECENT = 0.05, 0.02, 5
# Blocks may be cut anew: a request then needs up to a block less than it was seen to need.
_LARGEST_BLOCK = 256


class Bounds:
    """What outcomes teach. To be built anew when there are more; for 40 that takes milliseconds."""

    def __init__(
        self, outcomes: Sequence[Outcome], fixed: Flags, defaults: Flags | None = None, card: ModelCard | None = None
    ) -> None:
        """Read the outcomes of one device.

        fixed: flags of every launch. defaults: the values that hold where a flag is absent.
        """
        self._outcomes, self._fixed, self._defaults, self._card = outcomes, fixed, defaults or {}, card
        self._elsewhere: dict[int, Bounds] = {}
        self.total = total_of(outcomes)
        found = (launch_of(outcome, fixed, self._defaults, self.total) for outcome in outcomes)
        self.launches = [launch for launch in found if launch is not None]

    def excluded(self, flags: Flags, memory: DeviceMemory | None) -> Shortage | None:
        """Return why a launch with these flags is sure to fail, or None.

        memory: of the device, as the launch would find it; None: as the last one found it.
        """
        if seen_total(memory) is None:
            memory = None
        here = self.on(memory)
        return here._excluded(flags, memory)  # noqa: SLF001 - the same class

    def on(self, memory: DeviceMemory | None) -> Bounds:
        """Return what the launches on a device of this size teach: a study may go on on another one."""
        if memory is None or all(on_device(outcome, memory) for outcome in self._outcomes):
            return self
        size = memory.total_bytes
        if size not in self._elsewhere:
            outcomes = [outcome for outcome in self._outcomes if on_device(outcome, memory)]
            self._elsewhere[size] = Bounds(outcomes, self._fixed, self._defaults, self._card)
        return self._elsewhere[size]

    def _excluded(self, flags: Flags, memory: DeviceMemory | None) -> Shortage | None:
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
            spread = FREE_SPREAD[_source(last, memory)] * (last.total or last.free)
            return last.free, spread + ROUNDING / 2, last
        spread = FREE_SPREAD[memory.source] * memory.total_bytes
        return memory.free_bytes - self._gap(memory), spread + ROUNDING / 2, last

    def spare(self, launch: Launch) -> float | None:
        """Return what a launch found beside its share, as far as launches know what was free."""
        if launch.requested is None or launch.point.cache_is_set:
            return None
        if launch.free is not None:
            return launch.free - launch.requested
        free = self.free(launch.memory)
        return None if free is None else free[0] - launch.requested

    @cached_property
    def doubtful(self) -> frozenset[Launch]:
        """Launches that ran out of memory, but perhaps of what somebody else had taken meanwhile."""
        spare = {launch: had for launch in self.launches if (had := self.spare(launch)) is not None}
        late = [launch for launch in self.launches if launch.kind in AFTER_CACHE]
        odd = [launch for launch in late if unexplained(launch, self.launches, spare)]
        return frozenset({*odd, *taken_by_others(self.launches, ROUNDING)})

    def _gap(self, memory: DeviceMemory) -> float:
        """Return what a server takes for itself before it looks how much is free.

        The usual of the last launches, since somebody else may have come or gone between the two looks.
        """
        gaps: list[float] = []
        for launch in self.launches:
            gap = _gap_before(launch)
            # Of a launch that does not say what it found it is known only that there was enough.
            if gap is not None and (launch.free is not None or gap < median_low(gaps[-_RECENT:] or [0.0])):
                gaps.append(gap)
        if not gaps:
            return 0.0
        usual = median_low(gaps[-_RECENT:])
        return min(gap for gap in gaps[-_RECENT:] if gap >= usual - _GAP_SPREAD * memory.total_bytes)

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
        told = [launch for launch in self.launches if launch.kind in _WORDS and self._teaches(launch, memory)]
        for launch in told:
            if not self._repeats(point, launch):
                continue
            assert launch.kind is not None
            again = any(x.kind == launch.kind and x is not launch and self._repeats(point, x) for x in told)
            same = point.sizes == launch.point.sizes and point.utilization == launch.point.utilization
            if launch.kind in BEFORE_CACHE and not same and not again:
                continue  # one launch may have met with somebody else's growth: for other flags it takes two
            share = "" if launch.kind in BEFORE_CACHE else f", {UTILIZATION} {plain(launch.point.utilization)}"
            words = f"trial {launch.trial} with {launch.point.sized()}{share} failed: {_WORDS[launch.kind]}"
            return Shortage(launch.kind, f"{words}; this needs no less")
        return None

    def _teaches(self, launch: Launch, memory: DeviceMemory | None) -> bool:
        """Tell whether what a launch ran out of is not there now either, and nothing speaks against its word."""
        if launch in self.doubtful or self._roomier(launch, memory):
            return False
        return not any(self._repeats(other.point, launch) for other in self.launches if _got_past(other, launch))

    def _roomier(self, launch: Launch, memory: DeviceMemory | None) -> bool:
        """Tell whether clearly more is free now than when a launch failed, by our look or by its own."""
        if memory is None or launch.memory is None:
            return not launch.lasting
        found = launch.memory.free_bytes
        if launch.free is not None:
            found = min(found, int(launch.free + self._gap(memory)))
        return memory.free_bytes > found + FREE_SPREAD[memory.source] * memory.total_bytes + ROUNDING / 2

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
        if launch not in self._kept or not point.needs_no_less_than(launch.point):
            return
        if confirmed(launch, self.launches, ROUNDING):
            yield self._kept[launch], "weights and batches took" if launch.exact else "there went at least"

    @cached_property
    def _kept(self) -> dict[Launch, float]:
        return kept(self.launches, ROUNDING)

    def request(self, point: Point, flags: Flags) -> tuple[float | None, str]:
        """Return the least KV cache that one request of full length needs, and whose word that is; None: not known."""
        if point.length is None:
            return None, ""
        told = [
            (self._scaled(needed, length, launch.point, point), f" by trial {launch.trial}")
            for launch in self.launches
            if launch.point.others == point.others and not _fewer(point.tokens, launch.point.tokens)
            if self._only_caches or launch.point.prefixes == point.prefixes
            for length, needed in launch.requests
            if length <= point.length
        ]
        if (pool := self._pool({**self._defaults, **self._fixed, **flags})) is not None:
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

    @property
    def _only_caches(self) -> bool:
        """Whether all layers are known to keep caches of tokens; keeping prefixes then takes no room of its own."""
        return self._card is not None and self._card.architecture.layers is not None

    def _pool(self, flags: Flags) -> Pool | None:
        if self._card is None or unusual_flags(flags, self._card.quantization):
            return None
        return pool_of(self._card, flags)

    @staticmethod
    def _scaled(needed: float, length: int, seen: Point, point: Point) -> float:
        return needed if seen.block == point.block else needed * max(0.0, 1 - _LARGEST_BLOCK / length)


def _source(launch: Launch, memory: DeviceMemory | None) -> str:
    known = memory or launch.memory
    return known.source if known is not None else "numa"


def _fewer(value: int | None, other: int | None) -> bool:
    return value != other if value is None or other is None else value < other


def _gap_before(launch: Launch) -> float | None:
    """Return how much less was free when a server looked than before its launch, or how much less at most."""
    if launch.memory is None:
        return None
    before = launch.memory.free_bytes
    if launch.free is not None:
        gap = before - launch.free
        usual = gap <= max(_LARGEST_GAP * launch.memory.total_bytes, 2 * GIB)
        return gap if launch.lasting and usual else None
    if not launch.started or launch.requested is None or launch.point.cache_is_set:
        return None
    return before - launch.requested


def _got_past(other: Launch, launch: Launch) -> bool:
    """Tell whether a launch came further than another one, which ran out of memory."""
    return other.kind is None if launch.kind == "oom_runtime" else other.started


def gib(value: float) -> str:
    return f"{value / GIB:.1f}" if abs(value) >= GIB else f"{value / GIB:.2f}"


def plain(value: float | None) -> str:
    return "unknown" if value is None else f"{value:g}"
