"""The load of one level: slots or arrivals, a warm-up, a window, and load kept up until what was counted has ended.

Nothing here knows HTTP: a request is sent by the function that is handed in.
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from sweep.load.arrivals import poisson_offsets_s
from sweep.load.attempt import Attempt
from sweep.load.prompts import Prompt, PromptSource
from sweep.load.workload import Level, LoadSection

_NS = 1_000_000_000
_BINS_IN_MIN = 4  # the shortest warm-up is this many bins
_LONGEST_BIN_S = 1.0
_PAUSE_AFTER_FAILURE_S = 0.1
_FEWEST_FAILURES = 8
_FAILURE_PATIENCE_S = 5.0  # a server that refuses for a moment is alive


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


class LevelRun:
    """One level while it lasts. After `run`, `attempts` holds every request in the order of its start."""

    def __init__(
        self,
        *,
        level: Level,
        load: LoadSection,
        warmup: Warmup,
        prompts: PromptSource,
        workload_seed: int,
        send: Callable[[Attempt, Prompt], Awaitable[None]],
        on_window: Callable[[], None] = lambda: None,
    ) -> None:
        self.run_id = uuid.uuid4().hex[:12]
        self.attempts: list[Attempt] = []
        self.start_ns = self.window_start_ns = self.window_end_ns = self.end_ns = 0
        self.steady = False
        self.ended_early: Literal["stalled", "failing"] | None = None
        self._level, self._load, self._warmup = level, load, warmup
        self._prompts, self._workload_seed, self._send = prompts, workload_seed, send
        self._on_window = on_window
        self._active: dict[Attempt, asyncio.Timeout] = {}
        self._counting = False  # requests that start now are counted
        self._counted = 0
        self._counted_open = 0
        self._over = asyncio.Event()  # all counted requests have ended, or the server is gone
        self._failures_in_a_row = 0
        self._last_success_ns = 0
        self._slots_done: set[int] = set()  # slots that have finished a request
        self._flight_ns = 0  # integral of the number of requests in flight
        self._flight_since_ns = 0
        self._bytes = 0
        self._last_byte_ns = 0  # or the time at which the server got something to do again
        self._longest_quiet_ns = 0

    async def run(self) -> None:
        """Drive the load to its end. Cancelling it ends every request, and leaves no task behind."""
        now = time.perf_counter_ns()
        self.start_ns = self._flight_since_ns = self._last_byte_ns = self._last_success_ns = now
        with _garbage_kept():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._watch())]
                if self._level.concurrency is not None:
                    tasks += [group.create_task(self._slot(i)) for i in range(self._level.concurrency)]
                else:
                    tasks.append(group.create_task(self._arrivals()))
                try:
                    await self._conduct()
                finally:
                    self.end_ns = time.perf_counter_ns()
                    for task in tasks:
                        task.cancel()

    async def _conduct(self) -> None:
        self.steady = await self._warm_up()
        self.window_start_ns = time.perf_counter_ns()
        self._on_window()
        self._counting = not self._over.is_set()
        if self._load.window_s is not None and self._counting:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), self._load.window_s)
            self._counting = False
            self._check_over()
        await self._over.wait()
        self.window_end_ns = time.perf_counter_ns()

    async def _warm_up(self) -> bool:
        """Wait until every slot has gone round once and the streams' speed is steady; False when time ran out."""
        series: list[float] = []
        bin_s = bin_length_s(self._warmup.min_s)
        slots = self._level.concurrency or 1
        received, flight_ns = self._bytes, self._flight_ns
        for number in range(1, math.ceil(self._warmup.max_s / bin_s) + 1):
            due_s = (self.start_ns / _NS) + number * bin_s - time.perf_counter()
            try:
                await asyncio.wait_for(self._over.wait(), due_s)
            except TimeoutError:
                self._count_flight(time.perf_counter_ns())
            else:
                return False
            if self._flight_ns > flight_ns:
                series.append(_NS * (self._bytes - received) / (self._flight_ns - flight_ns))
            received, flight_ns = self._bytes, self._flight_ns
            ready = number * bin_s >= self._warmup.min_s and len(self._slots_done) >= slots
            if ready and self._warmup.is_steady(series):
                return True
        return False

    def _check_over(self) -> None:
        if self.window_start_ns and not self._counting and not self._counted_open:
            self._over.set()

    async def _slot(self, index: int) -> None:
        """Keep one request in flight. Slots open one after the other, or they would march in step for the whole run."""
        slots = self._level.concurrency or 1
        await asyncio.sleep(self._warmup.min_s / 2 * index / slots)
        while True:
            if not await self._request(slot=index):
                await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)

    async def _arrivals(self) -> None:
        """Start each request when it is due, however many are still in flight."""
        assert self._level.rate_rps is not None
        async with asyncio.TaskGroup() as group:
            for offset_s in poisson_offsets_s(self._level.rate_rps, self._workload_seed):
                due_ns = self.start_ns + round(offset_s * _NS)
                await asyncio.sleep((due_ns - time.perf_counter_ns()) / _NS)
                group.create_task(self._request(slot=0, t_sched_ns=due_ns))

    async def _request(self, slot: int, t_sched_ns: int | None = None) -> bool:
        """Send one request and wait for its end; True if nothing went wrong."""
        attempt, prompt = self._next(t_sched_ns)
        try:
            async with asyncio.timeout(self._load.request_timeout_s) as limit:
                self._active[attempt] = limit
                await self._send(attempt, prompt)
        except TimeoutError:
            if not attempt.status:
                attempt.status = "timeout_stall" if attempt.pieces else "timeout_ttft"
                attempt.error = f"not finished within {self._load.request_timeout_s:g} s"
        except asyncio.CancelledError:
            attempt.status = attempt.status or "cancelled"
            raise
        finally:
            self._end(attempt, slot)
        return not attempt.status

    def _next(self, t_sched_ns: int | None) -> tuple[Attempt, Prompt]:
        now = time.perf_counter_ns()
        counted = self._counting and (t_sched_ns is None or t_sched_ns >= self.window_start_ns)
        number = len(self.attempts)
        prompt = self._prompts.make(number)
        attempt = Attempt(
            request_id=f"{self.run_id}-{number}" if counted else f"warmup-{self.run_id}-{number}",
            counted=counted,
            prompt_tokens=prompt.tokens,
            prefix_group=prompt.group,
            requested_tokens=self._load.output.tokens,
            t_start_ns=now,
            exact_prompt=isinstance(prompt.content, list),
            t_sched_ns=t_sched_ns,
        )
        self.attempts.append(attempt)
        self._count_flight(now)
        if not self._active:
            self._last_byte_ns = now
        if counted:
            self._counted += 1
            self._counted_open += 1
            if self._counted == self._load.requests:
                self._counting = False
        return attempt, prompt

    def _end(self, attempt: Attempt, slot: int) -> None:
        attempt.t_end_ns = time.perf_counter_ns()
        self._count_flight(attempt.t_end_ns)
        self._active.pop(attempt, None)
        if attempt.counted:
            self._counted_open -= 1
        if not attempt.status:
            self._slots_done.add(slot)
            self._failures_in_a_row = 0
            self._last_success_ns = attempt.t_end_ns
        elif attempt.status != "cancelled":
            self._failures_in_a_row += 1
            quiet_s = (attempt.t_end_ns - self._last_success_ns) / _NS
            many = max(_FEWEST_FAILURES, 2 * (self._level.concurrency or 0))
            if self._failures_in_a_row >= many and quiet_s > _FAILURE_PATIENCE_S:
                self._end_early("failing")
        self._check_over()

    def _end_early(self, why: Literal["stalled", "failing"]) -> None:
        """Stop: the server is gone, hangs, or refuses everything."""
        if not self._over.is_set():
            self.ended_early = why
            self._over.set()

    def _count_flight(self, now: int) -> None:
        self._flight_ns += len(self._active) * (now - self._flight_since_ns)
        self._flight_since_ns = now

    def received(self, count: int, at_ns: int) -> None:
        """Note bytes of any stream; called for every read, so it does next to nothing."""
        self._bytes += count
        self._longest_quiet_ns = max(self._longest_quiet_ns, at_ns - self._last_byte_ns)
        self._last_byte_ns = at_ns

    async def _watch(self) -> None:
        """End what stalls: a stream that had begun, or the whole server. One task for all, a timer a read is dear."""
        limit_s = self._load.stall_timeout_s
        while True:
            await asyncio.sleep(min(1.0, limit_s / 4))
            now = time.perf_counter_ns()
            for attempt, limit in self._active.items():
                if attempt.pieces and now - attempt.pieces[-1][0] > limit_s * _NS and not limit.expired():
                    attempt.status = "timeout_stall"
                    attempt.error = f"no byte for {limit_s:g} s on a stream that had begun"
                    limit.reschedule(asyncio.get_running_loop().time())
            if self._has_stalled(now):
                for attempt in self._active:
                    attempt.status = "timeout_stall" if attempt.pieces else "timeout_ttft"
                    attempt.error = f"no byte on any stream for {(now - self._last_byte_ns) / _NS:.1f} s"
                self._end_early("stalled")

    def _has_stalled(self, now: int) -> bool:
        """Tell whether the server answers nobody any more; long prompts may have made it as silent before."""
        patience_ns = max(self._load.stall_timeout_s * _NS, 2 * self._longest_quiet_ns)
        return bool(self._active and self._bytes) and now - self._last_byte_ns > patience_ns


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """No garbage collection during the load: it would look like a pause of the server."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
