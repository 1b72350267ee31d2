"""What the launches of a study make likely: flags that will not run by a calculation fitted to what was seen. Pure.

Not certain, as the bounds are: a prediction counts only where it misses by more than its own error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from sweep.failure import FailureKind
from sweep.memory.bounds import AFTER_CACHE, ROUNDING, Bounds, gib, plain
from sweep.memory.fit import Fit, fit
from sweep.memory.launches import SEQS, UTILIZATION, Point, seen_total
from sweep.memory.shortage import Shortage
from sweep.model import DeviceMemory, Flags


@dataclass(frozen=True)
class Likelihood:
    """Predictions beside the bounds of the same launches."""

    bounds: Bounds

    def excluded(self, flags: Flags, memory: DeviceMemory | None) -> Shortage | None:
        """Return why a launch with these flags will most probably fail, or None. memory: as for the bounds."""
        if seen_total(memory) is None:
            memory = None
        if (here := self.bounds.on(memory)) is not self.bounds:
            return Likelihood(here).excluded(flags, memory)
        point = self.bounds.point(flags)
        if point.cache_is_set:
            return None
        return self._no_room(point, flags, memory) or self._batch(point, memory) or self._beside(point, memory)

    def predicted(self, flags: Flags) -> tuple[float, float] | None:
        """Return what a launch will keep from the KV cache, in bytes, and the error of that; None: not known."""
        point = self.bounds.point(flags)
        found = self._fits.get(point.others)
        if found is None or point.tokens is None or point.seqs is None:
            return None
        return found(point.tokens, point.seqs), found.error(point.tokens, point.seqs)

    @cached_property
    def _fits(self) -> dict[frozenset[str], Fit]:
        groups = {launch.point.others for launch in self.bounds.launches}
        fits = {others: fit([x for x in self.bounds.launches if x.point.others == others]) for others in groups}
        return {others: found for others, found in fits.items() if found is not None}

    def _no_room(self, point: Point, flags: Flags, memory: DeviceMemory | None) -> Shortage | None:
        predicted, wanted = self.predicted(flags), self.bounds.requested(point, memory)
        if predicted is None or wanted is None:
            return None
        outside, error = predicted
        need = self.bounds.request(point, flags)[0] or 0.0
        if wanted - outside + error > need:
            return None
        trials = ", ".join(map(str, self._fits[point.others].trials[-6:]))
        words = (
            f"by what trials {trials} took, {gib(outside)} GiB (give or take {gib(error)}) go to weights and batches; "
            f"of the {gib(wanted)} GiB that {UTILIZATION} {plain(point.utilization)} gives, "
            f"{gib(max(0.0, wanted - outside))} are left for the KV cache"
            + (f", and one request needs {gib(need)}" if need else "")
        )
        return Shortage("oom_kv_cache_too_small" if wanted > outside else "oom_kv_cache_none", words)

    def _batch(self, point: Point, memory: DeviceMemory | None) -> Shortage | None:
        found, free = self._fits.get(point.others), self.bounds.free(memory)
        if found is None or free is None or point.tokens is None or point.seqs is None:
            return None
        outside, error = found(point.tokens, point.seqs), found.error(point.tokens, point.seqs)
        if outside - error <= free[0] + free[1]:
            return None
        words = f"weights and the largest batch would take {gib(outside)} GiB, and {gib(free[0])} are free"
        return Shortage("oom_activation_profile", words)

    def _beside(self, point: Point, memory: DeviceMemory | None) -> Shortage | None:
        """Compare what graphs and the sampler need with what is left beside the server's share."""
        wanted, free = self.bounds.requested(point, memory), self.bounds.free(memory)
        if wanted is None or free is None or point.seqs is None:
            return None
        spare = free[0] - wanted
        starts, growth = self._starts.get(point.others, ([], 0.0))
        if any(not start.short and start.seqs >= point.seqs and start.spare <= spare for start in starts):
            return None
        for start in starts:
            # A larger batch may have left more room behind: then only the same need counts, not how it grows.
            grows = growth if (point.tokens or 0) <= start.tokens else 0.0
            more = point.seqs - start.seqs
            if start.short and more >= 0 and spare <= start.spare + grows * more + ROUNDING:
                words = (
                    f"trial {start.trial} with {SEQS} {start.seqs} ran out of memory with {gib(start.spare)} GiB "
                    f"beside the server's share; this leaves {gib(spare)} for {point.seqs}"
                )
                return Shortage(start.short, words)
        return None

    @cached_property
    def _starts(self) -> dict[frozenset[str], tuple[list[_Start], float]]:
        """How launches fared once their KV cache was set aside, by their other flags, and what that says of growth."""
        starts: dict[frozenset[str], list[_Start]] = {}
        for launch in self.bounds.launches:
            point, spare, short = launch.point, self.bounds.spare(launch), launch.kind in AFTER_CACHE
            if spare is not None and (launch.kind is None or (short and launch not in self.bounds.doubtful)):
                sizes = point.tokens or 0, point.seqs or 0
                told = _Start(launch.trial, *sizes, spare, launch.graphs, launch.kind)
                starts.setdefault(point.others, []).append(told)
        return {others: (told, _growth(told)) for others, told in starts.items()}


@dataclass(frozen=True, slots=True)
class _Start:
    """spare: bytes beside the server's share. short: how they were not enough for graphs and the sampler, if so."""

    trial: int
    tokens: int
    seqs: int
    spare: float
    graphs: float | None
    short: FailureKind | None


def _growth(starts: Sequence[_Start]) -> float:
    """Return at least how much one more sequence needs beside the cache, in bytes.

    The graphs of two launches tell it; so do a launch that had too little and one with fewer sequences that had less.
    """
    slopes = [0.0]
    graphs = [(start.seqs, start.graphs) for start in starts if start.graphs is not None]
    if graphs and (few := min(graphs))[0] < (many := max(graphs))[0]:
        slopes.append((many[1] - few[1]) / (many[0] - few[0]))
    slopes.extend(
        (short.spare - enough.spare) / (short.seqs - enough.seqs)
        for short in starts
        for enough in starts
        if short.short and not enough.short and short.seqs > enough.seqs
    )
    return max(slopes)
