from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from sweep.serve import log_lines, vllm_log

LOGS = Path(__file__).parents[1] / "logs"


@pytest.mark.parametrize(
    ("line", "level", "text"),
    [
        ("(EngineCore pid=7) INFO 11-30 10:45:31 [core.py:402] init engine", "INFO", "init engine"),
        ("(Worker_TP1 pid=7) ValueError: no", None, "ValueError: no"),
        ("(RayWorkerWrapper pid=5, ip=192.0.2.6) ERROR 03-27 10:29:13 [base.py:6] no", "ERROR", "no"),
        ("ERROR 04-28 15:55:45 worker_base.py:157] ValueError: no", "ERROR", "ValueError: no"),
        ("[rank0]: torch.OutOfMemoryError: no", None, "torch.OutOfMemoryError: no"),
        ("vllm-1  | INFO 07-28 23:02:27 [a.py:8] yes", "INFO", "yes"),
        ("2026-01-02T03:04:05.678Z (APIServer pid=1) WARNING 01-02 03:04:05 [a.py:8] yes", "WARNING", "yes"),
        ("\x1b[1;36m(EngineCore pid=7)\x1b[0;0m INFO 11-30 10:45:31 [core.py:402] yes", "INFO", "yes"),
        ("INFO:     Application startup complete.", "INFO", "Application startup complete."),
        ("  Value error, no [type=value_error]", None, "Value error, no [type=value_error]"),
        ("INFO is a word", None, "INFO is a word"),
    ],
)
def test_prefixes_are_taken_off(line, level, text):
    assert log_lines.strip(line)[:2] == (level, text)


@given(st.text())
def test_stripping_any_text_leaves_a_part_of_it(line):
    assert log_lines.strip(line).text in line or "\x1b" in line


def test_facts_of_the_newest_form():
    facts = vllm_log.facts((LOGS / "start_0_32_cpu.log").read_text())
    assert facts == ("0.32.0", 1_267_200, 618.75, 2048, int(2.5 * 1024**3))


def test_facts_of_the_older_two_lines():
    facts = vllm_log.facts((LOGS / "start_0_10_two_lines.log").read_text())
    assert facts == (None, 176_240, 21.51, 8192, int(18.5 * 1024**3))


def test_facts_that_are_not_there_are_none():
    assert set(vllm_log.facts("nothing of the kind")) == {None}


def test_memory_for_the_cache_can_be_negative():
    facts = vllm_log.facts("INFO 01-01 00:00:00 [a.py:1] Available KV cache memory: -0.50 GiB")
    assert facts.available_kv_bytes == -(1024**3) // 2


def test_phases_of_a_start_come_in_order():
    phases = [vllm_log.phase(line) for line in (LOGS / "start_0_32_cpu.log").read_text().splitlines()]
    assert [p for p in phases if p] == [
        "reading the configuration",
        "loading weights",
        "loading weights",
        "profiling memory",
        "compiling",
        "setting up the KV cache",
        "setting up the KV cache",
        "starting the API",
        "starting the API",
    ]
