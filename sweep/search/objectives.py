"""What a measurement is worth: metrics, service-level objectives (SLOs), and the verdict on a trial."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from sweep.model import FEWEST, Dist, KindStats, LevelStats, Measured, Verdict
from sweep.section import Section, did_you_mean
from sweep.slo import KNOWN_WORDS, SLO_NAMES, TAIL_FRAC, Limits, split_slo
from sweep.text import limit_words, quantity, slo_label

Direction: TypeAlias = Literal["maximize", "minimize"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a level. `get` takes the level and the number of GPUs and answers in `unit`."""

    label: str
    unit: str
    direction: Direction
    get: Callable[[LevelStats, int], float | None]


# An open loop is judged from the time at which a request was due: a late client must not flatter the server.
LATENCIES: Mapping[str, tuple[str, Callable[[LevelStats | KindStats], Dist | None]]] = {
    "ttft": ("TTFT", lambda level: level.ttft_sched_s or level.ttft_s),
    "tpot": ("TPOT", lambda level: level.tpot_s),
    "itl": ("ITL", lambda level: level.itl_s),
    "e2e": ("E2E latency", lambda level: level.e2e_sched_s or level.e2e_s),
}
RATES: Mapping[str, Metric] = {
    "output_tps": Metric("output throughput", "tok/s", "maximize", lambda level, _: level.output_tps),
    "total_tps": Metric("total throughput", "tok/s", "maximize", lambda level, _: level.total_tps),
    "request_rps": Metric("request rate", "req/s", "maximize", lambda level, _: level.request_rps),
    "goodput_rps": Metric("goodput", "req/s", "maximize", lambda level, _: level.goodput_rps),
    "output_tps_per_gpu": Metric(
        "output throughput per GPU",
        "tok/s",
        "maximize",
        lambda level, gpus: None if level.output_tps is None else level.output_tps / gpus,
    ),
    "rate_rps": Metric("sustained request rate", "req/s", "maximize", lambda level, _: level.rate_rps),
}


def _latency_metric(name: str) -> Metric:
    def get(level: LevelStats, _gpus: int) -> float | None:
        dist = dist_of(level, name)
        return None if dist is None else 1000 * value_of(dist, name)

    _, latency, stat = split_slo(name)
    return Metric(f"{LATENCIES[latency][0]} {stat}", "ms", "minimize", get)


METRICS: Mapping[str, Metric] = {
    **RATES,
    **{name: _latency_metric(name) for name in SLO_NAMES},
}
# The parts of a balance. Medians, since the tail of a short run is mostly noise.
BALANCED: Mapping[str, str] = {"ttft": "ttft_p50", "tpot": "tpot_p50", "throughput": "output_tps"}


def _hint(word: object, known: tuple[str, ...]) -> str:
    return did_you_mean(str(word), known).replace("-", "_")


def _known(role: Literal["maximize", "minimize"]) -> str:
    return ", ".join(RATES) if role == "maximize" else KNOWN_WORDS


class Objective(Section):
    """What the search works towards: one metric, or a balance of three; beside it limits on latencies.

    slo: metric -> limit in seconds. balance: weights of ttft, tpot and throughput.
    """

    maximize: str | None = Field(default=None, description=", ".join(RATES))
    minimize: str | None = Field(default=None, description="a latency, such as ttft_p99")
    balance: dict[str, float] | None = Field(default=None, description=f"weights of {', '.join(BALANCED)}")
    slo: Limits = Field(default_factory=dict, description="limits on latencies, such as {ttft_p99: 500ms}")

    @model_validator(mode="before")
    @classmethod
    def _is_one_objective(cls, raw: Any) -> Any:
        several = isinstance(raw, list) or (isinstance(raw, dict) and "pareto" in raw)
        chosen = [key for key in ("maximize", "minimize", "balance") if isinstance(raw, dict) and raw.get(key)]
        if several or len(chosen) > 1:
            raise ValueError(
                "several objectives at once (a Pareto front) are not available yet; choose one, or weigh them as in"
                " {balance: {ttft: 1, tpot: 1, throughput: 2}}"
            )
        if isinstance(raw, str):
            raise ValueError(f"write {{maximize: {raw}}} or {{minimize: {raw}}}")  # noqa: TRY004 - for pydantic
        if isinstance(raw, dict) and not chosen:
            raise ValueError(f"one of maximize, minimize or balance is missing; maximize takes {_known('maximize')}")
        return raw

    @field_validator("maximize", "minimize")
    @classmethod
    def _is_a_metric(cls, name: str | None, info: Any) -> str | None:
        if name is None:
            return None
        own: Direction = info.field_name
        fitting = tuple(known for known, metric in METRICS.items() if metric.direction == own)
        if name in METRICS and name not in fitting:
            raise ValueError(f"{name} is to be {METRICS[name].direction}d: write {{{METRICS[name].direction}: {name}}}")
        if name not in fitting:
            raise ValueError(f"unknown metric {name!r}{_hint(name, fitting)}; known are {_known(own)}")
        return name

    @field_validator("balance")
    @classmethod
    def _has_weights(cls, balance: dict[str, float] | None) -> dict[str, float] | None:
        for name, weight in (balance or {}).items():
            if name not in BALANCED:
                raise ValueError(
                    f"unknown part {name!r}{_hint(name, tuple(BALANCED))}; known are {', '.join(BALANCED)}"
                )
            if weight < 0:
                raise ValueError(f"the weight of {name} is {weight}; weights are 0 or more")
        if balance is not None and not any(balance.values()):
            raise ValueError("all weights are 0; give at least one part a weight above 0")
        return balance

    def with_limits(self, extra: Mapping[str, float]) -> Objective:
        """Return the objective with more limits, such as those of the classes of a load: "chat.ttft_p99" -> seconds."""
        return self.model_copy(update={"slo": {**self.slo, **extra}})

    def problem(self) -> str | None:
        """Return what is missing once all limits are known, as a sentence."""
        if self.maximize in {"goodput_rps", "rate_rps"} and not self.slo:
            return f"{self.maximize} is of requests within limits: add slo, such as slo: {{ttft_p99: 500ms}}"
        return None

    @property
    def metric(self) -> Metric | None:
        """The metric that is maximized or minimized; None for a balance."""
        name = self.maximize or self.minimize
        return METRICS[name] if name else None

    @property
    def direction(self) -> Direction:
        return self.metric.direction if self.metric else "maximize"

    @property
    def unit(self) -> str:
        """The unit of every verdict's value; a balance counts in multiples of the baseline."""
        return self.metric.unit if self.metric else "x"

    @property
    def label(self) -> str:
        if self.metric:
            return self.metric.label
        parts = [f"{name} {weight:g}" for name, weight in (self.balance or {}).items()]
        return f"balance over the baseline ({', '.join(parts)})"

    @property
    def words(self) -> str:
        """The whole objective in one line: maximize output throughput with TTFT p99 <= 500 ms."""
        limits = [f"{slo_label(name)} <= {limit_words(limit_s)}" for name, limit_s in self.slo.items()]
        return f"{self.direction} {self.label}" + (f" with {', '.join(limits)}" if limits else "")

    def describe(self, value: float | None) -> str:
        """Write a verdict's value for people: 1,842 tok/s."""
        return quantity(value, self.unit)

    def ratios(self, level: LevelStats) -> dict[str, float]:
        """Return measured / limit for every SLO that the level can be judged by; above 1 is a miss.

        Latencies are of requests that succeeded, of the class that the SLO names. Where more failed than a percentile
        leaves out, its SLO is missed, whatever the others needed.
        """
        ratios = {}
        for name, limit_s in self.slo.items():
            part, dist = _part(level, name), dist_of(level, name)
            if part is None:
                continue
            failed_frac = part.failed / (part.failed + part.completed) if part.failed else 0.0
            if dist is not None:
                ratios[name] = value_of(dist, name) / limit_s
            if failed_frac > TAIL_FRAC[split_slo(name)[2]]:
                ratios[name] = max(ratios.get(name, 0.0), 1 + failed_frac)
        return ratios

    def _unknown(self, level: LevelStats) -> bool:
        """Tell whether an SLO's latency was not measured at all, so that nobody knows whether it is met.

        Answers of one token have no TPOT and no ITL, and meet every limit on them.
        """
        for name in self.slo:
            part, vacuous = _part(level, name), split_slo(name)[1] in {"tpot", "itl"}
            if part is None or part.completed + part.failed == 0:
                return True
            if part.completed and dist_of(level, name) is None and not vacuous:
                return True
        return False

    def judge(self, measured: Measured, baseline: Measured | None, gpus: int) -> Verdict:
        """Return what a trial is worth. Only a complete trial is worth anything; baseline: needed by a balance.

        The figures are of the highest level that meets every SLO, without SLOs of the last one; if no level meets
        them, of the nearest miss: the level whose largest ratio is smallest.
        """
        if measured.state != "complete":
            return Verdict(None, None, None)
        level = self._choose(measured)
        if level is None:
            reasons = [reason for each in measured.levels for reason in each.reasons]
            return Verdict(None, None, None, note="; ".join(["no level could be measured", *dict.fromkeys(reasons)]))
        value = self._value(level, baseline, gpus)
        notes = [*_invalid_notes(measured), *self._doubts(level)]
        if value is None:
            notes.append("no baseline to compare with" if self.balance else f"{self.label} was not measured")
        met = self.met(level) if self._limited else None
        return Verdict(level, value, met, {} if met else _misses(self.ratios(level)), "; ".join(notes) or None)

    @property
    def _limited(self) -> bool:
        return bool(self.slo) or self.maximize == "rate_rps"

    def met(self, level: LevelStats) -> bool:
        """Tell whether a level met every SLO; what a judge was sure of while it ran counts more than percentiles."""
        if level.verdict in {"fail", "unstable"} or (self.maximize == "rate_rps" and level.stable is False):
            return False  # a rate whose queue grows cannot be kept
        if self._unknown(level):
            return False
        return level.verdict == "pass" or not _misses(self.ratios(level))

    def _choose(self, measured: Measured) -> LevelStats | None:
        usable = [level for level in measured.levels if level.valid and level.completed > 0]
        if not self._limited:
            # The figures are of the last level: a trial that cannot carry it must not be judged on a lighter one.
            return usable[-1] if usable and usable[-1] is measured.levels[-1] else None
        if not usable:
            return None
        usable.sort(key=_load)
        met = [level for level in usable if self.met(level)]
        return met[-1] if met else min(usable, key=lambda level: max(self.ratios(level).values(), default=math.inf))

    def _value(self, level: LevelStats, baseline: Measured | None, gpus: int) -> float | None:
        if self.metric:
            return self.metric.get(level, gpus)
        base = self._choose(baseline) if baseline else None
        weights = {name: weight for name, weight in (self.balance or {}).items() if weight}
        log_sum = 0.0
        for name, weight in weights.items():
            metric = METRICS[BALANCED[name]]
            own, other = metric.get(level, gpus), metric.get(base, gpus) if base else None
            if not own or not other:
                return None
            log_sum += weight * math.log(own / other if metric.direction == "maximize" else other / own)
        return math.exp(log_sum / sum(weights.values()))

    def _doubts(self, level: LevelStats) -> list[str]:
        """Say which SLOs were judged on too few requests, and where requests failed."""
        doubts = []
        for name in self.slo:
            part, dist = _part(level, name), dist_of(level, name)
            fewest = FEWEST[split_slo(name)[2]]
            if part is None or dist is None:
                doubts.append(f"{name} was not measured")
            elif part.completed < fewest:
                doubts.append(f"{name} rests on {part.completed} requests, {fewest} would make it sure")
        if level.failed:
            doubts.append(f"{level.failed} of {level.failed + level.completed} requests failed")
        return doubts

    def rank(self, verdict: Verdict) -> tuple[float, ...]:
        """Return a sort key, the best trial first: eligible ones by value, then the nearest misses, then the rest."""
        if verdict.value is None:
            return (2,)
        signed = -verdict.value if self.direction == "maximize" else verdict.value
        return (0, signed) if verdict.eligible else (1, max(verdict.miss.values(), default=math.inf), signed)

    def better(self, a: Verdict, b: Verdict) -> bool:
        return self.rank(a) < self.rank(b)


def _part(level: LevelStats, name: str) -> LevelStats | KindStats | None:
    """Return what an SLO is about: the class that it names, or the whole level."""
    kind = split_slo(name)[0]
    return level if kind is None else level.kinds.get(kind)


def dist_of(level: LevelStats, name: str) -> Dist | None:
    """Return the latency that a name such as ttft_p99 or chat.ttft_p99 speaks of; None where it was not measured."""
    part = _part(level, name)
    return None if part is None else LATENCIES[split_slo(name)[1]][1](part)


def value_of(dist: Dist, name: str) -> float:
    """Return the statistic that a name such as ttft_p99 speaks of, in seconds."""
    return float(getattr(dist, split_slo(name)[2]))


def _misses(ratios: Mapping[str, float]) -> dict[str, float]:
    return {name: ratio for name, ratio in ratios.items() if ratio > 1}


def _load(level: LevelStats) -> float:
    """Return the load of a level: its rate, or 64 for "c=64". Sorting is stable, so other names keep their order."""
    if level.rate_rps is not None:
        return level.rate_rps
    try:
        return float(level.level.partition("=")[2])
    except ValueError:
        return 0.0


def _invalid_notes(measured: Measured) -> list[str]:
    return [
        f"{level.level} is not valid ({', '.join(level.reasons) or 'no reason given'})"
        for level in measured.levels
        if not level.valid
    ]
