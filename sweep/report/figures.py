"""The figures of a trial, one row each: column in the tables, name for people, unit, and where it comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from sweep.model import Dist, LevelStats, Outcome, ServerStats
from sweep.report.view import StudyView
from sweep.text import limit_words, percent, quantity, slo_label


@dataclass(frozen=True, slots=True)
class Sample:
    """One level of one trial, or a trial without any."""

    outcome: Outcome
    level: LevelStats | None
    gpus: int


@dataclass(frozen=True, slots=True)
class Figure:
    """A column of the tables. With a label it also stands in comparisons; `better` says which way is up there."""

    column: str
    get: Callable[[Sample], float | int | None]
    label: str = ""
    unit: str = ""
    better: Literal["higher", "lower"] | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a comparison, ready to print. improved: None where neither way is better."""

    label: str
    baseline: str
    shown: str
    change: str
    improved: bool | None


def _latency(column: str, dist: str, point: str, label: str = "") -> Figure:
    def get(sample: Sample) -> float | None:
        values: Dist | None = getattr(sample.level, dist, None)
        return None if values is None else 1000 * float(getattr(values, point))

    return Figure(column, get, label, "ms", "lower")


def _level(column: str, name: str, label: str = "", unit: str = "") -> Figure:
    return Figure(column, lambda sample: getattr(sample.level, name, None), label, unit, "higher")


def _server(column: str, get: Callable[[ServerStats], float | int | None], label: str = "", unit: str = "") -> Figure:
    def of_sample(sample: Sample) -> float | int | None:
        stats = sample.level.server if sample.level else None
        return get(stats) if stats else None

    return Figure(column, of_sample, label, unit)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def prefix_hit_frac(stats: ServerStats) -> float | None:
    """Return the share of the prompt tokens looked up in the prefix cache that were found there."""
    if not stats.prefix_queries_tokens or stats.prefix_hits_tokens is None:
        return None
    return stats.prefix_hits_tokens / stats.prefix_queries_tokens


def _per_gpu(sample: Sample) -> float | None:
    tps = sample.level.output_tps if sample.level else None
    return None if tps is None else tps / sample.gpus


FIGURES: tuple[Figure, ...] = (
    _latency("ttft_p50_ms", "ttft_s", "p50", "TTFT p50"),
    _latency("ttft_p99_ms", "ttft_s", "p99", "TTFT p99"),
    _latency("tpot_p50_ms", "tpot_s", "p50", "TPOT p50"),
    _latency("tpot_p99_ms", "tpot_s", "p99", "TPOT p99"),
    _latency("itl_p99_ms", "itl_s", "p99", "ITL p99"),
    _latency("e2e_p99_ms", "e2e_s", "p99", "E2E p99"),
    _latency("ttft_sched_p99_ms", "ttft_sched_s", "p99", "TTFT p99 from schedule"),
    _level("output_tps", "output_tps", "output", "tok/s"),
    _level("total_tps", "total_tps", "input + output", "tok/s"),
    _level("request_rps", "request_rps", "requests", "/s"),
    _level("goodput_rps", "goodput_rps", "goodput", "/s"),
    Figure("gpus", lambda sample: sample.gpus),
    Figure("output_tps_per_gpu", _per_gpu),
    Figure("kv_cache_tokens", lambda sample: sample.outcome.measured.server.kv_cache_tokens, "KV cache", "tokens"),
    Figure("max_concurrency", lambda sample: sample.outcome.measured.server.max_concurrency),
    _server("kv_usage_peak", lambda stats: stats.kv_usage_peak_frac, "KV cache used at peak", "%"),
    _server("preemptions", lambda stats: stats.preemptions, "preemptions"),
    _level("prefix_offered_frac", "prefix_offered_frac"),
    _server("prefix_hit_frac", prefix_hit_frac, "prefix cache hits", "%"),
    _server("queue_ms", lambda stats: _ms(stats.queue_s), "mean time in the queue", "ms"),
    _server("prefill_ms", lambda stats: _ms(stats.prefill_s), "mean prefill", "ms"),
    _server("decode_ms", lambda stats: _ms(stats.decode_s), "mean decode", "ms"),
    Figure("launch_s", lambda sample: sample.outcome.measured.times.launch_s, "launch", "s"),
    Figure("warmup_s", lambda sample: sample.outcome.measured.times.warmup_s),
    Figure("load_s", lambda sample: sample.outcome.measured.times.load_s),
    Figure("stop_s", lambda sample: sample.outcome.measured.times.stop_s),
)

_BRIEF = frozenset({"ttft_p99_ms", "tpot_p99_ms", "e2e_p99_ms", "output_tps", "request_rps", "goodput_rps"})


def limited(view: StudyView) -> tuple[Figure, ...]:
    """Return the figures that the SLOs are judged by, in an open loop those from the schedule."""
    return tuple(_limited(name, limit_s) for name, limit_s in view.slo.items())


def _limited(name: str, limit_s: float) -> Figure:
    metric, _, stat = name.partition("_")

    def get(sample: Sample) -> float | None:
        scheduled: Dist | None = getattr(sample.level, f"{metric}_sched_s", None)
        values: Dist | None = scheduled or getattr(sample.level, f"{metric}_s", None)
        return None if values is None else 1000 * float(getattr(values, stat))

    return Figure(f"slo_{name}_ms", get, f"{slo_label(name)}, SLO {limit_words(limit_s)}", "ms", "lower")


def sample(view: StudyView, outcome: Outcome, level: LevelStats | None) -> Sample:
    return Sample(outcome, level, view.trial_gpus.get(outcome.trial, view.gpus))


def compare(view: StudyView, trial: int, *, brief: bool = False) -> list[Row]:
    """Put a trial beside the baseline, figure by figure; what neither of them has is left out."""
    outcome, base = view.outcome(trial), view.outcome(view.baseline)
    if outcome is None or base is None or base.trial == trial:
        return []
    left, right = sample(view, base, view.level(base.trial)), sample(view, outcome, view.level(trial))
    labelled = [figure for figure in FIGURES if figure.label and (figure.column in _BRIEF or not brief)]
    labelled = [*limited(view), *labelled]
    rows = [_row(figure, figure.get(left), figure.get(right)) for figure in labelled]
    load = Row("load", left.level.level if left.level else "-", right.level.level if right.level else "-", "", None)
    return [load, *(row for row in rows if (row.baseline, row.shown) != ("-", "-"))]


def _row(figure: Figure, base: float | None, shown: float | None) -> Row:
    change = (shown - base) / base if base and shown is not None else None
    scale = 100 if figure.unit == "%" else 1
    left, right = (quantity(None if value is None else scale * value, figure.unit) for value in (base, shown))
    improved = None if change is None or figure.better is None else (change > 0) == (figure.better == "higher")
    return Row(figure.label, left, right, "" if change is None else percent(change), improved if change else None)
