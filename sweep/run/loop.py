"""The ask/tell loop: one trial after another, each outcome on disk before the sampler hears of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from sweep.config import SweepConfig
from sweep.errors import ConfigError, MachineError, StoppedError, SweepError
from sweep.failure import Failure
from sweep.model import Event, Flags, FlagValue, Job, Measured, Outcome, Verdict
from sweep.run.hindsight import reconsidered
from sweep.run.knowledge import Knowledge
from sweep.run.ledger import Ledger, gpus_of, key_of
from sweep.run.plan import Planned, label_of, pending
from sweep.run.rate_search import TRIED_RATES
from sweep.run.slots import run_job
from sweep.run.store import Spec, Store
from sweep.run.waiting import Patience, needed_bytes, wait_for_room
from sweep.search.study import Study
from sweep.text import FAILURE_WORDS

# What cannot run is shown to the sampler, which learns from it. After so many in a row it is passed over in silence,
# and after still more of them the search is called exhausted.
_TAUGHT_IN_A_ROW = 3
_SKIPS_IN_A_ROW = 20
# Before anything has been measured: a launch of a small model, and two windows for a level with its warm-up.
_LAUNCH_GUESS_S = 60.0


@dataclass(slots=True)
class Sweep:
    """One study at work. All of its state is in the store and can be had from there again."""

    config: SweepConfig
    store: Store
    ledger: Ledger
    study: Study
    emit: Callable[[Event], None]
    resolved: Flags  # the baseline's values of the swept flags, as far as the engine told them before the launch
    knowledge: Knowledge  # of what cannot run, and of what does the same
    workload: dict[str, Any]  # what workload.json holds
    deadline: float | None  # monotonic seconds
    after_trial: Callable[[], None]
    since: int = 0  # how many trials earlier calls of the command have left
    patience: Patience = field(default_factory=Patience)
    run_job: Callable[[Job, Callable[[str], None]], Awaitable[Measured]] = run_job
    notes: list[str] = field(default_factory=list)
    exhausted: bool = False  # nothing is left to try

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.emit(Event("note", text=text))

    def _say(self, trial: int, text: str) -> None:
        self.emit(Event("phase", trial, text=text))

    async def search(self) -> str:
        """Run trials until there is a reason to stop, and return that reason.

        Raises ConfigError or MachineError for what every further trial would suffer, StoppedError when nothing
        works any more, CancelledError when the user stops; the outcome of the last trial is kept in any case.
        """
        self._take_in()
        while True:
            if reason := self._why_stop():
                return reason
            self.knowledge.look()
            planned = self._next()
            if planned is None:
                return self._exhausted()
            if planned.impossible:
                self._skip(planned, planned.impossible)
                continue
            if planned.source == "search" and self.knowledge.lacks_room(planned.flags):
                planned = await self._with_room(planned)
            self._follow_up(await self._run(planned))

    def _why_stop(self) -> str | None:
        run = self.config.run
        # A trial that is to be repeated has given nothing yet; the last one is no exception.
        again = any(plan.attempt > 1 for plan in pending(self.config, self.ledger.outcomes))
        if self.ledger.counted >= run.trials and not again:
            return f"all {run.trials} trials are done"
        if self.deadline is not None and monotonic() + self.trial_estimate_s(pessimistic=True) > self.deadline:
            return "there is no time left for another trial"
        if self.ledger.fruitless_in_a_row(self.since) >= run.max_failures_in_a_row:
            last = self.ledger.outcomes[-1].measured.failure
            raise StoppedError(
                f"{run.max_failures_in_a_row} trials in a row measured nothing, so the sweep stopped itself."
                + (f" The last one: {last.evidence} {last.advice}" if last else "")
            )
        return None

    def _next(self) -> Planned | None:
        if todo := pending(self.config, self.ledger.outcomes):
            # Whether the baseline runs is for vLLM itself to say, since all gains are counted from it. What is tried
            # once more was not impossible before.
            sure = todo[0].source == "baseline" or todo[0].attempt > 1
            return replace(todo[0], impossible=None if sure else self.knowledge.impossible(todo[0].flags))
        skipped = self.ledger.skipped_in_a_row(self.since)
        if skipped >= _SKIPS_IN_A_ROW:
            return None
        proposal = self.study.ask(self.knowledge.impossible if skipped >= _TAUGHT_IN_A_ROW else None)
        if proposal is None:
            return None
        impossible = _forbidden(proposal.violation) if proposal.violation else self.knowledge.impossible(proposal.flags)
        return Planned(proposal.flags, "search", token=proposal.token, impossible=impossible)

    async def _with_room(self, planned: Planned) -> Planned:
        """Wait for memory that something else holds. Where it stays away, return a trial that fits meanwhile.

        Raises StoppedError when nothing fits for a long time.
        """
        say = partial(self._say, self._next_number())
        fits, patience = partial(self._fits_now, planned.flags), self.patience
        there = await wait_for_room(fits, say, patience_s=patience.short_s, poll_s=patience.poll_s)
        if there or planned.token is None:
            return planned  # what the user wants tried is for the server itself to refuse
        other = self.study.ask(lambda flags: self.knowledge.impossible(flags) or self.knowledge.lacks_room(flags))
        if other is not None and other.violation is None:
            self.study.withdraw(planned.token)
            return Planned(other.flags, "search", token=other.token)
        if await wait_for_room(fits, say, patience_s=patience.long_s, poll_s=patience.poll_s):
            return planned
        raise StoppedError(
            f"something else has held the device's memory for {patience.long_s / 60:.0f} minutes, and no configuration"
            " that is left fits beside it. End it (`doctor` names what it sees); the same command goes on."
        )

    def _fits_now(self, flags: Flags) -> bool:
        self.knowledge.look()
        return not self.knowledge.lacks_room(flags)

    def _exhausted(self) -> str:
        self.exhausted = True
        tried = {key_of(point) for outcome in self.ledger.outcomes if (point := self.point_of(outcome)) is not None}
        if len(tried) < self.config.space.size:
            return "of the configurations that have not been tried, none can run here or does anything new"
        return "every configuration of the space has been tried"

    def _skip(self, planned: Planned, why: Failure) -> None:
        self._record(planned, self._next_number(), Measured("skipped", failure=why), _now())

    async def _run(self, planned: Planned) -> Outcome:
        number, started_at = self._next_number(), _now()
        job = self._job(planned, number)
        self.store.start_trial(Spec(job, planned.source, planned.flags, started_at, planned.label, planned.attempt))
        self.emit(
            Event(
                "trial_started",
                number,
                self._total(),
                flags=planned.flags,
                text=planned.label or "",
                eta_s=self.eta_s(),
            )
        )
        say = partial(self._say, number)
        earlier = [outcome for outcome in self.ledger.outcomes if label_of(outcome) == planned.key]
        try:
            if needed := needed_bytes(earlier, self.ledger.outcomes):
                patience = self.patience
                there = partial(self._has_free, job, needed)
                await wait_for_room(there, say, patience_s=patience.short_s, poll_s=patience.poll_s)
            measured = reconsidered(await self.run_job(job, say), earlier, self.ledger.outcomes)
        except asyncio.CancelledError:
            self._record(planned, number, Measured("interrupted"), started_at)
            raise
        return self._record(planned, number, measured, started_at)

    def _has_free(self, job: Job, needed: float) -> bool:
        memory = self.knowledge.see_memory(gpus_of(job.launch.flags))
        return memory is None or memory.free_bytes >= needed

    def _record(self, planned: Planned, number: int, measured: Measured, started_at: str) -> Outcome:
        """Keep an outcome: first on disk, then for the sampler, then for people."""
        outcome = Outcome(number, planned.source, planned.flags, measured, started_at, planned.label, planned.attempt)
        self.store.write_outcome(outcome)
        before = self.ledger.best
        verdict = self.ledger.add(outcome)
        self.study.tell(outcome, verdict, token=planned.token, point=self.point_of(outcome))
        self._take_in()
        best = self.ledger.best
        self.emit(
            Event(
                "trial_finished",
                number,
                self._total(),
                outcome=outcome,
                verdict=verdict,
                unit=self.study.objective.unit,
                gain_frac=self.gain_frac(verdict),
                best=best is not None and best is not before and best.trial == number,
                eta_s=self.eta_s(),
            )
        )
        try:
            self.after_trial()
        except OSError as error:
            # These files can be made again at any time; the night goes on without them.
            self.note(f"The tables could not be written ({error.filename}: {error.strerror}).")
        return outcome

    def _take_in(self) -> None:
        """Let what is known so far decide what is tried next, and say what is new about it."""
        for note in self.knowledge.learn(self.ledger.outcomes):
            self.note(note)
        self.study.take_as_one(self.knowledge.alike)

    def _follow_up(self, outcome: Outcome) -> None:
        """Tell what a failure leads to; what is run next follows from the outcomes. Raises where it ends the sweep."""
        failure = outcome.measured.failure
        if failure is None:
            return
        if failure.treatment == "abort_sweep":
            raise _fatal(failure, self.store.trial_dir(outcome.trial))
        todo = pending(self.config, self.ledger.outcomes)
        if any(plan.key == label_of(outcome) for plan in todo):
            self.note(f"Trial {outcome.trial} failed through no fault of its flags: {FAILURE_WORDS[failure.kind]}.")
        elif outcome.source == "baseline":
            replacement = next((plan for plan in todo if plan.source == "baseline"), None)
            self.note(_baseline_note(failure, replacement))

    def point_of(self, outcome: Outcome) -> Flags | None:
        """Return the point of the search space that a trial stands for, or None if it lies outside.

        A flag that the trial left to vLLM has the value that the running server or the engine's configuration told.
        """
        told = {name.replace("_", "-"): value for name, value in outcome.measured.server.cache_config.items()}
        point: Flags = {}
        for name, param in self.config.search.params.items():
            if name in outcome.flags:
                value = outcome.flags[name]
            else:
                value = _plain(told[name]) if name in told else self.resolved.get(name)
            index = None if value is None else param.index(value)
            if index is None:
                return None
            point[name] = param.values()[index]
        # What the point does not say must be as in every other trial.
        others = {name for name in outcome.flags if name not in self.config.search.params}
        return point if not others else None

    def gain_frac(self, verdict: Verdict) -> float | None:
        base = self.ledger.baseline
        reference = self.ledger.verdicts[base.trial].value if base else None
        if verdict.value is None or not reference or base is self.ledger.outcomes[-1]:
            return None
        change = (verdict.value - reference) / abs(reference)
        return change if self.study.objective.direction == "maximize" else -change

    def trial_estimate_s(self, *, pessimistic: bool = False) -> float:
        """Return how long a trial takes: the mean so far, or the 90th percentile and a fifth more; else a guess."""
        durations = sorted(self.ledger.durations_s())
        if not durations:
            return first_guess_s(self.config, self.workload["trace_s"])
        if pessimistic:
            return 1.2 * durations[math.ceil(0.9 * len(durations)) - 1]
        return sum(durations) / len(durations)

    def eta_s(self) -> float:
        left = max(0, self.config.run.trials - self.ledger.counted) * self.trial_estimate_s()
        return left if self.deadline is None else max(0.0, min(left, self.deadline - monotonic()))

    def _total(self) -> int:
        skipped = len(self.ledger.outcomes) - self.ledger.counted
        return self.config.run.trials + skipped

    def _next_number(self) -> int:
        return max((outcome.trial for outcome in self.ledger.outcomes), default=-1) + 1

    def _job(self, planned: Planned, number: int) -> Job:
        search = self.config.search
        swept = tuple(sorted({*search.params, *planned.flags} - set(self.config.serve.args)))
        launch = self.config.serve.launch(planned.flags, swept=swept, trial_dir=self.store.trial_dir(number))
        return Job(
            study=self.config.run.name,
            trial=number,
            launch=launch,
            load=self.config.load.model_dump(mode="json"),
            measure=self.config.measure.model_dump(mode="json"),
            slo=dict(self.study.objective.slo),
            seed=(search.seed << 20) + number,
            workload_seed=search.seed,
            workload_sha256=self.workload["sha256"],
            platform=self.knowledge.checked.platform,
        )


def first_guess_s(config: SweepConfig, trace_s: float | None = None) -> float:
    """Guess how long a trial takes before one was seen: a launch, and for each level its window and its warm-up.

    trace_s: the length of a trace. Of the rates that a search tries, most show early what they are worth.
    """
    window_s = trace_s or config.load.window_s or 20.0
    levels = config.load.levels()
    if any(level.search for level in levels):
        count, window_s = TRIED_RATES, (config.load.window_s or 20.0) / 2
    else:
        count = len(levels)
    return _LAUNCH_GUESS_S + count * (window_s + 2 * config.measure.warmup.min_s)


def _fatal(failure: Failure, folder: Path) -> SweepError:
    text = (
        f"{FAILURE_WORDS[failure.kind]}: {failure.evidence}\n{failure.advice}\n"
        f"Every trial would fail like this, so the sweep stopped. The log is {folder / 'server.log'}."
    )
    # A fixed flag is at fault, and the file is to be mended.
    mendable = failure.kind in {"invalid_argument", "oom_free_memory_lt_requested"}
    return ConfigError(text) if mendable else MachineError(text)


def _baseline_note(failure: Failure, other: Planned | None) -> str:
    cause = f"The baseline cannot run here ({failure.kind}): {failure.evidence}"
    if other is None:
        return f"{cause} Gains are counted from the first trial that runs."
    value = other.flags["gpu-memory-utilization"]
    return f"{cause} The same flags with gpu-memory-utilization {value} take its place; gains are counted from there."


def _forbidden(rule: str) -> Failure:
    evidence = f"forbidden by the rule {rule!r}"
    return Failure("invalid_argument", "prune", evidence, "vLLM or your own rule refuses this; no launch was spent.")


def _plain(label: str) -> FlagValue:
    """Read a label of vllm:cache_config_info: True, None, 16, 0.9 or a word."""
    if label in {"True", "False", "None"}:
        return {"True": True, "False": False, "None": None}[label]
    for kind in (int, float):
        try:
            return kind(label)
        except ValueError:
            continue
    return label


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
