"""What a study has found so far: its outcomes, seen through the objective. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sweep.model import Flags, Outcome, State, Verdict
from sweep.run.hindsight import UNEXPLAINED
from sweep.search.objectives import Objective

# States that used up a try. Skipped trials cost no launch, and interrupted ones are run again.
COUNTED: frozenset[State] = frozenset({"complete", "infeasible", "pruned", "invalid", "failed"})


def gpus_of(flags: Flags) -> int:
    """Return how many GPUs a server with these flags takes: the product of its parallel sizes."""
    product = 1
    for name in ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size"):
        size = flags.get(name, 1)
        product *= size if isinstance(size, int) else 1
    return product


def key_of(flags: Flags) -> str:
    """Return a text that is equal for equal flags."""
    return json.dumps(flags, sort_keys=True)


class Ledger:
    """The outcomes in order of their trials, and everything that can be derived from them without a file or a clock."""

    def __init__(self, objective: Objective, fixed: Flags, outcomes: Sequence[Outcome] = ()) -> None:
        self._objective = objective
        self._fixed = fixed
        self.outcomes: list[Outcome] = list(outcomes)
        self.verdicts: dict[int, Verdict] = {}
        self._judge()

    def add(self, outcome: Outcome) -> Verdict:
        self.outcomes.append(outcome)
        self._judge()
        return self.verdicts[outcome.trial]

    def _judge(self) -> None:
        """Judge all trials anew: an objective of ratios changes its values once a baseline is there."""
        reference = self.baseline.measured if self.baseline else None
        self.verdicts = {
            outcome.trial: self._objective.judge(outcome.measured, reference, self.gpus(outcome))
            for outcome in self.outcomes
        }

    def gpus(self, outcome: Outcome) -> int:
        return gpus_of({**self._fixed, **outcome.flags})

    @property
    def baseline(self) -> Outcome | None:
        """The trial that gains are counted from: a baseline that ran, else the first trial that did."""
        complete = [outcome for outcome in self.outcomes if outcome.state == "complete"]
        baselines = [outcome for outcome in complete if outcome.source == "baseline"]
        return next(iter([*baselines, *complete]), None)

    @property
    def ranked(self) -> list[Outcome]:
        """Return the trials that measured something, the best one first."""
        complete = [outcome for outcome in self.outcomes if outcome.state == "complete"]
        return sorted(complete, key=lambda outcome: self._objective.rank(self.verdicts[outcome.trial]))

    @property
    def best(self) -> Outcome | None:
        """The best trial that met every SLO, if one did."""
        return next((outcome for outcome in self.ranked if self.verdicts[outcome.trial].eligible), None)

    @property
    def nearest_miss(self) -> Outcome | None:
        """The trial that came closest to the SLOs, when none met them."""
        measured = [o for o in self.ranked if self.verdicts[o.trial].value is not None]
        return None if self.best else next(iter(measured), None)

    @property
    def counted(self) -> int:
        return sum(outcome.state in COUNTED and not _stopped_all(outcome) for outcome in self.outcomes)

    def skipped_in_a_row(self, since: int) -> int:
        """How many of the last proposals in a row were not launched, because they cannot run. since: as below."""
        states = [outcome.state for outcome in reversed(self.outcomes[since:]) if outcome.label is None]
        return next((i for i, state in enumerate(states) if state != "skipped"), len(states))

    def fruitless_in_a_row(self, since: int) -> int:
        """How many of the last trials in a row measured nothing, through no fault of their configuration.

        since: trials before this one do not count; what failed them may have been mended. While nothing has ever been
        measured, infeasible trials count too: then the whole space may be wrong. So do, always, those that ended twice
        without an explanation.
        """
        never = not any(outcome.state == "complete" for outcome in self.outcomes)
        run = 0
        for outcome in reversed(self.outcomes[since:]):
            failure = outcome.measured.failure
            unsure = never or (failure is not None and failure.kind in UNEXPLAINED)
            if outcome.state in {"failed", "invalid"} or (outcome.state == "infeasible" and unsure):
                run += 1
            elif outcome.state in COUNTED:
                break
        return run

    def durations_s(self) -> list[float]:
        """Return how long each trial took that went through all its phases, in seconds."""
        found = []
        for outcome in self.outcomes:
            times = outcome.measured.times
            if outcome.state == "complete":
                found.append(sum(t or 0.0 for t in (times.launch_s, times.warmup_s, times.load_s, times.stop_s)))
        return found


def _stopped_all(outcome: Outcome) -> bool:
    """Tell whether a trial stopped the whole sweep: it is run again when that has been mended, so it is no try."""
    failure = outcome.measured.failure
    return failure is not None and failure.treatment == "abort_sweep"
