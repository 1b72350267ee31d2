"""One trial, a straight line: start the server, measure each level of load on it, stop it, say what was found."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from sweep.load.client import PromptSource, Target, complete_once, run_level
from sweep.load.prompts import id_range
from sweep.load.workload import Level, LoadSection
from sweep.measure.prom import cache_config
from sweep.measure.scrape import Scraper
from sweep.measure.summary import level_stats
from sweep.measure.warmup import MeasureSection
from sweep.model import Failure, Job, LevelStats, LoadRun, Measured, PhaseTimes, State, Treatment
from sweep.run.records import write_requests
from sweep.run.warming import warmup_of
from sweep.serve.process import Server

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
_PROBE_TOKENS = 16


async def run_trial(job: Job, say: Callable[[str], None]) -> Measured:
    """Run one trial to its end, good or bad. Its server and everything that the server started are gone afterwards."""
    begun = perf_counter()
    bench = _Bench(job, say)
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
    return Measured(_state(bench.levels, failure), tuple(bench.levels), failure, facts, times)


def _state(levels: list[LevelStats], failure: Failure | None) -> State:
    if failure is not None:
        return _STATE_OF[failure.treatment]
    return "complete" if any(level.valid for level in levels) else "invalid"


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
        self._job = job
        self._say = say
        self._load = LoadSection.model_validate(job.load)
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
            for number, level in enumerate(self._load.levels()):
                self._say(f"load {level.name}")
                failure = await self._level(server, scraper, level, number)
                if failure is not None or self._overloaded:
                    return failure
        return None

    async def _level(self, server: Server, scraper: Scraper, level: Level, number: int) -> Failure | None:
        run = await _unless_it_dies(server, self._run(server, scraper, level, number))
        if run is None:
            return await server.failure("load")
        await scraper.scrape()
        stats = level_stats(run, self._job.slo, scraper.window(run.window_start_ns, run.window_end_ns))
        self.runs.append(run)
        self.levels.append(stats)
        if stats.completed > 0 and run.ended_early is None:
            return None
        failure = await _why_it_failed(server, stats, run)
        # A server that lives and has carried a lighter level was only asked for too much; one that stalls is ill.
        alive = server.exit_code is None and failure.kind in {"hang_timeout", "other"}
        overloaded = alive and run.ended_early != "stalled"
        self._overloaded = overloaded and any(level.valid for level in self.levels)
        return None if self._overloaded else failure

    async def _run(self, server: Server, scraper: Scraper, level: Level, number: int) -> LoadRun:
        prompts = PromptSource(
            shape=self._load.prompt,
            # Fresh contents in every trial and level: what an earlier one left in a cache must not help.
            seed=(self._job.seed << 8) + number,
            workload_seed=self._job.workload_seed,
            vocab_size=self._vocab_size,
            text=self._load.endpoint == "chat",
        )
        return await run_level(
            self._target(server, self._load.endpoint),
            level,
            self._load,
            prompts=prompts,
            workload_seed=self._job.workload_seed,
            warmup=warmup_of(self._measure.warmup, self._load),
            on_window=scraper.soon,
        )

    def _target(self, server: Server, endpoint: Any) -> Target:
        return Target(server.base_url, server.served_model, server.api_key, endpoint)


async def _unless_it_dies(server: Server, load: Any) -> LoadRun | None:
    """Return the load's run, or None if the server ended before it."""
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
