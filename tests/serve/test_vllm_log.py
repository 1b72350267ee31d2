from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from sweep.serve import log_lines, vllm_log

GIB = 1024**3
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
    assert log_lines.strip(line).text in line or not {"\x1b", "\x9b"}.isdisjoint(line)


def test_facts_of_the_newest_form():
    facts = vllm_log.facts((LOGS / "start_0_32_cpu.log").read_text())
    assert facts[:5] == ("0.32.0", 1_267_200, 618.75, 2048, int(2.5 * GIB))
    assert (facts.requested_bytes, facts.total_bytes) == (int(3.18 * GIB), int(10.59 * GIB))
    assert (facts.weights_bytes, facts.graphs_bytes, facts.free_bytes) == (None, None, None)


def test_facts_of_the_older_two_lines():
    facts = vllm_log.facts((LOGS / "start_0_10_two_lines.log").read_text())
    assert facts[:5] == (None, 176_240, 21.51, 8192, int(18.5 * GIB))
    assert facts.weights_bytes == int(1.1201 * GIB)


@pytest.mark.parametrize(
    ("line", "fact", "value"),
    [
        ("Loading model weights took 2.5 GB", "weights_bytes", 2.5 * GIB),
        ("Model loading took 2.5 GB and 3.2 seconds", "weights_bytes", 2.5 * GIB),
        ("Model loading took 2.5 GiB memory and 3.2 seconds", "weights_bytes", 2.5 * GIB),
        ("model weights take 7.5GiB; non_torch_memory takes 0.39GiB; PyTorch activation", "weights_bytes", 7.5 * GIB),
        (
            "peak memory takes 2.53GiB; the rest of the memory reserved for KV Cache is 3.75GiB.",
            "available_kv_bytes",
            3.75 * GIB,
        ),
        ("Graph capturing finished in 21 secs, took 0.25 GiB", "graphs_bytes", GIB / 4),
        ("Graph capturing finished in 21 secs.", "graphs_bytes", None),
        ("CUDA graph pool memory: 0.25 GiB (actual), 0.5 GiB (estimated)", "graphs_bytes", GIB / 4),
        (
            "Free memory on device (77.5/79.0 GiB) on startup. Desired GPU memory utilization is (0.9, 71.5 GiB)",
            "free_bytes",
            77.5 * GIB,
        ),
        (
            "Free memory on device cuda:0 (77.5/79 GiB) on startup. Desired GPU memory utilization is (0.9, 71.5 GiB)",
            "requested_bytes",
            71.5 * GIB,
        ),
        (
            "the current vLLM instance can use total_gpu_memory (15.5GiB) x gpu_memory_utilization (0.90) = 14.25GiB",
            "requested_bytes",
            14.25 * GIB,
        ),
        ("can use total_gpu_memory (15.5GiB) x", "total_bytes", None),
        ("Memory profiling results: total_gpu_memory=23.5GiB initial_memory_usage=1GiB", "total_bytes", 23.5 * GIB),
        ("Explicitly set (1.0/7.5) GiB for KV cache on node 0.", "total_bytes", 7.5 * GIB),
        (
            "Initial free memory 78.5 GiB, reserved 20.0 GiB memory for KV Cache as specified by",
            "free_bytes",
            78.5 * GIB,
        ),
        ("Maximum concurrency for 40000 tokens per request: 1.54x", "max_model_len", 40000),
        ("GPU KV cache size: ,, tokens", "kv_cache_tokens", None),
    ],
)
def test_facts_of_all_versions(line, fact, value):
    facts = vllm_log.facts(f"INFO 01-02 03:04:05 [worker.py:7] {line}\n")
    assert getattr(facts, fact) == value


def test_facts_of_a_file_and_the_first_of_several_workers(tmp_path):
    path = tmp_path / "server.log"
    path.write_text("Model loading took 1 GiB and 2 seconds\n" * 2 + "Model loading took 3 GiB and 2 seconds\n")
    assert vllm_log.facts(path).weights_bytes == GIB
    assert vllm_log.facts(tmp_path / "none.log") == vllm_log.LogFacts()


@given(st.binary())
def test_facts_of_any_bytes(data):
    log = b"KV cache size: 1,0 tokens " + data + b"\nModel loading took " + data + b" GiB"
    assert vllm_log.facts(log.decode(errors="replace")).kv_cache_tokens in {10, None}


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
