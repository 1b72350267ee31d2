"""A level is measured once more where what was measured says more of the client, or of others, than of the server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sweep.load.client import Tally, Target, complete_once
from sweep.load.plan import Plan
from sweep.load.prompts import PromptSource
from sweep.load.workload import LoadSection
from sweep.measure.scrape import Scraper
from sweep.measure.warmup import WarmupSection
from sweep.model import LevelStats
from sweep.run import measuring
from sweep.run.measuring import measure_level, more_processes
from sweep.run.warming import warmup_of
from tests.fakes.running import fake_vllm

LOAD = LoadSection.model_validate({"concurrency": 4, "prompt": {"tokens": 32}, "output": {"tokens": 8}, "seconds": 0.5})
WARMUP = warmup_of(WarmupSection(min_s=0.4, max_s=0.4), LOAD)


class Shared(Scraper):
    """Scrapes a server that somebody else uses too, during the first tries."""

    def __init__(self, url: str, said: list[str], tries: int) -> None:
        super().__init__(url + "/metrics")
        self._other, self._said, self._tries = Target(url, "m"), said, tries
        self._alone = asyncio.Lock()

    async def scrape(self) -> None:
        async with self._alone:
            if len(self._said) < self._tries:
                await complete_once(self._other, list(range(1000, 1040)), 20)
            await super().scrape()


async def measured(url: str, *, foreign: int = 0, judge=None, slo=None) -> tuple[LevelStats, list[str]]:
    """foreign: so many tries meet somebody else's requests on the server."""
    said: list[str] = []
    async with Shared(url, said, foreign) as scraper:
        _, stats = await measure_level(
            Target(url, "m"),
            LOAD.levels()[0],
            LOAD,
            prompts=PromptSource(Plan(LOAD, 1), 2),
            warmup=WARMUP,
            slo=slo or {},
            scraper=scraper,
            processes=1,
            judge=judge,
            say=said.append,
        )
    return stats, said


def test_what_somebody_else_spoilt_is_measured_once_more(tmp_path: Path) -> None:
    # At its own speed a token takes so long that a stumble of this machine is none of the client.
    with fake_vllm(tmp_path, FAKE_VLLM_SPEED="1") as url:
        once, told = asyncio.run(measured(url, foreign=1))
        twice, _ = asyncio.run(measured(url, foreign=2))
    assert "again" in told[0]
    assert "somebody else uses the server" in told[0]
    assert once.valid
    assert (twice.valid, twice.again) == (False, True)


class Impatient:
    """Ends a level at its third look."""

    looks = 0

    def __call__(self, tally: Tally) -> str | None:
        assert set(tally.judged) <= {"ttft_p99"}
        self.looks += 1
        return "pass" if self.looks == 3 else None


def test_every_try_has_a_judge_of_its_own(tmp_path: Path) -> None:
    judge = Impatient()
    with fake_vllm(tmp_path) as url:
        stats, _ = asyncio.run(measured(url, judge=judge, slo={"ttft_p99": 1.0}))
    assert judge.looks == 0
    assert stats.verdict in {"pass", None}


@pytest.mark.parametrize(
    ("cpus", "count", "more"), [(2, 1, 1), (8, 1, 2), (8, 2, 4), (8, 3, 4), (2, 3, 3), (None, 1, 1)]
)
def test_a_client_takes_at_most_half_of_the_cpus(monkeypatch: pytest.MonkeyPatch, cpus, count, more) -> None:
    monkeypatch.setattr(measuring.os, "cpu_count", lambda: cpus)
    assert more_processes(count) == more
