"""One trial, a straight line: start the server, measure each level of load on it, stop it, say what was found."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

from sweep.failure import Failure, Treatment
from sweep.load.client import Target, complete_once, tokens_per_word
from sweep.load.plan import Plan
from sweep.load.prompts import PromptSource, id_range
from sweep.load.workload import Level, LoadSection
from sweep.measure.prom import GAUGES, cache_config, total
from sweep.measure.scrape import Scraper
from sweep.measure.warmup import MeasureSection
from sweep.model import DeviceMemory, Job, LevelStats, LoadRun, Measured, PhaseTimes, State
from sweep.run.bounded import Bounded
from sweep.run.ledger import gpus_of
from sweep.run.measuring import first_error, measure_level
from sweep.run.rate_search import SATURATED_S, SATURATING, RateSearch, met, settled, start_rps
from sweep.run.records import write_requests
from sweep.run.sequential import SequentialJudge
from sweep.run.warming import warmup_of
from sweep.run.workload import other_workload
from sweep.serve.device import device_memory
from sweep.serve.process import Server

T = TypeVar("T")

# What the configuration caused is told to the search as infeasible; the rest says nothing about the configuration.
_STATE_OF: dict[Treatment, State] = {
    "prune": "infeasible",
    "retry": "failed",
    "fail_trial": "failed",
    "abort_sweep": "failed",
    "ignore": "failed",
}
# After its engine died, vLLM's API server answers with errors for some seconds before it ends.
_DEATH_PATIENCE_S = 10.0
_IDLE_PATIENCE_S = 30.0
_IDLE_POLL_S = 0.2
_PROBE_TOKENS = 16
# Of a rate search: what the client spoils says nothing of a rate, and counts as a failure only after these.
_SPARE_TRIES = 2


async def run_trial(job: Job, say: Callable[[str], None]) -> Measured:
    """Run one trial to its end, good or bad. Its server and everything that the server started are gone afterwards."""
    begun = perf_counter()
    memory = _memory(job)
    bench = _Bench(job, say)
    if failure := other_workload(bench.plan, job.workload_sha256):
        return Measured("failed", failure=failure)
    async with Server(job.launch, on_progress=say) as server:
        failure = await server.wait_ready(bench.probe)
        times = PhaseTimes(launch_s=perf_counter() - begun)
        if failure is None:
            failure = await bench.measure(server)
            times = _with_load_times(times, bench.levels, perf_counter() - begun)
        facts = replace(await server.facts(), cache_config=bench.cache_config)
        say("stopping")
        stopping = perf_counter()
        await server.stop()
        times = replace(times, stop_s=perf_counter() - stopping)
    requests = [(run.level, record) for run in bench.runs for record in run.records]
    write_requests(Path(job.launch.trial_dir) / "requests.parquet", requests)
    if failure is None and not any(level.valid for level in bench.levels):
        return Measured("invalid", tuple(bench.levels), _why_invalid(bench), facts, times, memory)
    state: State = "complete" if failure is None else _STATE_OF[failure.treatment]
    return Measured(state, tuple(bench.levels), failure, facts, times, memory)


def _memory(job: Job) -> DeviceMemory | None:
    """See what is free for the launch; None where nobody says, or the driver hangs."""
    env = os.environ | job.launch.env

    def see(devices: int) -> DeviceMemory | None:
        return device_memory(env, job.platform, count=devices)

    return Bounded(see)(gpus_of(job.launch.flags))


def _why_invalid(bench: _Bench) -> Failure:
    """Say why nothing that was measured counts, in the words of the last level and of the server."""
    reasons = bench.levels[-1].reasons if bench.levels else ("no level was measured",)
    words = first_error(bench.runs[-1]) if bench.runs else None
    evidence = f"{reasons[0]}; the first error: {words}" if words else reasons[0]
    return Failure(
        kind="other",
        treatment="ignore",
        evidence=evidence,
        advice="The measurement does not count; its flags may be as good as others. levels.csv has all reasons.",
        phase="load",
    )


def _with_load_times(times: PhaseTimes, levels: list[LevelStats], elapsed_s: float) -> PhaseTimes:
    warmup_s = sum(level.warmup_s for level in levels)
    return replace(times, warmup_s=warmup_s, load_s=elapsed_s - (times.launch_s or 0.0) - warmup_s)


class _Bench:
    """The load of a trial's levels on a running server, and what it gave."""

    def __init__(self, job: Job, say: Callable[[str], None]) -> None:
        self.levels: list[LevelStats] = []
        self.runs: list[LoadRun] = []
        self.cache_config: dict[str, str] = {}
        self._overloaded = False
        self._tokens_per_word = 1.0
        self._job = job
        self._say = say
        self._load = LoadSection.model_validate(job.load)
        self.plan = Plan(self._load, job.workload_seed)
        self._measure = MeasureSection.model_validate(job.measure)
        self._vocab_size = _vocab_size(job.launch.model)

    async def probe(self, server: Server) -> str | None:
        """Have one real completion: a server is ready when it has answered, not when it says so."""
        low, _ = id_range(self._vocab_size)
        ids = list(range(low, low + _PROBE_TOKENS))
        record = await complete_once(self._target(server, "completions"), ids, max_tokens=2)
        return None if record.status == "ok" else f"the first completion failed ({record.status}): {record.error}"

    async def measure(self, server: Server) -> Failure | None:
        """Measure every level in turn; stop at the first that shows the server dead or failing."""
        metrics = Path(self._job.launch.trial_dir) / "metrics.jsonl"
        async with Scraper(f"{server.base_url}/metrics", server.api_key, metrics) as scraper:
            self.cache_config = dict(cache_config(scraper.scrapes[-1][1])) if scraper.scrapes else {}
            if self._load.endpoint == "chat":
                self._tokens_per_word = await tokens_per_word(self._target(server, "chat")) or 1.0
            for level in self._load.levels():
                found = self._search(server, scraper) if level.search else self._level(server, scraper, level)
                failure = await found
                if failure is not None or self._overloaded:
                    return failure
        return None

    async def _search(self, server: Server, scraper: Scraper) -> Failure | None:
        """Find the highest rate under the SLOs. Every rate that is tried becomes a level, in ascending order."""
        window_s = min(SATURATED_S, self._load.window_s or SATURATED_S)
        short = self._load.model_copy(update={"seconds": window_s, "requests": None})
        measured = await self._measured(server, scraper, SATURATING, short)
        if measured is None:
            return await server.failure("load")
        run, stats = measured
        if stats.completed == 0 or run.ended_early is not None:
            return await _why_it_failed(server, stats, run)
        search, rates, spare = RateSearch(start_rps(stats, run)), [], _SPARE_TRIES
        while (rate_rps := search.next()) is not None:
            level = Level(f"r={rate_rps:g}", rate_rps=rate_rps)
            failure = await self._level(server, scraper, level, SequentialJudge(self._job.slo))
            if failure is not None:
                return failure
            if self.levels[-1].again and spare:
                spare -= 1
                self.levels.pop()
                self.runs.pop()
                continue
            search.tell(rate_rps, passed=met(self.levels[-1], self._job.slo))
            rates.append(rate_rps)
        self.levels[:] = settled(dict(zip(rates, self.levels, strict=True)), search.bracket, self._job.slo)
        # A rate that was too much ended no more than its own try.
        self._overloaded = False
        return None

    async def _level(
        self, server: Server, scraper: Scraper, level: Level, judge: SequentialJudge | None = None
    ) -> Failure | None:
        measured = await self._measured(server, scraper, level, self._load, judge)
        if measured is None:
            return await server.failure("load")
        run, stats = measured
        self.levels.append(stats)
        if run.verdict is not None or (stats.completed > 0 and run.ended_early is None):
            return None
        failure = await _why_it_failed(server, stats, run)
        # A server that lives and has carried a lighter load was only asked for too much; one that stalls is ill.
        alive = server.exit_code is None and failure.kind in {"hang_timeout", "other"}
        overloaded = alive and run.ended_early != "stalled"
        self._overloaded = overloaded and (judge is not None or any(level.valid for level in self.levels))
        return None if self._overloaded else failure

    async def _measured(
        self,
        server: Server,
        scraper: Scraper,
        level: Level,
        load: LoadSection,
        judge: SequentialJudge | None = None,
    ) -> tuple[LoadRun, LevelStats] | None:
        """Put a level on the idle server and measure it; None if the server ended before it did."""
        self._say(f"load {level.name}")
        prompts = PromptSource(
            self.plan,
            # Fresh contents in every trial and level: what an earlier one left in a cache must not help.
            seed=(self._job.seed << 8) + len(self.runs),
            vocab_size=self._vocab_size,
            text=load.endpoint == "chat",
            tokens_per_word=self._tokens_per_word,
        )

        async def measure() -> tuple[LoadRun, LevelStats]:
            await _until_idle(scraper)
            return await measure_level(
                self._target(server, load.endpoint),
                level,
                load,
                prompts=prompts,
                warmup=warmup_of(self._measure.warmup, load),
                slo=self._job.slo,
                scraper=scraper,
                processes=1 if load.processes == "auto" else load.processes,
                judge=judge,
                say=self._say,
            )

        measured = await _unless_it_dies(server, measure())
        if measured is not None:
            self.runs.append(measured[0])
        return measured

    def _target(self, server: Server, endpoint: Any) -> Target:
        return Target(server.base_url, server.served_model, server.api_key, endpoint)


async def _until_idle(scraper: Scraper) -> None:
    """Wait until the server has nothing to do: what an earlier level left behind is no part of the next one.

    A server that tells nothing, or does not become idle, is loaded all the same; what somebody else asks of it is seen
    in its figures.
    """
    end = perf_counter() + _IDLE_PATIENCE_S
    while perf_counter() < end:
        await scraper.scrape()
        samples = scraper.scrapes[-1][1] if scraper.scrapes else ()
        if not any(total(samples, GAUGES[name]) for name in ("running_peak", "waiting_peak")):
            return
        await asyncio.sleep(_IDLE_POLL_S)


async def _unless_it_dies(server: Server, load: Coroutine[Any, Any, T]) -> T | None:
    """Return what the load gave, or None if the server ended before it."""
    running = asyncio.ensure_future(load)
    death = asyncio.ensure_future(server.exited())
    try:
        await asyncio.wait({running, death}, return_when=asyncio.FIRST_COMPLETED)
        return None if death.done() else await running
    finally:
        for task in (running, death):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def _why_it_failed(server: Server, stats: LevelStats, run: LoadRun) -> Failure:
    """Find out why the load ended early or no request succeeded. A dying server gets some time to say so in its log."""
    with suppress(TimeoutError):
        await asyncio.wait_for(server.exited(), _DEATH_PATIENCE_S)
    found = await server.failure("load")
    if found.kind != "other":
        return found
    errors = ", ".join(f"{count} x {status}" for status, count in stats.errors.items()) or "nothing was answered"
    timeouts = run.ended_early == "stalled" or (
        bool(stats.errors) and all(status.startswith("timeout") for status in stats.errors)
    )
    return replace(
        found,
        kind="hang_timeout" if timeouts else found.kind,
        treatment="retry" if timeouts else found.treatment,
        evidence=f"under load: {stats.reasons[0] if stats.reasons else 'no request succeeded'} ({errors})",
    )


def _vocab_size(model: str) -> int | None:
    """Return the size of a local model's vocabulary; None for a model that is a hub's name."""
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return size if isinstance(size, int) else None
