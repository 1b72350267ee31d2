"""Levels of every shape against a running server: what is sent and when, and the end of the processes that send it."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import psutil
import pytest

from sweep.errors import MachineError
from sweep.load.client import Tally, Target, Warmup, run_level
from sweep.load.plan import Plan
from sweep.load.prompts import PromptSource
from sweep.load.workload import LoadSection
from sweep.model import LoadRun, RequestRecord
from tests.fakes.running import fake_vllm
from tests.processes import wait_for

SHORT = Warmup(0.2, 0.4, lambda _bins: False)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with fake_vllm(tmp_path_factory.mktemp("fake")) as found:
        yield found


def section(**fields: object) -> LoadSection:
    lengths = {} if "trace" in fields else {"prompt": {"tokens": 32}, "output": {"tokens": 8}}
    return LoadSection.model_validate(lengths | fields)


def drive(url: str, load: LoadSection, **more: object) -> LoadRun:
    source = PromptSource(Plan(load, 2), 1, text=load.endpoint == "chat")
    target = Target(url, "m", endpoint=load.endpoint)
    return asyncio.run(run_level(target, load.levels()[0], load, prompts=source, warmup=SHORT, **more))


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_conversation_brings_what_was_said_before(url: str, endpoint: str) -> None:
    run = drive(url, section(concurrency=2, requests=12, turns=3, think_s=0.02, endpoint=endpoint))
    counted = [r for r in run.records if r.counted]
    assert len(counted) == 12
    assert {r.status for r in run.records} == {"ok"}
    assert {r.turn for r in run.records} == {0, 1, 2}
    for record in run.records:
        assert (record.history_tokens > 0) == (record.turn > 0)
        if endpoint == "completions":  # exact: two prompts of 32 with answers of 8 stand before the third
            assert record.prompt_tokens == 32 + record.turn * 40
            assert record.history_tokens == record.turn * 40
    assert run.rate_rps is None


def test_the_turns_of_an_open_loop_are_due_after_the_pause(url: str) -> None:
    run = drive(url, section(rate=20, requests=12, turns=2, think_s=0.05))
    later = [r for r in run.records if r.turn == 1]
    ends = {r.t_end_ns for r in run.records if r.turn == 0}
    assert later
    assert all(r.t_sched_ns - 50_000_000 in ends for r in later)


def test_a_trace_is_sent_at_its_times(url: str, tmp_path: Path) -> None:
    rows = [
        {"timestamp": 100 * i, "input_length": 40 + i, "output_length": 2 + i % 3, "hash_ids": [i]} for i in range(9)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = drive(url, section(trace=str(path), trace_speed=2), processes=2)
    counted = sorted((r for r in run.records if r.counted), key=lambda r: r.t_sched_ns or 0)
    assert [r.prompt_tokens for r in counted] == [40 + i for i in range(9)]
    assert [r.output_tokens for r in counted] == [2 + i % 3 for i in range(9)]
    assert [round((r.t_sched_ns - run.window_start_ns) / 1e6) for r in counted] == [50 * i for i in range(9)]
    assert run.rate_rps == pytest.approx(20)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_share_one_schedule(url: str, processes: int) -> None:
    load = section(rate=60, requests=40)
    run = drive(url, load, processes=processes)
    due = [(r.t_sched_ns - run.window_start_ns) / 1e9 for r in run.records if r.counted]
    expected = list(islice(Plan(load, 2).offsets_s(load.levels()[0], warmup=False), 40))
    assert sorted(due) == pytest.approx(expected, abs=1e-6)
    assert run.processes == processes
    assert all(r.t_send_ns >= r.t_sched_ns for r in run.records)


def test_a_ramp_becomes_denser(url: str) -> None:
    run = drive(url, section(rate={"from": 10, "to": 90}, seconds=2, arrivals="constant"))
    due = [(r.t_sched_ns - run.window_start_ns) / 1e9 for r in run.records if r.counted]
    assert len(due) == pytest.approx(100, abs=1)
    assert sum(at < 1 for at in due) == pytest.approx(30, abs=1)
    assert run.rate_rps == 50


def missed_everything(_record: RequestRecord) -> dict[str, bool]:
    return {"ttft_p99": True}


def test_a_judge_ends_a_level_early(url: str) -> None:
    seen: list[Tally] = []

    def judge(tally: Tally) -> str | None:
        seen.append(tally)
        return "fail" if tally.judged.get("ttft_p99", (0, 0))[0] >= 5 else None

    run = drive(url, section(rate=40, seconds=60), judge=judge, misses=missed_everything)
    assert run.verdict == "fail"
    assert run.window_end_ns - run.window_start_ns < 5e9
    last = seen[-1]
    assert last.judged["ttft_p99"][0] == last.judged["ttft_p99"][1] >= 5
    assert last.due >= last.judged["ttft_p99"][0]
    assert all(flight >= 0 for flight in last.in_flight)
    assert [tally.elapsed_s for tally in seen] == sorted(tally.elapsed_s for tally in seen)


def test_a_process_that_dies_is_told_and_leaves_none_behind(url: str) -> None:
    async def go() -> None:
        load = section(concurrency=4, requests=100_000)
        source = PromptSource(Plan(load, 2), 1)
        running = asyncio.ensure_future(
            run_level(Target(url, "m"), load.levels()[0], load, prompts=source, warmup=SHORT, processes=2)
        )
        while len(generators()) < 2:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        os.kill(generators()[0], signal.SIGKILL)
        await running

    with pytest.raises(MachineError, match="exit code -9"):
        asyncio.run(go())
    assert generators() == []


def test_processes_leave_when_the_one_that_conducts_them_is_killed(url: str) -> None:
    code = (
        "import asyncio, sys\n"
        "from tests.load.test_level import drive, section\n"
        f"drive({url!r}, section(concurrency=4, requests=100_000), processes=2)\n"
    )
    parent = psutil.Popen([sys.executable, "-c", code])
    wait_for("two processes", lambda: len(parent.children()) == 2)
    children = parent.children()
    time.sleep(0.5)
    parent.kill()
    parent.wait()
    gone, left = psutil.wait_procs(children, timeout=15)
    assert (len(gone), left) == (2, [])


def generators() -> list[int]:
    """Return the client's processes that belong to this one."""
    return [child.pid for child in psutil.Process().children() if "sweep.load.generator" in child.cmdline()]
