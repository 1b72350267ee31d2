"""What two failed launches of the CPU backend teach: later proposals beyond either wall cost no launch."""

from __future__ import annotations

from pathlib import Path

import pytest

from sweep.config import SweepConfig
from sweep.memory.card import read_card
from sweep.model import DeviceMemory, Flags, Measured, Outcome, ServerFacts
from sweep.run.knowledge import Knowledge
from sweep.run.preflight import Preflight
from sweep.run.value_check import ValueCheck
from sweep.serve import vllm_log
from sweep.serve.failures import classify
from sweep.tiny_model import make

from .studies import complete, config

GIB = 2**30
TOTAL_GIB, FREE_GIB, PROCESS_GIB = 23.54, 21.23, 0.69
# What a random sampler proposed, in its order, of gpu-memory-utilization from 0.005 to 0.995.
SEQUENCE = (0.97, 0.015, 0.64, 0.995, 0.02, 0.305, 0.955, 0.005, 0.41, 0.985, 0.01, 0.825, 0.99, 0.05, 0.025, 0.725)


def launched(utilization: float) -> Measured:
    """Return what vLLM 0.32's CPU backend did with 23.54 GiB, in its words."""
    wanted = utilization * TOTAL_GIB
    memory = DeviceMemory(int(TOTAL_GIB * GIB), int((FREE_GIB + 1.2) * GIB), "numa")
    if wanted > FREE_GIB:
        message = (
            f"Available memory on node 0 ({FREE_GIB}/{TOTAL_GIB} GiB) on startup is less than desired CPU memory "
            f"utilization ({utilization}, {wanted:.2f} GiB). On the CPU backend, the `--gpu-memory-utilization` flag "
            "controls the fraction of CPU memory reserved (despite its name)."
        )
    elif wanted <= PROCESS_GIB:
        message = (
            f"Available memory on node 0 (20.81/{TOTAL_GIB} GiB) on kv cache allocation is less than requested memory "
            f"for kv ({wanted - PROCESS_GIB:.2f}/{wanted:.2f} GiB). Reduce CPU memory used by other processes."
        )
    else:
        log = (
            f"(Worker pid=7) INFO 11-30 10:45:31 [cpu_worker.py:260] Auto set ({wanted - PROCESS_GIB:.2f}/{TOTAL_GIB}) "
            f"GiB for KV cache on node 0, with {wanted:.2f} GiB requested memory for the worker. {PROCESS_GIB} GiB "
            "memory was consumed by non-kv usages.\n"
        )
        facts = ServerFacts(**vllm_log.facts(log)._asdict())
        return Measured("complete", complete(100.0).levels, server=facts, memory=memory)
    log = f"(Worker pid=7) ERROR 11-30 10:45:31 [multiproc_executor.py:953] ValueError: {message}\n"
    told = classify(log, exit_code=1, phase="start", swept=("gpu-memory-utilization",))
    return Measured("infeasible", failure=told, server=ServerFacts(**vllm_log.facts(log)._asdict()), memory=memory)


def knowing(told: SweepConfig, checked: Preflight | None = None) -> Knowledge:
    now = DeviceMemory(int(TOTAL_GIB * GIB), int((FREE_GIB + 1.2) * GIB), "numa")
    known = Knowledge(told, checked or Preflight("0.32.0"), lambda devices: now)
    known.look()
    return known


def space(*, skip: bool = True) -> SweepConfig:
    params = {"gpu-memory-utilization": {"low": 0.005, "high": 0.995, "step": 0.005}}
    return config(search__params=params, memory__skip=skip)


def test_two_failures_keep_a_recorded_sequence_out_of_both_regions() -> None:
    known = knowing(space())
    outcomes: list[Outcome] = []
    became = {}
    for number, utilization in enumerate(SEQUENCE):
        flags: Flags = {"gpu-memory-utilization": utilization}
        why = known.impossible(flags)
        measured = launched(utilization) if why is None else Measured("skipped", failure=why)
        outcomes.append(Outcome(number, "search", flags, measured, "2026-01-02T03:04:05+00:00"))
        known.learn(outcomes)
        became[utilization] = measured.state
    assert [u for u, state in became.items() if state == "infeasible"] == [0.97, 0.015]
    assert sorted(u for u, state in became.items() if state == "skipped") == [
        *(0.005, 0.01, 0.02, 0.025),
        *(0.955, 0.985, 0.99, 0.995),
    ]
    for outcome in outcomes:
        if outcome.state == "skipped":
            assert outcome.measured.failure is not None
            assert outcome.measured.failure.kind.startswith("oom_")
            assert any(f"trial {taught}" in outcome.measured.failure.evidence for taught in (0, 1, 2))


def test_nothing_is_skipped_when_the_user_says_so() -> None:
    known = knowing(space(skip=False))
    known.learn([Outcome(0, "search", {"gpu-memory-utilization": 0.99}, launched(0.99), "2026-01-02T03:04:05+00:00")])
    assert known.impossible({"gpu-memory-utilization": 0.995}) is None


def test_a_value_that_vllm_refuses_by_itself_costs_no_launch() -> None:
    checks = {"block-size": (ValueCheck(33, error="it breaks the rule 'block-size % 32 == 0'"), ValueCheck(64))}
    known = knowing(config(search__params={"block-size": [33, 64]}), Preflight("0.32.0", alone=checks))
    why = known.impossible({"block-size": 33})
    assert why is not None
    assert (why.kind, why.treatment) == ("invalid_argument", "prune")
    assert "block-size 33" in why.evidence
    assert known.impossible({"block-size": 64}) is None


@pytest.mark.parametrize("known_size", [True, False])
def test_what_was_expected_of_memory_stands_beside_what_was_seen(tmp_path: Path, *, known_size: bool) -> None:
    make(tmp_path)
    known = knowing(space())
    known.card = read_card(str(tmp_path)) if known_size else None
    told = known.expectation()
    assert (told is not None) == known_size
    ran = Outcome(0, "baseline", {"gpu-memory-utilization": 0.5}, launched(0.5), "2026-01-02T03:04:05+00:00")
    notes = known.learn([ran])
    assert len(notes) == int(known_size)
    assert known.learn([ran]) == []
    if known_size:
        assert told is not None
        assert "leaves" in told
        assert "KV cache" in notes[0]
        assert "expected" in notes[0]
