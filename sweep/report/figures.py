"""The figures of a trial, one row each: column in the tables, name for people, unit, and where it comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from sweep.model import Dist, LevelStats, Outcome, ServerStats
from sweep.report.view import StudyView
from sweep.search.objectives import METRICS, dist_of, value_of
from sweep.slo import SLO_NAMES, split_slo
from sweep.text import limit_words, number, percent, printable, quantity, slo_label

LOW_N = "low n"
LOW_N_WORDS = f"{LOW_N}: too few requests for the figure to be more than a hint."


@dataclass(frozen=True, slots=True)
class Sample:
    """One level of one trial, or a trial without any."""

    outcome: Outcome
    level: LevelStats | None
    gpus: int


@dataclass(frozen=True, slots=True)
class Figure:
    """A column of the tables. With a label it also stands in comparisons; `better` says which way is up there.

    low_n: tells whether the figure rests on too few values.
    """

    column: str
    get: Callable[[Sample], float | int | None]
    label: str = ""
    unit: str = ""
    better: Literal["higher", "lower"] | None = None
    low_n: Callable[[Sample], bool] = lambda _sample: False


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

    def low_n(sample: Sample) -> bool:
        values: Dist | None = getattr(sample.level, dist, None)
        return values is not None and point in values.low_n

    return Figure(column, get, label, "ms", "lower", low_n)


def _level(column: str, name: str, label: str = "", unit: str = "") -> Figure:
    return Figure(column, lambda sample: getattr(sample.level, name, None), label, unit, "higher")


def _server(column: str, get: Callable[[ServerStats], float | int | None], label: str = "", unit: str = "") -> Figure:
    def of_sample(sample: Sample) -> float | int | None:
        stats = sample.level.server if sample.level else None
        return get(stats) if stats else None

    return Figure(column, of_sample, label, unit)


def _client(column: str, name: str, scale: float = 1, label: str = "", unit: str = "") -> Figure:
    def get(sample: Sample) -> float | None:
        value: float | None = getattr(sample.level.client, name, None) if sample.level else None
        return None if value is None else scale * value

    return Figure(column, get, label, unit)


def _end_of(name: str, end: Literal[0, 1]) -> Callable[[Sample], float | None]:
    def get(sample: Sample) -> float | None:
        interval = sample.level.intervals.get(name) if sample.level else None
        return None if interval is None else interval[end]

    return get


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def prefix_hit_frac(stats: ServerStats) -> float | None:
    """Return the share of the prompt tokens looked up in the prefix cache that were found there."""
    if not stats.prefix_queries_tokens or stats.prefix_hits_tokens is None:
        return None
    return stats.prefix_hits_tokens / stats.prefix_queries_tokens


def _offered(level: LevelStats | None) -> float | None:
    return level.prefix_offered_frac if level else None


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
    Figure("prefix_offered_frac", lambda sample: _offered(sample.level), "prompt tokens seen before", "%"),
    _server("prefix_hit_frac", prefix_hit_frac, "prefix cache hits", "%"),
    _server("queue_ms", lambda stats: _ms(stats.queue_s), "mean time in the queue", "ms"),
    _server("prefill_ms", lambda stats: _ms(stats.prefill_s), "mean prefill", "ms"),
    _server("decode_ms", lambda stats: _ms(stats.decode_s), "mean decode", "ms"),
    Figure("launch_s", lambda sample: sample.outcome.measured.times.launch_s, "launch", "s"),
    Figure("warmup_s", lambda sample: sample.outcome.measured.times.warmup_s),
    Figure("load_s", lambda sample: sample.outcome.measured.times.load_s),
    Figure("stop_s", lambda sample: sample.outcome.measured.times.stop_s),
)

# The client's own figures, and others that stand behind the fixed columns of the tables.
MORE: tuple[Figure, ...] = (
    _latency("ttfot_p50_ms", "ttfot_s", "p50", "time to first answer token p50"),
    Figure("rate_rps", lambda sample: sample.level.rate_rps if sample.level else None),
    Figure("output_tps_lo", _end_of("output_tps", 0)),
    Figure("output_tps_hi", _end_of("output_tps", 1)),
    _client("overhead_ms", "overhead_s", 1000, "TTFT, client - server", "ms"),
    _client("send_lag_ms", "send_lag_p99_s", 1000),
    _client("late_events_frac", "late_events_frac"),
)

_BRIEF = frozenset({"ttft_p99_ms", "tpot_p99_ms", "e2e_p99_ms", "output_tps", "request_rps", "goodput_rps"})


def limited(view: StudyView) -> tuple[Figure, ...]:
    """Return the figures that the SLOs are judged by, in an open loop those from the schedule."""
    return tuple(_limited(name, limit_s) for name, limit_s in view.slo.items())


def _limited(name: str, limit_s: float) -> Figure:
    def get(sample: Sample) -> float | None:
        values = dist_of(sample.level, name) if sample.level else None
        return None if values is None else 1000 * value_of(values, name)

    def low_n(sample: Sample) -> bool:
        values = dist_of(sample.level, name) if sample.level else None
        return values is not None and split_slo(name)[2] in values.low_n

    return Figure(f"slo_{name}_ms", get, f"{slo_label(name)}, SLO {limit_words(limit_s)}", "ms", "lower", low_n)


def objective_interval(view: StudyView, outcome: Outcome, level: LevelStats | None) -> tuple[float, float] | None:
    """Return the 95 % interval of what a trial is judged by, in its own unit; None where there is none.

    It is of the one launch that was measured: how much launches differ, it does not know.
    """
    name = next((name for name, metric in METRICS.items() if metric.label == view.objective), None)
    if level is None or name is None:
        return None
    if name in SLO_NAMES:
        values = dist_of(level, name)
        interval, scale = (values.ci.get(split_slo(name)[2]) if values else None), 1000.0
    elif name == "output_tps_per_gpu":
        interval, scale = level.intervals.get("output_tps"), 1 / sample(view, outcome, level).gpus
    else:
        interval, scale = level.intervals.get(name), 1.0
    return None if interval is None else (scale * interval[0], scale * interval[1])


def interval_words(interval: tuple[float, float] | None) -> str:
    return "-" if interval is None else f"{number(interval[0])} to {number(interval[1])}"


def sample(view: StudyView, outcome: Outcome, level: LevelStats | None) -> Sample:
    return Sample(outcome, level, view.trial_gpus.get(outcome.trial, view.gpus))


def compare(view: StudyView, trial: int, *, brief: bool = False) -> list[Row]:
    """Put a trial beside the baseline, figure by figure; what neither of them has is left out."""
    outcome, base = view.outcome(trial), view.outcome(view.baseline)
    if outcome is None or base is None or base.trial == trial:
        return []
    left, right = sample(view, base, view.level(base.trial)), sample(view, outcome, view.level(trial))
    labelled = [figure for figure in (*FIGURES, *MORE) if figure.label and (figure.column in _BRIEF or not brief)]
    before, after = (interval_words(objective_interval(view, one.outcome, one.level)) for one in (left, right))
    rows = [
        Row("load", left.level.level if left.level else "-", right.level.level if right.level else "-", "", None),
        Row(f"{printable(view.objective)}, 95 % interval", before, after, "", None),
        *(_row(figure, left, right) for figure in (*limited(view), *labelled)),
    ]
    return [row for row in rows if (row.baseline, row.shown) != ("-", "-") or row.label == "load"]


def _row(figure: Figure, base_sample: Sample, shown_sample: Sample) -> Row:
    base, shown = figure.get(base_sample), figure.get(shown_sample)
    change = (shown - base) / base if base and shown is not None else None
    scale = 100 if figure.unit == "%" else 1
    left, right = (
        quantity(None if value is None else scale * value, figure.unit) + (f", {LOW_N}" if figure.low_n(one) else "")
        for value, one in ((base, base_sample), (shown, shown_sample))
    )
    improved = None if change is None or figure.better is None else (change > 0) == (figure.better == "higher")
    return Row(figure.label, left, right, "" if change is None else percent(change), improved if change else None)
