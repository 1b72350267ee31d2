"""The traffic of one process: slots or arrivals, conversations, and what has become of their requests.

Nothing here knows HTTP, other processes or when the load is steady: a request is sent by the function that is handed
in, and whoever conducts the level says when its window opens and when it is over.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal

from sweep.load.attempt import Attempt, record
from sweep.load.messages import Orders, Progress
from sweep.load.plan import Ask
from sweep.load.prompts import Answer, Prompt
from sweep.load.wire import Meter
from sweep.model import RequestRecord

_NS = 1_000_000_000
_PAUSE_AFTER_FAILURE_S = 0.1
_FEWEST_FAILURES = 8
_FAILURE_PATIENCE_S = 5.0  # a server that refuses for a moment is alive
# Timers of an event loop are up to a millisecond late, so the last stretch before an arrival is spent awake.
_AWAKE_NS = 1_100_000
_LONGEST_SLEEP_S = 0.05  # an arrival that waits must notice that the window is about to open
_LAG_PERIOD_S = 0.05
_BEHIND_NS = 5 * _NS  # who is so late for an arrival will not catch up
_SHORT_BYTES = 4096  # an answer that is decoded at once: it takes no time, and may be a failure


class Traffic:
    """One process's part of a level, while it lasts. Afterwards `records` holds every request of it."""

    def __init__(
        self,
        orders: Orders,
        meter: Meter,
        send: Callable[[Attempt], Awaitable[None]],
        report: Callable[[Progress], None],
    ) -> None:
        self.records: list[RequestRecord] = []
        self.lags_s: list[float] = []
        self._orders, self._meter, self._send, self._report = orders, meter, send, report
        self._progress = Progress()
        self._start_ns = 0
        self._open_ns: int | None = None  # the window's start
        self._close_ns: int | None = None  # its end, once it is known
        self._taken = {True: 0, False: 0}  # conversations taken up, of the warm-up and of the window
        self._started = 0
        self._next_due_ns = 0  # of an open loop
        self._active: dict[Attempt, asyncio.Timeout] = {}
        self._slots_done: set[int] = set()
        self._freed_ns: dict[int, int] = {}  # slot -> when the latest answer's last byte arrived
        self._failures_in_a_row = 0
        self._last_success_ns = 0
        self._flight_since_ns = 0
        self._ended: deque[Attempt] = deque()  # not decoded yet
        self._something_ended = asyncio.Event()
        self._ending = False  # nothing new is started
        self._quiet = asyncio.Event()  # nothing is under way, and nothing will be
        self._over = asyncio.Event()

    async def run(self, start_ns: int) -> None:
        """Start at a time, and go on until `finish`. Cancelling it ends every request, and leaves no task behind."""
        self._start_ns = self._flight_since_ns = self._last_success_ns = start_ns
        with _garbage_kept():
            await asyncio.sleep((start_ns - time.perf_counter_ns()) / _NS)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(each) for each in (self._watch(), self._tell(), self._decode(), self._lag())]
                if self._orders.slots is not None:
                    tasks += [group.create_task(self._slot(i)) for i in range(self._orders.slots)]
                else:
                    tasks.append(group.create_task(self._arrivals()))
                await self._over.wait()
                for task in tasks:
                    task.cancel()
            while self._ended:
                self._take_in(self._ended.popleft())

    def open_window(self, at_ns: int, close_ns: int | None) -> None:
        """Count the requests of the window [at_ns, close_ns); close_ns: None where their number decides."""
        self._open_ns = at_ns
        if close_ns is not None:
            self.close_window(close_ns)

    def close_window(self, at_ns: int) -> None:
        """Count nothing that is due at a later time."""
        self._close_ns = at_ns if self._close_ns is None else min(at_ns, self._close_ns)
        wait_s = (at_ns - time.perf_counter_ns()) / _NS
        asyncio.get_running_loop().call_later(max(0.0, wait_s) + 0.001, self._check_done)

    async def finish(self, patience_s: float) -> bool:
        """Start nothing new, and give what is under way some time to end; True if all of it did."""
        self._ending = True
        if self._active:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._quiet.wait(), patience_s)
        drained = not self._active
        self._over.set()
        return drained

    async def _slot(self, index: int) -> None:
        """Keep one conversation going. Slots open one after the other, or they would march in step from then on."""
        first, of = self._orders.share
        slots = (self._orders.slots or 1) * of
        await asyncio.sleep(self._orders.stagger_s * (index * of + first) / slots)
        while not self._ending:
            warmup = self._open_ns is None or time.perf_counter_ns() < self._open_ns
            asks = self._orders.prompts.plan.conversation(self._taken[warmup] * of + first, warmup=warmup)
            self._taken[warmup] += 1
            if not await self._conversation(asks, index, warmup=warmup, ready_ns=self._freed_ns.get(index)):
                await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)
                self._freed_ns.pop(index, None)

    async def _arrivals(self) -> None:
        """Start each conversation when it is due, however many are still under way."""
        plan, (first, of) = self._orders.prompts.plan, self._orders.share
        async with asyncio.TaskGroup() as group:
            for warmup in (True, False):
                base_ns = self._start_ns if warmup else self._open_ns or self._start_ns
                for number, offset_s in enumerate(plan.offsets_s(self._orders.level, warmup=warmup)):
                    if number % of != first:
                        continue
                    self._next_due_ns = due_ns = base_ns + round(offset_s * _NS)
                    if not await self._until(due_ns, warmup=warmup):
                        break
                    asks = plan.conversation(number, warmup=warmup)
                    group.create_task(self._conversation(asks, None, warmup=warmup, ready_ns=due_ns))

    async def _until(self, due_ns: int, *, warmup: bool) -> bool:
        """Wait for an arrival; False if it is not to be: the window opens before, or the load ends."""
        while not self._ending:
            if warmup and self._open_ns is not None and due_ns >= self._open_ns:
                return False
            left_ns = due_ns - time.perf_counter_ns()
            if left_ns <= 0:
                if left_ns < -_BEHIND_NS:
                    self._end_early("behind")
                await asyncio.sleep(0)  # whoever is late for every arrival must let the others have their turn
                return True
            await asyncio.sleep(0 if left_ns < _AWAKE_NS else min((left_ns - _AWAKE_NS) / _NS, _LONGEST_SLEEP_S))
        return False

    async def _conversation(
        self, asks: tuple[Ask, ...], slot: int | None, *, warmup: bool, ready_ns: int | None
    ) -> bool:
        """Send one request after the other, each with what was said before it; True if nothing went wrong.

        slot: None in an open loop. ready_ns: when the first request is due, or when its slot was free; None for now.
        """
        earlier: tuple[Prompt, Answer] | None = None
        for number, ask in enumerate(asks, start=1):
            last = number == len(asks)
            attempt = await self._request(ask, slot, warmup=warmup, ready_ns=ready_ns, earlier=earlier, last=last)
            if attempt.status:
                return False
            if not last:
                # An answer that is part of the next prompt is decoded at once.
                found, answer = self._take_in(attempt, keep=True)
                if found.status != "ok":
                    return False
                earlier = (attempt.prompt, answer)
                ready_ns = attempt.t_end_ns + round(asks[number].think_s * _NS)
                await asyncio.sleep((ready_ns - time.perf_counter_ns()) / _NS)
                if self._ending:
                    return True
        return True

    async def _request(
        self,
        ask: Ask,
        slot: int | None,
        *,
        warmup: bool,
        ready_ns: int | None,
        earlier: tuple[Prompt, Answer] | None,
        last: bool,
    ) -> Attempt:
        """Send one request and wait for its end."""
        attempt = self._begin(ask, ready_ns, earlier, warmup=warmup)
        try:
            async with asyncio.timeout(self._orders.load.request_timeout_s) as limit:
                self._active[attempt] = limit
                await self._send(attempt)
        except TimeoutError:
            if not attempt.status:
                attempt.status = "timeout_stall" if attempt.begun else "timeout_ttft"
                attempt.error = f"not finished within {self._orders.load.request_timeout_s:g} s"
        except asyncio.CancelledError:
            attempt.status = attempt.status or "cancelled"
            raise
        finally:
            self._end(attempt, slot, last=last)
        return attempt

    def _begin(self, ask: Ask, ready_ns: int | None, earlier: tuple[Prompt, Answer] | None, *, warmup: bool) -> Attempt:
        now = time.perf_counter_ns()
        ready_ns = now if ready_ns is None else ready_ns
        counted = self._counts(ready_ns)
        name = f"{self._orders.run_id}-{self._orders.share[0]}-{self._started}"
        prompt = self._orders.prompts.make(ask, warmup=warmup, earlier=earlier)
        history = earlier[0].tokens + len(earlier[1].ids) if earlier else ask.history_tokens
        attempt = Attempt(
            request_id=name if counted else f"warmup-{name}",
            counted=counted,
            ask=ask,
            prompt=prompt,
            t_start_ns=now if self._orders.slots is None else ready_ns,
            history_tokens=history,
            t_sched_ns=ready_ns if self._orders.slots is None else None,
        )
        self._started += 1
        self._count_flight(now)
        if not self._active:
            self._meter.last_ns = now
        if counted:
            self._progress.due += 1
            self._progress.open += 1
        return attempt

    def _counts(self, due_ns: int) -> bool:
        if self._open_ns is None or due_ns < self._open_ns:
            return False
        if self._orders.requests is not None:
            return self._progress.due < self._orders.requests
        return self._close_ns is None or due_ns < self._close_ns

    def _end(self, attempt: Attempt, slot: int | None, *, last: bool) -> None:
        now = attempt.t_end_ns = time.perf_counter_ns()
        if slot is not None and attempt.marks:
            # A client that is late to see an answer lets the slot lie idle, which must not be hidden.
            self._freed_ns[slot] = attempt.marks[-1][0]
        self._count_flight(now)
        self._active.pop(attempt, None)
        if self._ending and not self._active:
            self._quiet.set()
        if attempt.counted:
            self._progress.open -= 1
            self._progress.last_counted_end_ns = now
        if last and len(attempt.body) <= _SHORT_BYTES:
            self._take_in(attempt)
        elif last or attempt.status:
            self._ended.append(attempt)
            self._something_ended.set()
        self._see(attempt, slot)
        self._check_done()

    def _see(self, attempt: Attempt, slot: int | None) -> None:
        """Notice whether the server still answers: a request that is not known to have failed is a success."""
        if not attempt.status:
            self._slots_done.add(slot or 0)
            self._failures_in_a_row = 0
            self._last_success_ns = attempt.t_end_ns
        elif attempt.status != "cancelled":
            self._failures_in_a_row += 1
            many = max(_FEWEST_FAILURES, 2 * (self._orders.slots or 0))
            quiet_ns = attempt.t_end_ns - self._last_success_ns
            if self._failures_in_a_row >= many and quiet_ns > _FAILURE_PATIENCE_S * _NS:
                self._end_early("failing")

    def _take_in(self, attempt: Attempt, *, keep: bool = False) -> tuple[RequestRecord, Answer]:
        target = self._orders.target
        found, answer = record(attempt, vllm=target.vllm, keep=keep, secret=target.api_key)
        self.records.append(found)
        if found.status != "ok":
            attempt.status = found.status
        if self._orders.misses is not None and found.counted and found.status != "cancelled":
            for name, missed in self._orders.misses(found).items():
                judged, failed = self._progress.judged.get(name, (0, 0))
                self._progress.judged[name] = (judged + 1, failed + missed)
        return found, answer

    def _check_done(self) -> None:
        """Tell at once when everything that is counted has ended: others wait for it."""
        progress = self._progress
        if progress.done or self._open_ns is None or progress.open:
            return
        if self._orders.requests is not None:
            progress.done = progress.due >= self._orders.requests
        elif self._close_ns is not None:
            passed = self._orders.slots is not None or self._next_due_ns >= self._close_ns
            progress.done = passed and time.perf_counter_ns() >= self._close_ns
        if progress.done:
            self._report(progress)

    def _end_early(self, why: Literal["stalled", "failing", "behind"]) -> None:
        """Tell that it makes no sense to go on: the server is gone, hangs, or refuses everything."""
        if self._progress.ended_early is None:
            self._progress.ended_early = why
            self._report(self._progress)

    def _count_flight(self, now: int) -> None:
        self._progress.flight_ns += len(self._active) * (now - self._flight_since_ns)
        self._flight_since_ns = now

    async def _tell(self) -> None:
        """Report at the end of each bin of time."""
        while True:
            end_ns = self._start_ns + round((self._progress.bins + 1) * self._orders.bin_s * _NS)
            await asyncio.sleep((end_ns - time.perf_counter_ns()) / _NS)
            self._count_flight(time.perf_counter_ns())
            self._progress.bins += 1
            self._progress.bytes = self._meter.bytes
            self._progress.slots_done = len(self._slots_done)
            self._report(self._progress)

    async def _decode(self) -> None:
        """Decode what has ended, one stream in each turn of the loop, so that no read waits for more than one."""
        while True:
            await self._something_ended.wait()
            self._something_ended.clear()
            while self._ended:
                self._take_in(self._ended.popleft())
                await asyncio.sleep(0)

    async def _lag(self) -> None:
        while True:
            due_ns = time.perf_counter_ns() + round(_LAG_PERIOD_S * _NS)
            await asyncio.sleep(_LAG_PERIOD_S)
            self.lags_s.append(max(0, time.perf_counter_ns() - due_ns) / _NS)

    async def _watch(self) -> None:
        """End what stalls: a stream that had begun, or the whole server. One task for all, a timer a read is dear."""
        limit_s = self._orders.load.stall_timeout_s
        while True:
            await asyncio.sleep(min(1.0, limit_s / 4))
            now = time.perf_counter_ns()
            for attempt, limit in self._active.items():
                if attempt.begun and now - attempt.marks[-1][0] > limit_s * _NS and not limit.expired():
                    attempt.status = "timeout_stall"
                    attempt.error = f"no byte for {limit_s:g} s on a stream that had begun"
                    limit.reschedule(asyncio.get_running_loop().time())
            if self._has_stalled(now):
                for attempt in self._active:
                    attempt.status = "timeout_stall" if attempt.begun else "timeout_ttft"
                    attempt.error = f"no byte on any stream for {(now - self._meter.last_ns) / _NS:.1f} s"
                self._end_early("stalled")

    def _has_stalled(self, now: int) -> bool:
        """Tell whether the server answers nobody any more; long prompts may have made it as silent before."""
        patience_ns = max(self._orders.load.stall_timeout_s * _NS, 2 * self._meter.longest_quiet_ns)
        return bool(self._active and self._meter.bytes) and now - self._meter.last_ns > patience_ns


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
