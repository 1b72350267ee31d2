"""The conduct of one level of load: warm-up, window, and load kept up until what was counted has ended."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from sweep.load.crowd import Crowd
from sweep.load.messages import Command, Orders, Result, Setup
from sweep.load.prompts import PromptSource
from sweep.load.stamps import allow_open_files, stamp_source
from sweep.load.wire import Target
from sweep.load.workload import Level, LoadSection
from sweep.model import LoadRun, RequestRecord

_NS = 1_000_000_000
_BINS_IN_MIN = 4  # the shortest warm-up is this many bins
_LONGEST_BIN_S = 1.0
_NOTICE_NS = 150_000_000  # processes are told of a time so long before it comes
_JUDGE_EVERY_S = 0.5
_DRAIN_S = 10.0


def bin_length_s(min_s: float) -> float:
    """Return the length of the bins by which a warm-up of at least min_s is judged."""
    return min(_LONGEST_BIN_S, min_s / _BINS_IN_MIN)


@dataclass(frozen=True, slots=True)
class Warmup:
    """When the load may be measured: after min_s at the earliest, after max_s at the latest, else when it is steady.

    is_steady judges the speed of a stream, in bytes a second, one number for each bin of at most a second.
    """

    min_s: float
    max_s: float
    is_steady: Callable[[Sequence[float]], bool]


@dataclass(frozen=True, slots=True)
class Tally:
    """What a judge sees while the window is open. judged: limit -> (requests judged, of these missed).

    in_flight: mean number of requests under way, one for each bin of bin_s since the window's start.
    """

    elapsed_s: float
    due: int
    open: int
    judged: dict[str, tuple[int, int]]
    in_flight: tuple[float, ...]
    bin_s: float


Judge: TypeAlias = Callable[[Tally], Literal["pass", "fail", "unstable"] | None]


async def _nothing() -> None:
    return


async def run_level(
    target: Target,
    level: Level,
    load: LoadSection,
    *,
    prompts: PromptSource,
    warmup: Warmup,
    processes: int = 1,
    on_edge: Callable[[], Awaitable[None]] = _nothing,
    judge: Judge | None = None,
    misses: Callable[[RequestRecord], Mapping[str, bool]] | None = None,
) -> LoadRun:
    """Put one level of load on a server: warm up, count the requests of the window, keep the load up until they end.

    processes: that carry the load, each a share of one schedule. on_edge: awaited before the load, when the window
    opens and closes, and after the load. judge: may end the level early; misses: tells it, for a finished request,
    which limits were missed; both it and the prompts are pickled.

    The load ends early, with what there is, when the server is plainly gone. Raises ConfigError where this process may
    not open enough connections, MachineError when a process of the client dies.
    """
    allow_open_files(level.concurrency)
    count = min(processes, level.concurrency or processes)
    run_id, salt, bin_s = uuid.uuid4().hex[:12], uuid.uuid4().hex, bin_length_s(warmup.min_s)
    window_ns = _window_ns(level, load, prompts)
    setups = [
        Setup(
            Orders(
                level=level,
                load=load,
                prompts=prompts,
                target=target,
                run_id=run_id,
                share=(index, count),
                slots=_share(level.concurrency, index, count),
                stagger_s=warmup.min_s / 2,
                bin_s=bin_s,
                requests=None if window_ns is not None else _share(load.requests, index, count),
                misses=misses,
            ),
            salt,
        )
        for index in range(count)
    ]
    async with Crowd(setups) as crowd:
        conductor = _Conductor(
            crowd=crowd,
            level=level,
            warmup=warmup,
            bin_s=bin_s,
            window_ns=window_ns,
            on_edge=on_edge,
            judge=judge,
        )
        return await conductor.run()


def _share(total: int | None, index: int, count: int) -> int | None:
    return None if total is None else total // count + (index < total % count)


def _window_ns(level: Level, load: LoadSection, prompts: PromptSource) -> int | None:
    """Return the window's length where it is known before: everywhere but in a closed loop that counts requests."""
    if load.window_s is not None:
        return round(load.window_s * _NS)
    if level.concurrency is not None:
        return None
    # Conversations arrive; with one turn each they are the requests. The window ends when the next one is due.
    wanted = load.requests or prompts.plan.length or 1
    starts = math.ceil(wanted / prompts.plan.mean_turns)
    return round(next(itertools.islice(prompts.plan.offsets_s(level, warmup=False), starts, None)) * _NS)


class _Conductor:
    """Says when a window opens and closes, and puts together what came of it."""

    def __init__(
        self,
        *,
        crowd: Crowd,
        level: Level,
        warmup: Warmup,
        bin_s: float,
        window_ns: int | None,
        on_edge: Callable[[], Awaitable[None]],
        judge: Judge | None,
    ) -> None:
        self._crowd, self._level, self._warmup, self._bin_s = crowd, level, warmup, bin_s
        self._window_ns, self._on_edge, self._judge = window_ns, on_edge, judge
        self._start_ns = self._open_ns = self._close_ns = 0
        self._verdict: Literal["pass", "fail", "unstable"] | None = None

    async def run(self) -> LoadRun:
        await self._on_edge()
        self._start_ns = time.perf_counter_ns() + _NOTICE_NS
        self._crowd.tell(Command("start", self._start_ns))
        steady = await self._warm_up()
        if self._ended_early:
            self._open_ns = self._close_ns = time.perf_counter_ns()
        else:
            self._open_ns = time.perf_counter_ns() + _NOTICE_NS
            await self._window()
        patience_s = 0 if self._ended_early or self._verdict in {"fail", "unstable"} else _DRAIN_S
        self._crowd.tell(Command("finish", patience_s=patience_s))
        while any(result is None for result in self._crowd.results):
            await self._crowd.news(None)
        end_ns = time.perf_counter_ns()
        await self._on_edge()
        results = [result for result in self._crowd.results if result is not None]
        return self._put_together(results, end_ns, steady=steady)

    @property
    def _ended_early(self) -> Literal["stalled", "failing", "behind"] | None:
        return next((p.ended_early for p in self._crowd.progress if p.ended_early), None)

    async def _warm_up(self) -> bool:
        """Wait until every slot has gone round once and the streams' speed is steady; False when time ran out."""
        series: list[float] = []
        for number in range(1, math.ceil(self._warmup.max_s / self._bin_s) + 1):
            while self._crowd.bins < number:
                if self._ended_early:
                    return False
                await self._crowd.news(None)
            (received, flight_ns), (before, flight_before_ns) = (self._crowd.sum_at(n) for n in (number, number - 1))
            if flight_ns > flight_before_ns:
                series.append(_NS * (received - before) / (flight_ns - flight_before_ns))
            rounds = sum(progress.slots_done for progress in self._crowd.progress)
            ready = number * self._bin_s >= self._warmup.min_s and rounds >= (self._level.concurrency or 1)
            if ready and self._warmup.is_steady(series):
                return True
        return False

    async def _window(self) -> None:
        """Have the window open and close, and wait for what it counted."""
        known_ns = None if self._window_ns is None else self._open_ns + self._window_ns
        self._crowd.tell(Command("open", self._open_ns, known_ns))
        await self._pass_until(self._open_ns)
        edges = [asyncio.ensure_future(self._on_edge())]
        try:
            await self._pass_until(known_ns)
            if self._verdict or self._ended_early:
                self._close_ns = time.perf_counter_ns()
                self._crowd.tell(Command("close", self._close_ns))
            else:
                last_ns = max(progress.last_counted_end_ns for progress in self._crowd.progress)
                self._close_ns = last_ns if known_ns is None else known_ns
            edges.append(asyncio.ensure_future(self._on_edge()))
            while not (self._done or self._ended_early or self._verdict in {"fail", "unstable"}):
                await self._crowd.news(None)
            await asyncio.gather(*edges)
        finally:
            for edge in edges:
                edge.cancel()

    @property
    def _done(self) -> bool:
        return all(progress.done for progress in self._crowd.progress)

    async def _pass_until(self, at_ns: int | None) -> None:
        """Wait for a time, None: for all that is counted to have ended; or until there is nothing to wait for."""
        while not self._ended_early and not (at_ns is None and self._done):
            now = time.perf_counter_ns()
            if at_ns is not None and now >= at_ns:
                return
            if self._judge is not None and now > self._open_ns:
                self._verdict = self._judge(self._tally(now))
                if self._verdict is not None:
                    return
            left_s = _JUDGE_EVERY_S if at_ns is None else min(_JUDGE_EVERY_S, (at_ns - now) / _NS)
            await self._crowd.news(left_s)

    def _tally(self, now: int) -> Tally:
        judged: dict[str, tuple[int, int]] = {}
        for progress in self._crowd.progress:
            for name, (count, missed) in progress.judged.items():
                seen = judged.get(name, (0, 0))
                judged[name] = (seen[0] + count, seen[1] + missed)
        first = math.ceil((self._open_ns - self._start_ns) / _NS / self._bin_s)
        flights = [self._crowd.sum_at(number)[1] for number in range(first, self._crowd.bins + 1)]
        return Tally(
            elapsed_s=(now - self._open_ns) / _NS,
            due=sum(progress.due for progress in self._crowd.progress),
            open=sum(progress.open for progress in self._crowd.progress),
            judged=judged,
            in_flight=tuple((b - a) / _NS / self._bin_s for a, b in itertools.pairwise(flights)),
            bin_s=self._bin_s,
        )

    def _put_together(self, results: list[Result], end_ns: int, *, steady: bool) -> LoadRun:
        records = sorted((r for result in results for r in result.records), key=lambda record: record.t_start_ns)
        kernel, bare = sum(r.kernel_reads for r in results), sum(r.bare_reads for r in results)
        lags = [result.loop_lag_p99_s for result in results if result.loop_lag_p99_s is not None]
        return LoadRun(
            level=self._level.name,
            records=tuple(records),
            start_ns=self._start_ns,
            window_start_ns=self._open_ns,
            window_end_ns=self._close_ns,
            end_ns=end_ns,
            steady=steady,
            stamp_source=stamp_source(kernel, bare),
            cpu_s=sum(result.cpu_s for result in results),
            processes=len(results),
            busiest_frac=max(result.cpu_s / result.wall_s for result in results),
            loop_lag_p99_s=max(lags, default=None),
            unstamped_frac=bare / (kernel + bare) if kernel else 0.0,
            rate_rps=self._rate_rps(records),
            drained=all(result.drained for result in results),
            verdict=self._verdict,
            ended_early=self._ended_early,
        )

    def _rate_rps(self, records: list[RequestRecord]) -> float | None:
        level = self._level
        if level.rate_rps is not None:
            return level.rate_rps if level.to_rps is None else (level.rate_rps + level.to_rps) / 2
        if level.concurrency is not None or self._close_ns <= self._open_ns:
            return None
        return sum(record.counted for record in records) * _NS / (self._close_ns - self._open_ns)
