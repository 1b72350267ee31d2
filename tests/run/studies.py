"""Small studies for the tests: a configuration, a made-up machine that measures it, and a sweep over both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sweep.config import SweepConfig
from sweep.failure import Failure
from sweep.model import DeviceMemory, Dist, Event, Flags, Job, LevelStats, Measured, PhaseTimes, ServerFacts
from sweep.run.knowledge import Knowledge
from sweep.run.ledger import Ledger
from sweep.run.loop import Sweep
from sweep.run.preflight import Preflight
from sweep.run.store import Store
from sweep.run.workload import workload_document
from sweep.search.study import Study


def config(**changes: object) -> SweepConfig:
    """Return a space of 3 by 5 points; `changes` are "section__key" = value."""
    data: dict[str, dict[str, object]] = {
        "serve": {"model": "some/model"},
        "search": {
            "sampler": "random",
            "params": {
                "gpu-memory-utilization": [0.5, 0.7, 0.9],
                "max-num-seqs": {"low": 4, "high": 64, "step": "pow2"},
            },
        },
        "load": {"concurrency": 8, "prompt": {"tokens": 10}, "output": {"tokens": 5}, "requests": 20},
        "memory": {"skip": False},
        "run": {"name": "made-up", "trials": 6},
    }
    for path, value in changes.items():
        section, _, key = path.partition("__")
        data.setdefault(section, {})[key] = value
    return SweepConfig.model_validate(data)


def dist(value: float, n: int = 100) -> Dist:
    return Dist(value, value, value, value, value, n)


def level(tps: float, ttft_s: float = 0.1, *, name: str = "c=8", valid: bool = True) -> LevelStats:
    return LevelStats(
        level=name,
        completed=100,
        failed=0,
        errors={},
        window_s=10.0,
        warmup_s=2.0,
        warmup_requests=8,
        steady=True,
        ttft_s=dist(ttft_s),
        ttft_sched_s=None,
        tpot_s=dist(0.01),
        itl_s=dist(0.01),
        e2e_s=dist(ttft_s + 0.05),
        output_tps=tps,
        total_tps=3 * tps,
        request_rps=tps / 5,
        goodput_rps=None,
        slo_attainment_frac=None,
        prompt_tokens=1000,
        output_tokens=500,
        prefix_offered_frac=0.0,
        valid=valid,
    )


def complete(tps: float, ttft_s: float = 0.1) -> Measured:
    times = PhaseTimes(launch_s=40.0, warmup_s=5.0, load_s=10.0, stop_s=2.0)
    return Measured("complete", (level(tps, ttft_s),), server=ServerFacts(kv_cache_tokens=1000), times=times)


OUT_OF_MEMORY = Failure(
    kind="oom_free_memory_lt_requested",
    treatment="prune",
    evidence="Free memory on device (60.0/80.0 GiB) on startup is less than desired",
    advice="Lower gpu-memory-utilization.",
    bounds={"free_bytes": 60.0 * 2**30, "total_bytes": 80.0 * 2**30},
)


@dataclass
class Machine:
    """Measures jobs by a function of their flags; out of memory above a utilization of 0.8."""

    behave: Callable[[Flags, int], Measured] | None = None
    jobs: list[Job] = field(default_factory=list)
    defaults: Flags = field(default_factory=dict)  # what vLLM would have where a flag is absent

    def see(self, devices: int) -> DeviceMemory | None:
        return None

    async def run_job(self, job: Job, say: Callable[[str], None]) -> Measured:
        self.jobs.append(job)
        say("loading weights")
        await asyncio.sleep(0)
        if self.behave:
            return self.behave(job.launch.flags, len(self.jobs))
        utilization = job.launch.flags.get("gpu-memory-utilization", 0.7)
        if isinstance(utilization, float) and utilization > 0.8:
            return Measured("infeasible", failure=OUT_OF_MEMORY)
        return complete(float(job.launch.flags.get("max-num-seqs", 16)) * 10)  # type: ignore[arg-type]


def sweep_of(told: SweepConfig, root: Path, machine: Machine, events: list[Event] | None = None) -> Sweep:
    """Open (or go on with) a study in `root` that runs on the made-up machine."""
    store = Store(root)
    workload = workload_document(told.load, told.search.seed)
    store.begin(told, {"fingerprint": {"vllm": "0.32.0", "device": "made up"}}, workload)
    ledger = Ledger(told.objective, told.serve.args, store.outcomes())
    study = Study.open(store.database, told.run.name, told.space, told.objective, told.search)
    sweep = Sweep(
        config=told,
        store=store,
        ledger=ledger,
        study=study,
        emit=(events if events is not None else []).append,
        resolved={},
        knowledge=Knowledge(told, Preflight(None, dict(machine.defaults)), machine.see),
        workload=workload,
        deadline=None,
        after_trial=lambda: None,
        since=len(ledger.outcomes),
        run_job=machine.run_job,
    )
    study.replay([(o, ledger.verdicts[o.trial], sweep.point_of(o)) for o in ledger.outcomes])
    return sweep


def search(sweep: Sweep) -> str:
    with sweep.study:
        return asyncio.run(sweep.search())
