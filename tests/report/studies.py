"""Small studies for the tests of the reports."""

from __future__ import annotations

from typing import Any

from sweep.failure import Failure, FailureKind
from sweep.model import Dist, Flags, LevelStats, Measured, Outcome, PhaseTimes, ServerFacts, ServerStats, Verdict
from sweep.report.view import StudyView

SWEPT = ("max-num-seqs", "gpu-memory-utilization", "enable-prefix-caching")


def dist(value_s: float) -> Dist:
    return Dist(mean=value_s, p50=value_s * 0.9, p90=value_s * 1.2, p95=value_s * 1.5, p99=value_s * 2, n=100)


def level(
    name: str = "c=64",
    *,
    output_tps: float = 400.0,
    ttft_s: float = 0.1,
    server: ServerStats | None = None,
    **more: Any,
) -> LevelStats:
    values: dict[str, Any] = {
        "level": name,
        "completed": 100,
        "failed": 0,
        "errors": {},
        "window_s": 30.0,
        "warmup_s": 5.0,
        "warmup_requests": 64,
        "steady": True,
        "ttft_s": dist(ttft_s),
        "ttft_sched_s": None,
        "tpot_s": dist(0.01),
        "itl_s": dist(0.012),
        "e2e_s": dist(2.0),
        "output_tps": output_tps,
        "total_tps": output_tps * 9,
        "request_rps": output_tps / 128,
        "goodput_rps": None,
        "slo_attainment_frac": None,
        "prompt_tokens": 102400,
        "output_tokens": 12800,
        "prefix_offered_frac": None,
        "server": server,
    }
    return LevelStats(**{**values, **more})


def complete(trial: int, flags: Flags, *levels: LevelStats, label: str | None = None) -> Outcome:
    measured = Measured(
        "complete",
        levels or (level(),),
        None,
        ServerFacts("0.32.0", kv_cache_tokens=8192, max_concurrency=4.5),
        PhaseTimes(40.0, 5.0, 30.0, 2.0),
    )
    source = "baseline" if trial == 0 else "search"
    return Outcome(trial, source, flags, measured, "2026-03-01T22:00:00+00:00", label)


def failed(
    trial: int, flags: Flags, *, kind: FailureKind = "oom_kv_cache_none", evidence: str = "no memory"
) -> Outcome:
    failure = Failure(kind, "prune", evidence, "Raise gpu-memory-utilization.")
    measured = Measured("infeasible", (), failure, times=PhaseTimes(launch_s=31.0))
    return Outcome(trial, "search", flags, measured, "2026-03-01T22:10:00+00:00")


def skipped(trial: int, flags: Flags, *, kind: FailureKind = "oom_kv_cache_none", reason: str = "no room") -> Outcome:
    measured = Measured("skipped", failure=Failure(kind, "prune", reason, "No launch was spent on it."))
    return Outcome(trial, "search", flags, measured, "2026-03-01T22:20:00+00:00")


def judge(outcome: Outcome) -> Verdict:
    levels = outcome.measured.levels
    return Verdict(levels[-1], levels[-1].output_tps, slo_met=True) if levels else Verdict(None, None, None)


def study(*outcomes: Outcome, **more: Any) -> StudyView:
    """A study of these outcomes; the best is the one with the highest throughput at its last level."""
    verdicts = {outcome.trial: judge(outcome) for outcome in outcomes}
    eligible = {trial: verdict.value for trial, verdict in verdicts.items() if verdict.value is not None}
    values: dict[str, Any] = {
        "name": "demo",
        "folder": "results/demo",
        "model": "org/model",
        "revision": "abc123",
        "device": "1 x NVIDIA H200",
        "vllm_version": "0.32.0",
        "environment": {"gpu": {"name": "NVIDIA H200"}, "python": "3.11"},
        "objective": "output throughput",
        "unit": "tok/s",
        "direction": "maximize",
        "slo": {"ttft_p99": 0.5},
        "swept": SWEPT,
        "levels": ("c=32", "c=64"),
        "load_words": "prompts of 1,024 tokens, answers of 128 tokens",
        "gpus": 1,
        "outcomes": outcomes,
        "verdicts": verdicts,
        "baseline": 0 if any(outcome.trial == 0 for outcome in outcomes) else None,
        "best": max(eligible, key=lambda trial: eligible[trial]) if eligible else None,
        "nearest_miss": None,
        "started_at": "2026-03-01T22:00:00+00:00",
        "ended_at": "2026-03-02T04:00:00+00:00",
        "complete": True,
    }
    return StudyView(**{**values, **more})


def typical() -> StudyView:
    """A baseline, a better trial with two levels, and one without memory for its KV cache."""
    return study(
        complete(0, {}, label="baseline"),
        complete(
            1,
            {"max-num-seqs": 64, "gpu-memory-utilization": 0.9, "enable-prefix-caching": False},
            level("c=32", output_tps=300.0),
            level("c=64", output_tps=480.0),
        ),
        failed(2, {"max-num-seqs": 512, "gpu-memory-utilization": 0.3, "enable-prefix-caching": True}),
    )


def missed() -> StudyView:
    """No trial met the SLO; trial 1 comes closest."""
    outcomes = complete(0, {}, label="baseline"), complete(1, {"max-num-seqs": 16}, level(ttft_s=0.3))
    verdicts = {
        0: Verdict(outcomes[0].measured.levels[0], 400.0, slo_met=False, miss={"ttft_p99": 3.0}),
        1: Verdict(outcomes[1].measured.levels[0], 400.0, slo_met=False, miss={"ttft_p99": 1.2}),
    }
    return study(*outcomes, verdicts=verdicts, best=None, nearest_miss=1)
