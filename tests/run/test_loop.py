"""The ask/tell loop on a made-up machine: what is tried and kept, what failures lead to, what a crash costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import optuna
import pytest

from sweep.errors import ConfigError, MachineError, StoppedError
from sweep.failure import Failure
from sweep.model import Event, Flags, Job, Measured
from sweep.run.ledger import key_of
from sweep.run.night import _take_up
from sweep.run.preflight import Preflight
from sweep.run.store import Store
from sweep.run.value_check import ValueCheck

from .studies import OUT_OF_MEMORY, Machine, complete, config, search, sweep_of


def failure(treatment: str, kind: str = "other") -> Failure:
    return Failure(kind, treatment, evidence="what the log said", advice="what to do")  # type: ignore[arg-type]


def test_trial_0_is_the_baseline_and_the_budget_is_kept(tmp_path: Path) -> None:
    machine = Machine()
    events: list[Event] = []
    told = config(search__enqueue=[{"performance-mode": "throughput"}])
    sweep = sweep_of(told, tmp_path, machine, events)
    assert search(sweep) == "all 6 trials are done"
    outcomes = Store(tmp_path).outcomes()
    assert [o.trial for o in outcomes] == list(range(6))
    assert (outcomes[0].source, outcomes[0].flags) == ("baseline", {})
    assert outcomes[1].flags == {"performance-mode": "throughput"}
    assert all(set(o.flags) == {"gpu-memory-utilization", "max-num-seqs"} for o in outcomes[2:])
    assert [e.kind for e in events].count("trial_finished") == 6
    assert sweep.ledger.best is not None
    best = max(o.measured.levels[0].output_tps or 0 for o in outcomes if o.measured.levels)
    assert sweep.ledger.verdicts[sweep.ledger.best.trial].value == best


def test_every_outcome_is_on_disk_before_the_sampler_hears_of_it(tmp_path: Path) -> None:
    sweep = sweep_of(config(), tmp_path, Machine())
    tell = sweep.study.tell
    told = []

    def watching(outcome, *args, **kwargs):  # type: ignore[no-untyped-def]
        assert (tmp_path / "trials" / f"{outcome.trial:04d}" / "outcome.json").is_file()
        told.append(outcome.trial)
        tell(outcome, *args, **kwargs)

    sweep.study.tell = watching  # type: ignore[method-assign]
    search(sweep)
    assert told == list(range(6))


def test_infeasible_trials_are_told_and_stay_in_the_database(tmp_path: Path) -> None:
    sweep = sweep_of(config(run__trials=12), tmp_path, Machine())
    search(sweep)
    infeasible = [o for o in sweep.ledger.outcomes if o.state == "infeasible"]
    assert infeasible
    study = optuna.load_study(study_name="made-up", storage=f"sqlite:///{tmp_path / 'study.db'}")
    pruned = [t for t in study.trials if t.state == optuna.trial.TrialState.PRUNED]
    assert {t.user_attrs["trial"] for t in pruned} == {o.trial for o in infeasible}
    study._storage.remove_session()
    study._storage._backend.engine.dispose()


def test_no_configuration_is_launched_twice(tmp_path: Path) -> None:
    machine = Machine()
    sweep = sweep_of(config(run__trials=40), tmp_path, machine)
    assert search(sweep) == "every configuration of the space has been tried"
    launched = [key_of(job.launch.flags) for job in machine.jobs]
    assert len(set(launched)) == len(launched)


def test_a_baseline_that_does_not_fit_is_replaced_by_one_that_does(tmp_path: Path) -> None:
    def behave(flags: Flags, _: int) -> Measured:
        fits = flags.get("gpu-memory-utilization", 0.92) <= 0.75  # type: ignore[operator]
        return complete(100.0) if fits else Measured("infeasible", failure=OUT_OF_MEMORY)

    sweep = sweep_of(config(), tmp_path, Machine(behave))
    search(sweep)
    first, second, *_ = sweep.ledger.outcomes
    assert (first.state, first.label) == ("infeasible", "baseline")
    assert (second.state, second.label) == ("complete", "baseline, replaced")
    assert second.flags == {"gpu-memory-utilization": 0.73}
    assert sweep.ledger.baseline is second
    assert any("cannot run here" in note and "0.73" in note for note in sweep.notes)


def test_without_any_baseline_gains_count_from_the_first_trial_that_runs(tmp_path: Path) -> None:
    def behave(flags: Flags, number: int) -> Measured:
        return complete(50.0 * number) if number > 2 else Measured("infeasible", failure=OUT_OF_MEMORY)

    sweep = sweep_of(config(), tmp_path, Machine(behave))
    search(sweep)
    assert sweep.ledger.baseline is not None
    assert sweep.ledger.baseline.trial == 2


def test_the_world_s_fault_is_tried_again_and_not_for_ever(tmp_path: Path) -> None:
    def behave(flags: Flags, number: int) -> Measured:
        if flags.get("max-num-seqs") == 32:
            return Measured("failed", failure=failure("retry", "port_in_use"))
        return complete(100.0 + number)

    machine = Machine(behave)
    sweep = sweep_of(config(search__enqueue=[{"max-num-seqs": 32}]), tmp_path, machine)
    search(sweep)
    attempts = [o.attempt for o in sweep.ledger.outcomes if o.flags == {"max-num-seqs": 32}]
    assert attempts == [1, 2, 3]


def test_the_last_trial_is_repeated_too(tmp_path: Path) -> None:
    def behave(_flags: Flags, number: int) -> Measured:
        return complete(100.0) if number > 1 else Measured("failed", failure=failure("retry", "port_in_use"))

    sweep = sweep_of(config(run__trials=1), tmp_path, Machine(behave))
    search(sweep)
    assert [o.state for o in sweep.ledger.outcomes] == ["failed", "complete"]
    assert [o.attempt for o in sweep.ledger.outcomes] == [1, 2]


@pytest.mark.parametrize(
    ("kind", "error", "code"), [("invalid_argument", ConfigError, 2), ("model_not_found", MachineError, 4)]
)
def test_what_every_trial_would_suffer_stops_the_study(
    tmp_path: Path, kind: str, error: type[Exception], code: int
) -> None:
    machine = Machine(lambda flags, number: Measured("failed", failure=failure("abort_sweep", kind)))
    sweep = sweep_of(config(), tmp_path, machine)
    with pytest.raises(error, match="what the log said") as stopped:
        search(sweep)
    assert stopped.value.exit_code == code  # type: ignore[attr-defined]
    assert len(machine.jobs) == 1
    assert len(Store(tmp_path).outcomes()) == 1


def test_the_failure_budget_ends_a_hopeless_night(tmp_path: Path) -> None:
    machine = Machine(lambda flags, number: Measured("failed", failure=failure("fail_trial")))
    sweep = sweep_of(config(run__max_failures_in_a_row=4, run__trials=100), tmp_path, machine)
    with pytest.raises(StoppedError, match="4 trials in a row"):
        search(sweep)
    assert len(machine.jobs) == 4


def test_infeasible_trials_do_not_end_a_night_that_has_results(tmp_path: Path) -> None:
    def behave(flags: Flags, number: int) -> Measured:
        return complete(100.0) if number == 1 else Measured("infeasible", failure=OUT_OF_MEMORY)

    sweep = sweep_of(config(run__max_failures_in_a_row=2, run__trials=8), tmp_path, Machine(behave))
    assert search(sweep) == "all 8 trials are done"


def test_a_deadline_starts_no_trial_that_cannot_end_in_time(tmp_path: Path) -> None:
    machine = Machine()
    sweep = sweep_of(config(), tmp_path, machine)
    # A trial of the made-up machine says that it took 57 s; one more would end after the deadline.
    sweep.deadline = monotonic() + 65.0
    assert sweep.trial_estimate_s() > 60
    sweep.deadline = monotonic() + 100.0
    assert search(sweep) != "there is no time left for another trial"
    late = sweep_of(config(run__trials=30), tmp_path, machine)
    late.deadline = monotonic() + 60.0
    assert search(late) == "there is no time left for another trial"


def test_forbidden_proposals_are_skipped_without_a_launch(tmp_path: Path) -> None:
    machine = Machine()
    told = config(search__rules=["max-num-seqs <= 4"], search__params={"max-num-seqs": [4, 8, 16]}, run__trials=10)
    sweep = sweep_of(told, tmp_path, machine)
    search(sweep)
    assert all(job.launch.flags.get("max-num-seqs", 4) == 4 for job in machine.jobs)


class Killed(BaseException):
    """Stands for the death of the process: nothing after it runs."""


@pytest.mark.parametrize("fatal", range(1, 7))
def test_after_a_kill_in_any_trial_nothing_is_lost_or_repeated(tmp_path: Path, fatal: int) -> None:
    class Dying(Machine):
        async def run_job(self, job: Job, say: Callable[[str], None]) -> Measured:
            if len(self.jobs) + 1 == fatal:
                raise Killed
            return await super().run_job(job, say)

    sweep = sweep_of(config(), tmp_path, Dying())
    with sweep.study, pytest.raises(Killed):
        asyncio.run(sweep.search())
    before = Store(tmp_path).outcomes()
    assert len(before) == fatal - 1

    asyncio.run(_take_up(Store(tmp_path), lambda event: None))
    machine = Machine()
    again = sweep_of(config(), tmp_path, machine)
    search(again)
    outcomes = Store(tmp_path).outcomes()
    assert outcomes[: fatal - 1] == before
    assert [o.state for o in outcomes].count("interrupted") == 1
    assert again.ledger.counted == 6
    counted = [o.label or key_of(o.flags) for o in outcomes if o.state != "interrupted"]
    assert len(set(counted)) == len(counted)


def test_an_interruption_is_recorded_and_the_same_trial_runs_next_time(tmp_path: Path) -> None:
    class Slow(Machine):
        async def run_job(self, job: Job, say: Callable[[str], None]) -> Measured:
            if len(self.jobs) == 2:
                await asyncio.sleep(3600)
            return await super().run_job(job, say)

    sweep = sweep_of(config(), tmp_path, Slow())

    async def interrupted() -> None:
        work = asyncio.create_task(sweep.search())
        while len(list(tmp_path.glob("trials/0002/spec.json"))) == 0:
            await asyncio.sleep(0.01)
        work.cancel()
        await work

    with sweep.study, pytest.raises(asyncio.CancelledError):
        asyncio.run(interrupted())
    last = Store(tmp_path).outcomes()[-1]
    assert last.state == "interrupted"
    machine = Machine()
    again = sweep_of(config(), tmp_path, machine)
    search(again)
    assert machine.jobs[0].launch.flags == last.flags
    assert again.ledger.outcomes[3].attempt == 1  # the user stopped it; it did nothing wrong


def test_the_database_can_be_built_again_from_the_outcomes(tmp_path: Path) -> None:
    sweep = sweep_of(config(), tmp_path, Machine())
    search(sweep)
    (tmp_path / "study.db").unlink()
    again = sweep_of(config(), tmp_path, Machine())
    assert search(again) == "all 6 trials are done"
    study = optuna.load_study(study_name="made-up", storage=f"sqlite:///{tmp_path / 'study.db'}")
    inside = [o.trial for o in again.ledger.outcomes if again.point_of(o) is not None]
    assert sorted(t.user_attrs["trial"] for t in study.trials) == inside
    study._storage.remove_session()
    study._storage._backend.engine.dispose()


def test_a_study_of_something_else_is_not_mixed_in(tmp_path: Path) -> None:
    search(sweep_of(config(), tmp_path, Machine()))
    with pytest.raises(ConfigError, match=r"serve: model: was 'some/model', is 'other/model'"):
        sweep_of(config(serve__model="other/model"), tmp_path, Machine())
    again = sweep_of(config(run__trials=8), tmp_path, Machine())
    assert search(again) == "all 8 trials are done"


def test_the_only_trial_is_run_again_once_what_stopped_it_is_mended(tmp_path: Path) -> None:
    gated = Machine(lambda flags, number: Measured("failed", failure=failure("abort_sweep", "auth_gated_model")))
    with pytest.raises(MachineError):
        search(sweep_of(config(run__trials=1), tmp_path, gated))
    again = sweep_of(config(run__trials=1), tmp_path, Machine())
    assert search(again) == "all 1 trials are done"
    assert [o.state for o in again.ledger.outcomes] == ["failed", "complete"]


def test_enqueued_entries_that_cannot_run_do_not_end_the_search(tmp_path: Path) -> None:
    enqueued = [{"max-num-seqs": 4, "gpu-memory-utilization": 0.5, "block-size": 33 + i} for i in range(25)]
    sweep = sweep_of(config(search__enqueue=enqueued, run__trials=3), tmp_path, Machine())
    checks = tuple(ValueCheck(33 + i, error="no multiple of 32") for i in range(25))
    sweep.knowledge.checked = Preflight("0.32.0", alone={"block-size": checks})
    assert search(sweep) == "all 3 trials are done"
    states = [o.state for o in sweep.ledger.outcomes]
    assert (states.count("skipped"), states.count("complete") + states.count("infeasible")) == (25, 3)


def test_what_was_mended_between_two_calls_is_measured_after_all(tmp_path: Path) -> None:
    gated = Machine(lambda flags, number: Measured("failed", failure=failure("abort_sweep", "auth_gated_model")))
    with pytest.raises(MachineError):
        search(sweep_of(config(), tmp_path, gated))
    again = sweep_of(config(), tmp_path, Machine())
    search(again)
    assert [(o.source, o.state) for o in again.ledger.outcomes][:2] == [
        ("baseline", "failed"),
        ("baseline", "complete"),
    ]
    assert again.ledger.baseline is again.ledger.outcomes[1]


def test_the_failure_budget_is_of_one_call(tmp_path: Path) -> None:
    told = config(run__max_failures_in_a_row=2, run__trials=20)
    broken = Machine(lambda flags, number: Measured("failed", failure=failure("fail_trial")))
    with pytest.raises(StoppedError):
        search(sweep_of(told, tmp_path, broken))
    machine = Machine()
    search(sweep_of(told, tmp_path, machine))
    assert machine.jobs


def test_what_a_failure_leads_to_outlives_the_call(tmp_path: Path) -> None:
    first = sweep_of(config(search__baseline={"gpu-memory-utilization": 0.999}, run__trials=1), tmp_path, Machine())
    search(first)
    assert first.ledger.outcomes[0].state == "infeasible"
    again = sweep_of(config(search__baseline={"gpu-memory-utilization": 0.999}, run__trials=3), tmp_path, Machine())
    search(again)
    assert again.ledger.outcomes[1].label == "baseline, replaced"


def test_a_baseline_without_room_for_its_cache_gets_more_memory_not_less(tmp_path: Path) -> None:
    def behave(flags: Flags, _: int) -> Measured:
        if flags.get("gpu-memory-utilization") == 0.9:
            return complete(100.0)
        return Measured("infeasible", failure=failure("prune", "oom_kv_cache_none"))

    sweep = sweep_of(config(search__baseline={"gpu-memory-utilization": 0.5}), tmp_path, Machine(behave))
    search(sweep)
    assert sweep.ledger.outcomes[1].flags == {"gpu-memory-utilization": 0.9}
    weights = Machine(lambda flags, number: Measured("infeasible", failure=failure("prune", "oom_weights")))
    (tmp_path / "weights").mkdir()
    hopeless = sweep_of(config(run__name="weights"), tmp_path / "weights", weights)
    search(hopeless)
    assert [o.source for o in hopeless.ledger.outcomes].count("baseline") == 1


def test_an_enqueued_copy_of_the_baseline_is_not_launched_again(tmp_path: Path) -> None:
    told = config(search__baseline={"max-num-seqs": 16}, search__enqueue=[{"max-num-seqs": 16}, {"max-num-seqs": 8}])
    machine = Machine()
    search(sweep_of(told, tmp_path, machine))
    assert [job.launch.flags for job in machine.jobs].count({"max-num-seqs": 16}) == 1
