"""Which trials come before the search: the baseline, what the user wants tried, and what a crash interrupted. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sweep.config import SweepConfig
from sweep.model import Failure, Flags, Outcome, Source
from sweep.run.ledger import key_of

MAX_ATTEMPTS = 3
_UTILIZATION = "gpu-memory-utilization"


@dataclass(frozen=True, slots=True)
class Planned:
    """A trial that is to be run. token: what the sampler knows it by; None when the sampler did not propose it."""

    flags: Flags
    source: Source
    label: str | None = None
    attempt: int = 1
    token: Any = None
    violation: str | None = None  # a rule that forbids it: it is recorded as skipped and costs no launch

    @property
    def key(self) -> str:
        return self.label or key_of(self.flags)


def first_trials(config: SweepConfig, outcomes: Sequence[Outcome]) -> list[Planned]:
    """Return what is to be run before the sampler is asked, less what has been run already.

    The baseline comes first, then the enqueued entries, then interrupted trials, each at most MAX_ATTEMPTS times.
    """
    planned = [Planned(config.baseline, "baseline", "baseline")]
    planned += [
        Planned(flags, "search", f"enqueued {number}") for number, flags in enumerate(config.search.enqueue, start=1)
    ]
    done = {_key(outcome) for outcome in outcomes if outcome.state != "interrupted"}
    interrupted: dict[str, Outcome] = {
        _key(outcome): outcome for outcome in outcomes if outcome.state == "interrupted" and _key(outcome) not in done
    }
    todo = []
    for plan in planned:
        if plan.key not in done:
            before = interrupted.pop(plan.key, None)
            todo.append(replace(plan, attempt=before.attempt + 1) if before else plan)
    todo += [Planned(o.flags, o.source, o.label, o.attempt + 1) for o in interrupted.values()]
    return [plan for plan in todo if plan.attempt <= MAX_ATTEMPTS]


def _key(outcome: Outcome) -> str:
    return outcome.label or key_of(outcome.flags)


def retry_of(planned: Planned, failure: Failure) -> Planned | None:
    """Return the same trial once more if the world, not its configuration, was at fault."""
    if failure.treatment != "retry" or planned.attempt >= MAX_ATTEMPTS:
        return None
    return replace(planned, attempt=planned.attempt + 1, token=None)


def replacement_of(config: SweepConfig, planned: Planned, failure: Failure) -> Planned | None:
    """Return a baseline that has a chance where the wanted one does not fit: the same with another utilization.

    What the message says is free is used if it says so, less 2 % since it moves; else the middle of what is searched.
    """
    if planned.source != "baseline" or planned.label != "baseline" or not failure.kind.startswith("oom_"):
        return None
    bounds = failure.bounds or {}
    free, total = bounds.get("free_gib"), bounds.get("total_gib")
    if failure.kind == "oom_free_memory_lt_requested" and free and total:
        utilization = int(100 * free / total) / 100 - 0.02
    elif _UTILIZATION in config.search.params:
        values = config.search.params[_UTILIZATION].values()
        middle = values[len(values) // 2]
        utilization = float(middle) if isinstance(middle, int | float) else 0.0
    else:
        return None
    utilization = round(utilization, 2)
    if not 0 < utilization < 1 or utilization == config.flags(planned.flags).get(_UTILIZATION):
        return None
    return Planned({**planned.flags, _UTILIZATION: utilization}, "baseline", "baseline, replaced")
