"""A neighbour on the device: what it takes for an hour is waited for, and costs the study no configuration."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from sweep.config import SweepConfig
from sweep.errors import StoppedError
from sweep.model import DeviceMemory, Job, Measured, ServerFacts
from sweep.run.waiting import Patience

from .studies import Machine, complete, config, search, sweep_of

GIB = 2**30
FREE_GIB = 78.0


@dataclass
class Shared(Machine):
    """An 80 GiB GPU whose neighbour holds `held_gib` until it was looked at `looks` times after the first launch."""

    held_gib: float = 40.0
    looks: int = 10
    free_when_launched: list[float] = field(default_factory=list)

    def _free_gib(self) -> float:
        return FREE_GIB - (self.held_gib if self.jobs and self.looks > 0 else 0.0)

    def see(self, devices: int) -> DeviceMemory | None:
        if self.jobs:
            self.looks -= 1
        return DeviceMemory(80 * GIB, int(self._free_gib() * GIB), "nvml")

    async def run_job(self, job: Job, say: object) -> Measured:
        memory = DeviceMemory(80 * GIB, int(self._free_gib() * GIB), "nvml")
        self.free_when_launched.append(self._free_gib())
        self.jobs.append(job)
        share = job.launch.flags.get("gpu-memory-utilization", 0.5)
        assert isinstance(share, float)
        facts = ServerFacts(requested_bytes=int(share * 80 * GIB), free_bytes=memory.free_bytes, total_bytes=80 * GIB)
        return replace(complete(100.0 * share), server=facts, memory=memory)


def test_what_a_neighbour_takes_for_a_while_is_no_reason_to_give_anything_up(
    tmp_path: Path,
) -> None:
    machine = Shared()
    sweep = sweep_of(told(), tmp_path, machine)
    sweep.patience = Patience(short_s=30.0, long_s=30.0, poll_s=0.001)
    search(sweep)
    launched = [job.launch.flags.get("gpu-memory-utilization") for job in machine.jobs]
    assert sorted(share for share in launched[1:] if isinstance(share, float)) == [0.3, 0.6, 0.7, 0.8, 0.9]
    assert all(outcome.state == "complete" for outcome in sweep.ledger.outcomes)
    for job, free in zip(machine.jobs, machine.free_when_launched, strict=True):
        assert float(job.launch.flags.get("gpu-memory-utilization", 0.5)) * 80 <= free  # type: ignore[arg-type]


def test_what_fits_beside_a_neighbour_is_taken_meanwhile(tmp_path: Path) -> None:
    machine = Shared(looks=10**9)
    sweep = sweep_of(told(), tmp_path, machine)
    sweep.patience = Patience(short_s=0.01, long_s=0.01, poll_s=0.001)
    with pytest.raises(StoppedError, match="held the device's memory") as stopped:
        search(sweep)
    assert stopped.value.exit_code == 6
    assert [job.launch.flags.get("gpu-memory-utilization") for job in machine.jobs[1:]] == [0.3]
    assert [outcome.state for outcome in sweep.ledger.outcomes] == ["complete", "complete"]
    # The neighbour has left, and the same command goes on with all that is left.
    again = sweep_of(told(), tmp_path, Shared(held_gib=0.0))
    search(again)
    assert len(again.ledger.outcomes) == 6


def told() -> SweepConfig:
    return config(
        search__params={"gpu-memory-utilization": [0.3, 0.6, 0.7, 0.8, 0.9]}, memory__skip=True, run__trials=6
    )
