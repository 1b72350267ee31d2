"""A trial's load on the fake server: caches that do not cross, levels measured again, the rate search, digests."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from sweep.errors import ConfigError
from sweep.load.client import Target
from sweep.load.plan import Plan
from sweep.load.prompts import PromptSource
from sweep.load.workload import LoadSection
from sweep.measure.client import level_scrapes
from sweep.measure.prefix import expected_hits
from sweep.measure.prom import growth
from sweep.measure.scrape import Scraper
from sweep.measure.warmup import WarmupSection
from sweep.model import Job, Launch, Measured, Outcome
from sweep.run.ledger import Ledger
from sweep.run.loop import first_guess_s
from sweep.run.measuring import measure_level
from sweep.run.slots import run_job
from sweep.run.store import Store
from sweep.run.warming import warmup_of
from sweep.run.workload import workload_document, workload_notes
from sweep.search.objectives import Objective
from tests.fakes import running

from .studies import Machine, config, search, sweep_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

# Slow enough for a client that shares two cores with the server.
LOAD: dict[str, Any] = {"concurrency": 2, "prompt": {"tokens": 64}, "output": {"tokens": 12}, "requests": 16}
WARMUP = {"min_s": 0.4, "max_s": 0.8}


def job(tmp_path: Path, load: dict[str, Any], *, slo: dict[str, float] | None = None, **env: str) -> Job:
    launch = Launch(
        model="some/model",
        revision=None,
        command=(sys.executable, str(running.PROGRAM), "serve"),
        env={"FAKE_VLLM_SPEED": "1", "FAKE_VLLM_START_S": "0", **env},
        flags={"max-num-seqs": 4, "enable-lora": True, "lora-modules": ["sql=/a/sql", "docs=/a/docs"]},
        swept=("max-num-seqs",),
        trial_dir=str(tmp_path),
        start_timeout_s=60,
        stall_timeout_s=30,
        stop_timeout_s=5,
    )
    return Job("s", 0, launch, load, {"warmup": WARMUP}, slo or {}, seed=1, workload_seed=1)


def measured(job: Job) -> tuple[Measured, list[str]]:
    said: list[str] = []
    return asyncio.run(run_job(job, said.append)), said


def test_what_one_trial_left_in_the_cache_helps_no_other(tmp_path: Path) -> None:
    load = LoadSection.model_validate({**LOAD, "prompt": {"tokens": 64, "shared_prefix": 48, "groups": 2}})
    prompts = PromptSource(Plan(load, 1), seed=1)

    async def run(url: str) -> None:
        async with Scraper(url + "/metrics") as scraper:
            for _ in range(2):  # the very same prompts: only the salt is another one
                done, stats = await measure_level(
                    Target(url, "m"),
                    load.levels()[0],
                    load,
                    prompts=prompts,
                    warmup=warmup_of(WarmupSection.model_validate(WARMUP), load),
                    slo={},
                    scraper=scraper,
                    processes=1,
                )
                scrapes = level_scrapes(done, scraper.scrapes)
                hits = growth(scrapes[0][1], scrapes[-1][1], "vllm:prefix_cache_hits_total") or 0
                expected, _ = expected_hits(done.records, 16)
                assert expected - 4 * 48 <= hits <= expected  # requests that begin together find nothing yet
                assert stats.valid, stats.reasons

    with running.fake_vllm(tmp_path, FAKE_VLLM_SPEED="1") as url:
        asyncio.run(run(url))


def test_a_level_that_somebody_else_spoilt_is_measured_again(tmp_path: Path) -> None:
    found, said = measured(job(tmp_path, LOAD, FAKE_VLLM_FAULT="other_user=2.5"))
    assert any("again" in text and "somebody else" in text for text in said), said
    assert found.state == "complete", found.levels
    (level,) = found.levels
    assert level.valid
    assert level.client is not None
    assert level.client.tokens == level.client.server_tokens


def test_a_trial_that_stays_spoilt_is_invalid_and_never_wins(tmp_path: Path) -> None:
    found, _ = measured(job(tmp_path, LOAD, FAKE_VLLM_FAULT="other_user=1000"))
    assert found.state == "invalid"
    assert found.levels[0].again
    assert found.failure is not None  # people are told why
    assert found.failure.treatment == "ignore"
    assert "somebody else uses the server" in found.failure.evidence
    (outcome,) = [Outcome(0, "search", {}, found, "2026-01-01T00:00:00+00:00")]
    ledger = Ledger(Objective(maximize="output_tps"), {}, [outcome])
    assert ledger.best is None
    assert ledger.nearest_miss is None


def test_the_highest_rate_is_found_and_every_try_is_a_level(tmp_path: Path) -> None:
    load = LOAD | {"concurrency": None, "rate": "max", "requests": None, "seconds": 2.5}
    slo = {"ttft_p50": 0.2}
    found, said = measured(job(tmp_path, load, slo=slo))
    assert found.state == "complete", (found.failure, [level.reasons for level in found.levels])
    rates = [float(level.level.removeprefix("r=")) for level in found.levels]
    assert rates == sorted(rates)
    assert [level.rate_rps for level in found.levels] == rates
    assert "load c=64" in said
    verdict = Objective(maximize="rate_rps").with_limits(slo).judge(found, None, 1)
    assert verdict.slo_met
    # Four at a time, 13 steps of 12.6 ms each: about 24 a second, of which a queue leaves most within 200 ms.
    assert verdict.value is not None
    assert 12 <= verdict.value <= 28
    assert any("the limit lies between" in reason for reason in verdict.level.reasons)  # type: ignore[union-attr]


def test_a_mix_has_figures_and_limits_of_each_class(tmp_path: Path) -> None:
    load = LOAD | {
        "mix": [
            {"name": "chat", "share": 0.5, "slo": {"ttft_p50": "900ms"}, "adapters": ["sql", "docs"]},
            {"name": "batch", "share": 0.5, "output": {"tokens": 24}, "slo": {"ttft_p50": "0.01ms"}},
        ],
        "requests": 40,
    }
    slo = LoadSection.model_validate(load).slo
    found, _ = measured(job(tmp_path, load, slo=slo))
    assert found.state == "complete", found
    (level,) = found.levels
    assert set(level.kinds) == {"chat", "batch"}
    assert sum(kind.completed for kind in level.kinds.values()) == level.completed == 40
    verdict = Objective(maximize="output_tps").with_limits(slo).judge(found, None, 1)
    assert set(verdict.miss) == {"batch.ttft_p50"}
    rows = pq.read_table(tmp_path / "requests.parquet").to_pylist()
    assert {row["kind"] for row in rows} == {"chat", "batch"}
    assert all(row["output_tokens"] == (24 if row["kind"] == "batch" else 12) for row in rows if row["status"] == "ok")


def test_a_worker_that_would_send_other_requests_refuses(tmp_path: Path) -> None:
    planned = job(tmp_path, LOAD)
    digest = workload_document(LoadSection.model_validate(LOAD), 1)["sha256"]
    other, _ = measured(replace(planned, workload_sha256="0" * 64))
    assert other.failure is not None
    assert other.failure.treatment == "abort_sweep"
    assert "other requests" in other.failure.evidence
    assert not (tmp_path / "server.log").exists()
    same, _ = measured(replace(planned, workload_sha256=digest))
    assert same.state == "complete", same


def prompts_file(folder: Path, words: str) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "{words} {n}", "output_tokens": 4}}\n' for n in range(20)))
    return str(path)


def test_a_study_whose_file_changed_is_not_gone_on_with(tmp_path: Path) -> None:
    file = prompts_file(tmp_path, "tell me a story")
    told = config(load__prompt={"file": file}, run__trials=2)
    machine = Machine()
    study = tmp_path / "study"
    study.mkdir()
    search(sweep_of(told, study, machine))
    kept = Store(study).workload()
    assert kept["sha256"] == machine.jobs[0].workload_sha256
    assert list(kept["files"]) == [file]
    assert "tell me" not in (study / "workload.json").read_text()
    sweep_of(told, study, machine).study.__exit__(None, None, None)
    prompts_file(tmp_path, "tell me another story")
    with pytest.raises(ConfigError, match=r"the content of .*prompts\.jsonl has changed"):
        sweep_of(told, study, machine)


def test_the_length_of_a_trace_tells_how_long_a_trial_takes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        f'{{"timestamp": {20_000 * n}, "input_length": 100, "output_length": 9, "hash_ids": [{n}]}}' for n in range(6)
    ]
    path.write_text("\n".join(rows))
    load = LoadSection.model_validate({"trace": str(path), "trace_speed": 2})
    document = workload_document(load, 1)
    assert document["trace_s"] == pytest.approx(50)
    told = config(load__requests=None)
    assert first_guess_s(told, document["trace_s"]) == first_guess_s(told) - 10  # of the 60 s that are the default
    assert workload_notes(document, moe=True)
    assert not workload_notes(document, moe=False)
