"""What the report knows of a study: values, and nothing that needs a search or a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sweep.model import Flags, FlagValue, LevelStats, Outcome, Verdict
from sweep.text import limit_words, number, percent, printable, quantity, slo_label


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyView:
    """A study as its reports show it.

    folder: as people should type it. device: "1 x NVIDIA H200" or "CPU". environment: what environment.json holds.
    objective: its label ("output throughput"); unit: of every verdict's value. slo: name -> limit in seconds.
    baseline, best, nearest_miss: trial numbers. nearest_miss is set only if no trial met the SLOs, best is then None.
    load_words: what is sent, in one line. gpus: of a launch; trial_gpus: where a trial differs.
    """

    name: str
    folder: str
    model: str
    revision: str | None
    device: str
    vllm_version: str | None
    environment: Mapping[str, Any]
    objective: str
    unit: str
    direction: Literal["maximize", "minimize"]
    slo: Mapping[str, float]
    swept: tuple[str, ...]
    levels: tuple[str, ...]
    load_words: str
    gpus: int
    outcomes: Sequence[Outcome]
    verdicts: Mapping[int, Verdict]
    baseline: int | None
    best: int | None
    nearest_miss: int | None
    started_at: str
    ended_at: str | None
    complete: bool  # False: stopped early, or still running
    trial_gpus: Mapping[int, int] = field(default_factory=dict)
    runner_up: int | None = None  # the best trial but the one that is handed out
    command: str = "vllm serve"  # how this vLLM is started
    defaults: Mapping[str, FlagValue] = field(
        default_factory=dict
    )  # what vLLM made of the swept flags that were left out
    notes: Sequence[str] = ()

    def outcome(self, trial: int | None) -> Outcome | None:
        return next((outcome for outcome in self.outcomes if outcome.trial == trial), None)

    def value(self, trial: int | None) -> float | None:
        verdict = None if trial is None else self.verdicts.get(trial)
        return verdict.value if verdict else None

    def level(self, trial: int | None) -> LevelStats | None:
        """Return the level that the trial's figures are of."""
        verdict = None if trial is None else self.verdicts.get(trial)
        return verdict.level if verdict else None

    @property
    def shown(self) -> int | None:
        """The trial whose configuration is handed out: the best one, or the nearest miss."""
        return self.nearest_miss if self.best is None else self.best

    @property
    def beside(self) -> int | None:
        """The trial put beside the baseline: the one handed out, or where that is the baseline, the next best."""
        return self.runner_up if self.shown == self.baseline else self.shown

    def gain_frac(self, trial: int | None) -> float | None:
        """Return the gain over the baseline; positive is better, whatever the direction."""
        value, base = self.value(trial), self.value(self.baseline)
        if value is None or not base:
            return None
        change = (value - base) / abs(base)
        return change if self.direction == "maximize" else -change

    @property
    def workload(self) -> str:
        """The load in one line: its levels, then what is sent."""
        return printable(", ".join(part for part in (" ".join(self.levels), self.load_words) if part))

    @property
    def slo_words(self) -> str:
        return ", ".join(f"{slo_label(name)} <= {limit_words(limit)}" for name, limit in self.slo.items())

    def title(self, trial: int) -> str:
        """Name a trial: "trial 7", or "trial 0 (baseline)" when its story has a name."""
        outcome = self.outcome(trial)
        label = outcome.label if outcome else None
        return f"trial {trial} ({printable(label)})" if label else f"trial {trial}"

    def result(self, trial: int) -> str:
        """Write a trial's objective with its unit and its distance from the baseline."""
        text = quantity(self.value(trial), self.unit)
        gain = None if trial == self.baseline else self.gain_frac(trial)
        base = quantity(self.value(self.baseline), self.unit)
        return text if gain is None else f"{text} ({_against(gain)} the baseline's {base})"

    def misses(self, trial: int) -> list[str]:
        """Say which SLOs the trial missed and by how much, the worst first."""
        miss = self.verdicts[trial].miss if trial in self.verdicts else {}
        return [_miss(name, ratio, self.slo.get(name)) for name, ratio in sorted(miss.items(), key=lambda m: -m[1])]


def _against(gain_frac: float) -> str:
    return f"{percent(abs(gain_frac)).lstrip('+')} {'better' if gain_frac >= 0 else 'worse'} than"


def _miss(name: str, ratio: float, limit_s: float | None) -> str:
    if limit_s is None:
        return f"{slo_label(name)} is {number(ratio)} times its limit"
    words = limit_words(ratio * limit_s)
    return f"{slo_label(name)} is {words}, the limit is {limit_words(limit_s)} ({percent(ratio - 1)})"


def changes(view: StudyView, trial: int) -> Flags:
    """Return the trial's flags that the baseline does not set to the same value."""
    base, outcome = view.outcome(view.baseline), view.outcome(trial)
    known = base.flags if base else {}
    return {name: value for name, value in (outcome.flags if outcome else {}).items() if known.get(name) != value}
