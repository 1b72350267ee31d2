"""A study from its first check to its report; several of them in a row make a night."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from datetime import datetime, timedelta
from pathlib import Path
from time import monotonic
from typing import Any

from sweep.config import SweepConfig, config_from_data, parse_until
from sweep.errors import SweepError
from sweep.failure import Failure
from sweep.model import Event, Measured, Outcome
from sweep.report.view import StudyView
from sweep.run import environment
from sweep.run.finish import build_view, doubts, write_all, write_progress
from sweep.run.knowledge import what_is_known
from sweep.run.ledger import Ledger
from sweep.run.loop import Sweep, first_guess_s
from sweep.run.preflight import preflight
from sweep.run.store import Store
from sweep.run.workload import workload_document, workload_notes
from sweep.search.study import Study
from sweep.serve.process import kill_leftovers

EXIT_OK = 0
EXIT_NOTHING_MET = 3

RESULTS = Path("results")


def deadline_of(hours: float | None, until: str | None) -> float | None:
    """Return when to stop, in monotonic seconds: after so many hours or at that time of day, if that comes first."""
    limits = []
    if hours is not None:
        limits.append(hours * 3600)
    if until is not None:
        at, now = parse_until(until), datetime.now().astimezone()
        then = now.replace(hour=at.hour, minute=at.minute, second=0, microsecond=0)
        limits.append((then + timedelta(days=then <= now) - now).total_seconds())
    return monotonic() + min(limits) if limits else None


async def run_study(
    config: SweepConfig, emit: Callable[[Event], None], *, until: str | None = None
) -> tuple[int, StudyView]:
    """Run a study, or go on with it, and write everything that comes of it. Returns the exit code and the final view.

    Raises SweepError when the sweep had to stop, CancelledError when it was told to; the report is there all the same.
    """
    store = Store(RESULTS / config.run.name)
    with store.lock():
        emit(Event("note", text="Asking the installed vLLM what it makes of these flags …"))
        checked = await preflight(config)
        left_out = [name for name in config.search.params if name not in config.flags(config.baseline)]
        defaults = {name: checked.resolved[name] for name in left_out if name in checked.resolved}
        workload = workload_document(config.load, config.search.seed)
        store.begin(config, {**environment.describe(checked.vllm_version), "defaults": defaults}, workload)
        await _take_up(store, emit)
        objective = config.objective
        ledger = Ledger(objective, config.serve.args, store.outcomes())
        knowledge = what_is_known(config, checked)
        space = config.space.with_rules(checked.rules)
        with Study.open(store.database, config.run.name, space, objective, config.search) as study:
            sweep = Sweep(
                config=config,
                store=store,
                ledger=ledger,
                study=study,
                emit=emit,
                resolved=checked.resolved,
                knowledge=knowledge,
                workload=workload,
                deadline=deadline_of(config.run.hours, until),
                after_trial=lambda: write_progress(build_view(config, store, ledger, complete=False), store),
                since=len(ledger.outcomes),
            )
            study.replay([(o, ledger.verdicts[o.trial], sweep.point_of(o)) for o in ledger.outcomes])
            for note in (*checked.notes, *config.notes(), *workload_notes(workload, checked.moe)):
                sweep.note(note)
            if expected := knowledge.expectation():
                sweep.note(expected)
            text = plan_text(config, workload["trace_s"], ledger)
            emit(Event("plan", total=config.run.trials, text=text, eta_s=sweep.eta_s()))
            try:
                reason = await sweep.search()
            except (SweepError, asyncio.CancelledError) as stop:
                await _close_early(sweep, stop)
                raise
        # Out of time is not done: the same command goes on with it.
        complete = ledger.counted >= config.run.trials or sweep.exhausted
        notes = [*sweep.notes, f"The search ended: {reason}.", *doubts(ledger)]
        store.write_end(len(ledger.outcomes), complete=complete, notes=notes)
        view = build_view(config, store, ledger, complete=complete, notes=notes)
        emit(Event("note", text="Writing the report …"))
        await write_all(view, store, config)
        return (EXIT_OK if view.best is not None else EXIT_NOTHING_MET), view


async def _close_early(sweep: Sweep, stop: BaseException) -> None:
    """Leave the report behind, whatever ended the search."""
    reason = str(stop) if isinstance(stop, SweepError) else "it was interrupted; the same command goes on with it"
    notes = [*sweep.notes, f"The search stopped early: {reason}"]
    sweep.store.write_end(len(sweep.ledger.outcomes), complete=False, notes=notes)
    view = build_view(sweep.config, sweep.store, sweep.ledger, complete=False, notes=notes)
    await write_all(view, sweep.store, sweep.config, prove=False)


async def _take_up(store: Store, emit: Callable[[Event], None]) -> None:
    """Close the books on trials that died with the process that ran them, and end whatever they left running."""
    for spec in store.unfinished():
        await kill_leftovers(spec.job.launch.trial_dir)
        # A trial that takes the whole machine down with it must not do so for ever.
        died = Failure("other", "retry", "the process that ran the sweep died in this trial", "It is run again.")
        interrupted = Measured("interrupted", failure=died)
        store.write_outcome(
            Outcome(spec.job.trial, spec.source, spec.flags, interrupted, spec.started_at, spec.label, spec.attempt)
        )
        emit(Event("note", text=f"Trial {spec.job.trial} was interrupted; it is run again under a new number."))


def plan_text(config: SweepConfig, trace_s: float | None, ledger: Ledger | None = None) -> str:
    """Say in a sentence or two what is going to happen. trace_s: the length of a trace."""
    levels = ", ".join(level.name for level in config.load.levels())
    done = ledger.counted if ledger else 0
    going_on = f", {done} of them done before" if done else ""
    minutes = (config.run.trials - done) * first_guess_s(config, trace_s) / 60
    return (
        f"{config.run.name}: {config.run.trials} trials of {config.serve.model}{going_on}; load {levels}, "
        f"{config.load.words}; {config.objective.words}. The space has {config.space.size:,} points. "
        f"About {max(minutes, 1):.0f} min if a launch takes a minute; the first launch will tell."
    )


async def rebuild(root: Path) -> StudyView:
    """Make every derived file of a study again, from its outcomes and from what is kept of its end."""
    store = Store(root)
    config = config_from_data(store.config_data(), root / "config.yaml")
    ledger = Ledger(config.objective, config.serve.args, store.outcomes())
    complete, kept = store.end(len(ledger.outcomes)) or (ledger.counted >= config.run.trials, doubts(ledger))
    view = build_view(config, store, ledger, complete=complete, notes=kept)
    await write_all(view, store, config)
    return view


def run_interruptibly(work: Callable[[], Coroutine[Any, Any, int]], on_stop: Callable[[], None]) -> int:
    """Run asynchronous work to its end. A first SIGINT, SIGTERM or SIGHUP ends it cleanly and makes the exit code.

    A second signal changes nothing: the server is being ended already, and that takes a minute at most.
    """
    caught: list[int] = []

    async def main() -> int:
        task = asyncio.ensure_future(work())
        loop = asyncio.get_running_loop()

        def stop(number: int) -> None:
            if not caught:
                caught.append(number)
                on_stop()
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, stop, number)
        return await task

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        return 128 + caught[0] if caught else 1
