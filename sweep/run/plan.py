"""Which trials come before the search: the baseline, what the user wants tried, and what a crash interrupted. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sweep.config import SweepConfig
from sweep.failure import Failure, FailureKind
from sweep.model import Flags, FlagValue, Outcome, Source
from sweep.run.ledger import key_of

MAX_ATTEMPTS = 3
_UTILIZATION = "gpu-memory-utilization"
_REPLACED = "baseline, replaced"
# Which way gpu-memory-utilization has to go to cure a memory failure.
_HELPED_BY: dict[FailureKind, Literal["more", "less"]] = {
    "oom_kv_cache_none": "more",
    "oom_kv_cache_too_small": "more",
    "oom_free_memory_lt_requested": "less",
    "oom_activation_profile": "less",
    "oom_cudagraph_capture": "less",
    "oom_sampler_warmup": "less",
    "oom_runtime": "less",
}


@dataclass(frozen=True, slots=True)
class Planned:
    """A trial that is to be run. token: what the sampler knows it by; None when the sampler did not propose it."""

    flags: Flags
    source: Source
    label: str | None = None
    attempt: int = 1
    token: Any = None
    impossible: Failure | None = None  # why it cannot run: it is recorded as skipped and costs no launch

    @property
    def key(self) -> str:
        return self.label or key_of(self.flags)


def pending(config: SweepConfig, outcomes: Sequence[Outcome]) -> list[Planned]:
    """Return what is to be run before the sampler is asked, as far as the outcomes do not settle it.

    The baseline comes first, after it what replaces it where it cannot run, then the enqueued entries, then trials of
    the search that are to be repeated. Nothing of this is kept anywhere else, so a stop at any time loses none of it.
    """
    last = {label_of(outcome): outcome for outcome in outcomes}
    wanted = [Planned(config.baseline, "baseline", "baseline")]
    for number, flags in enumerate(config.search.enqueue, start=1):
        if all(key_of(flags) != key_of(plan.flags) for plan in wanted):
            wanted.append(Planned(flags, "search", f"enqueued {number}"))
    todo = []
    for plan in wanted:
        known = last.pop(plan.key, None)
        again = plan if known is None else _again(known)
        todo += [again] if again else []
        if plan.source == "baseline" and known is not None and _REPLACED not in last:
            replacement = replacement_of(config, known)
            todo += [replacement] if replacement else []
    return todo + [again for outcome in last.values() if (again := _again(outcome))]


def label_of(outcome: Outcome) -> str:
    """Return what all tries of one trial have in common."""
    return outcome.label or key_of(outcome.flags)


def _again(outcome: Outcome) -> Planned | None:
    """Return the trial once more if nothing is known of its configuration yet.

    What stopped the whole sweep was mended, or the user would not have started it again. What failed through no fault
    of its own has MAX_ATTEMPTS; a trial that was stopped by the user loses none of them.
    """
    failure = outcome.measured.failure
    plan = Planned(outcome.flags, outcome.source, outcome.label, outcome.attempt)
    if outcome.state == "interrupted" and failure is None:
        return plan
    if failure is not None and outcome.state in {"failed", "interrupted"}:
        if failure.treatment == "abort_sweep":
            return plan
        if failure.treatment == "retry" and outcome.attempt < MAX_ATTEMPTS:
            return replace(plan, attempt=outcome.attempt + 1)
    return None


def replacement_of(config: SweepConfig, baseline: Outcome) -> Planned | None:
    """Return a baseline that has a chance where the wanted one does not fit: the same with another utilization.

    Where less is free than asked for: what the message says is free, less 2 % since it moves. Where the KV cache finds
    no room: the highest value that is searched; for other memory failures the lowest. Weights that do not fit are not
    helped by any.
    """
    failure = baseline.measured.failure
    if baseline.state != "infeasible" or failure is None or failure.kind not in _HELPED_BY:
        return None
    bounds = failure.bounds or {}
    free, total = bounds.get("free_bytes"), bounds.get("total_bytes")
    present = config.flags(baseline.flags).get(_UTILIZATION)
    if failure.kind == "oom_free_memory_lt_requested" and free and total:
        utilization: FlagValue = round(int(100 * free / total) / 100 - 0.02, 2)
    elif _UTILIZATION in config.search.params:
        values = config.search.params[_UTILIZATION].values()
        utilization = values[-1] if _HELPED_BY[failure.kind] == "more" else values[0]
        if isinstance(present, int | float) and isinstance(utilization, int | float):
            helps = utilization > present if _HELPED_BY[failure.kind] == "more" else utilization < present
            utilization = utilization if helps else None
    else:
        utilization = None
    if not isinstance(utilization, int | float) or not 0 < utilization < 1 or utilization == present:
        return None
    return Planned({**baseline.flags, _UTILIZATION: utilization}, "baseline", _REPLACED)
