"""What a failure means beside the trials before it, and waiting for memory that somebody else holds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sweep.failure import Failure, FailureKind
from sweep.model import DeviceMemory, Flags, Job, Measured, Outcome, ServerFacts
from sweep.run.hindsight import reconsidered
from sweep.run.waiting import Patience, needed_bytes, wait_for_room

from .studies import OUT_OF_MEMORY, Machine, complete, config, search, sweep_of

GIB = 2**30
WANTED = replace(OUT_OF_MEMORY, bounds={"requested_bytes": 72.0 * GIB, "free_bytes": 60.0 * GIB})


def failed(kind: FailureKind, **bounds: float) -> Measured:
    return Measured("infeasible", failure=Failure(kind, "prune", "words of the log", "Advice.", bounds=bounds or None))


def outcome(measured: Measured, trial: int = 0, attempt: int = 1) -> Outcome:
    return Outcome(trial, "search", {"max-num-seqs": 8}, measured, "2026-01-02T03:04:05+00:00", attempt=attempt)


@pytest.mark.parametrize("kind", ["engine_dead", "hang_timeout", "host_oom_killed"])
def test_an_unexplained_end_is_an_accident_once_and_the_flags_fault_twice(kind: FailureKind) -> None:
    first = reconsidered(failed(kind), [], [])
    assert (first.state, first.failure and first.failure.treatment) == ("failed", "retry")
    second = reconsidered(failed(kind), [outcome(first, trial=7)], [])
    assert (second.state, second.failure and second.failure.treatment) == ("infeasible", "prune")
    assert second.failure is not None
    assert "trial 7" in second.failure.advice
    other = reconsidered(failed(kind), [outcome(failed("port_in_use"))], [])
    assert other.state == "failed"


def test_what_once_was_given_as_much_memory_is_not_impossible(tmp_path: Path) -> None:
    ran = replace(complete(100.0), server=ServerFacts(requested_bytes=73 * GIB))
    told = reconsidered(Measured("infeasible", failure=WANTED), [], [outcome(ran, trial=3)])
    assert told.failure is not None
    assert (told.state, told.failure.treatment) == ("failed", "retry")
    assert "Trial 3" in told.failure.advice
    less = replace(complete(100.0), server=ServerFacts(requested_bytes=71 * GIB))
    assert reconsidered(Measured("infeasible", failure=WANTED), [], [outcome(less)]).state == "infeasible"
    # A server that was refused more had found enough for this one.
    more = replace(WANTED, bounds={"requested_bytes": 79.0 * GIB, "free_bytes": 75.0 * GIB})
    refused = Measured("infeasible", failure=more)
    assert reconsidered(Measured("infeasible", failure=WANTED), [], [outcome(refused)]).state == "failed"


def test_a_fixed_share_that_was_once_given_does_not_stop_the_sweep() -> None:
    ran = replace(complete(100.0), server=ServerFacts(requested_bytes=73 * GIB))
    fixed = Measured("failed", failure=replace(WANTED, treatment="abort_sweep"))
    assert reconsidered(fixed, [], []) is fixed
    told = reconsidered(fixed, [], [outcome(ran)])
    assert told.failure is not None
    assert told.failure.treatment == "retry"


def test_what_the_sweep_stops_for_and_what_ran_stay_as_they_are() -> None:
    for measured in (complete(1.0), Measured("failed", failure=Failure("hang_timeout", "abort_sweep", "", ""))):
        assert reconsidered(measured, [outcome(measured)], [outcome(measured)]) is measured


def test_silent_deaths_end_the_night_however_much_was_measured_before(tmp_path: Path) -> None:
    def behave(_flags: Flags, number: int) -> Measured:
        return (
            complete(100.0) if number == 1 else Measured("failed", failure=Failure("engine_dead", "fail_trial", "", ""))
        )

    machine = Machine(behave)
    sweep = sweep_of(config(run__max_failures_in_a_row=4, run__trials=30), tmp_path, machine)
    with pytest.raises(Exception, match="4 trials in a row"):
        search(sweep)
    assert [o.state for o in sweep.ledger.outcomes] == ["complete", "failed", "infeasible", "failed", "infeasible"]
    assert len(machine.jobs) == 5


def test_how_much_memory_has_to_come_back() -> None:
    neighbour = Measured("failed", failure=replace(WANTED, treatment="retry"))
    assert needed_bytes([outcome(neighbour)], []) == 72.0 * GIB
    seen = replace(complete(1.0), memory=DeviceMemory(80 * GIB, 78 * GIB, "nvml"))
    assert needed_bytes([outcome(failed("gpu_busy_other_process"))], [outcome(seen)]) == pytest.approx(76.44 * GIB)
    assert needed_bytes([outcome(failed("gpu_busy_other_process"))], []) is None
    assert needed_bytes([outcome(failed("port_in_use"))], [outcome(seen)]) is None
    assert needed_bytes([], [outcome(seen)]) is None


def test_waiting_ends_when_there_is_room_or_patience_is_at_an_end() -> None:
    there = iter([False, False, True])
    said: list[str] = []
    assert asyncio.run(wait_for_room(lambda: next(there), said.append, patience_s=30, poll_s=0.001))
    assert said == ["waiting for memory that something else holds"] * 2
    assert not asyncio.run(wait_for_room(lambda: False, said.append, patience_s=0.01, poll_s=0.001))


def test_a_retry_waits_for_the_memory_that_its_first_try_lacked(tmp_path: Path) -> None:
    class Busy(Machine):
        free: Iterator[int] = iter([5, 79])

        def see(self, devices: int) -> DeviceMemory | None:
            return DeviceMemory(80 * GIB, next(self.free, 79) * GIB, "nvml")

        async def run_job(self, job: Job, say: object) -> Measured:
            self.jobs.append(job)
            if len(self.jobs) == 1:
                return Measured("failed", failure=replace(WANTED, treatment="retry"))
            return complete(100.0)

    said: list[str] = []
    sweep = sweep_of(config(run__trials=1), tmp_path, Busy())
    sweep.emit = lambda event: said.append(event.text)
    sweep.patience = Patience(poll_s=0.01)
    search(sweep)
    assert [o.state for o in sweep.ledger.outcomes] == ["failed", "complete"]
    assert any(text.startswith("waiting for memory") for text in said)
