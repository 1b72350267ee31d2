from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from sweep.serve.failure_rules import RULES
from sweep.serve.failures import classify, read_log

GIB = 1024**3
LOGS = Path(__file__).parents[1] / "logs"

# log, exit code, phase -> kind, treatment, words of the evidence, bounds
GOLDEN = [
    (
        "oom_free_memory_cuda",
        1,
        "start",
        "oom_free_memory_lt_requested",
        "prune",
        "76.05/79.18 GiB",
        {
            "free_bytes": 76.05 * GIB,
            "total_bytes": 79.18 * GIB,
            "utilization_frac": 0.97,
            "requested_bytes": 76.8 * GIB,
        },
    ),
    (
        "oom_free_memory_neighbour",
        1,
        "start",
        "oom_free_memory_lt_requested",
        "retry",
        "9.41/79.18 GiB",
        {"free_bytes": 9.41 * GIB, "total_bytes": 79.18 * GIB, "utilization_frac": 0.9, "requested_bytes": 71.26 * GIB},
    ),
    (
        "oom_cpu_too_much",
        1,
        "start",
        "oom_free_memory_lt_requested",
        "prune",
        "on kv cache allocation",
        {"free_bytes": 5.2 * GIB, "total_bytes": 15.6 * GIB, "requested_bytes": 9.75 * GIB},
    ),
    (
        "oom_cpu_too_little",
        1,
        "start",
        "oom_kv_cache_none",
        "prune",
        "on kv cache allocation",
        {"requested_bytes": -0.43 * GIB},
    ),
    (
        "oom_kv_cache_wrapped",
        1,
        "start",
        "oom_kv_cache_too_small",
        "prune",
        "max seq len (65536)",
        {
            "max_model_len_tokens": 65536,
            "needed_bytes": 8.0 * GIB,
            "available_bytes": 1.31 * GIB,
            "fitting_model_len_tokens": 10720,
        },
    ),
    ("oom_rocm_profile", 1, "start", "oom_activation_profile", "prune", "HIP out of memory", None),
    ("oom_graph_capture_tp", 1, "start", "oom_cudagraph_capture", "prune", "CUDA error: out of memory", None),
    ("engine_dead_under_load", 0, "load", "oom_runtime", "prune", "CUDA out of memory", None),
    ("invalid_batched_tokens", 1, "start", "invalid_argument", "prune", "max_num_seqs (1024).", None),
    ("invalid_block_size", 1, "start", "invalid_argument", "prune", "block_size: Input should be", None),
    ("unknown_flag", 2, "start", "invalid_argument", "abort_sweep", "--swap-space", None),
    ("gated_repository", 1, "start", "auth_gated_model", "abort_sweep", "401 Client Error", None),
    ("hang_under_load", 0, "load", "hang_timeout", "retry", "RPC call to sample_tokens", None),
    ("worker_killed", 1, "start", "host_oom_killed", "prune", "exit code: -9", None),
    ("healthy_with_scary_words", None, "load", "healthy", "ignore", "", None),
    ("start_0_10_two_lines", None, "start", "healthy", "ignore", "", None),
    ("start_0_32_cpu", None, "start", "healthy", "ignore", "", None),
]


@pytest.mark.parametrize(("name", "exit_code", "phase", "kind", "treatment", "words", "bounds"), GOLDEN)
def test_golden_log(name, exit_code, phase, kind, treatment, words, bounds):
    failure = classify(LOGS / f"{name}.log", exit_code=exit_code, phase=phase)
    assert (failure.kind, failure.treatment) == (kind, treatment)
    assert words in failure.evidence
    assert failure.bounds == bounds
    assert failure.advice
    assert failure.phase == phase


def test_every_log_is_in_the_table():
    assert {path.stem for path in LOGS.glob("*.log")} == {row[0] for row in GOLDEN}


@pytest.mark.parametrize(
    ("exit_code", "kind", "treatment"),
    [
        (-9, "host_oom_killed", "prune"),
        (137, "host_oom_killed", "prune"),
        (-15, "other", "retry"),
        (-11, "other", "fail_trial"),
        (1, "other", "fail_trial"),
        (0, "healthy", "ignore"),
        (None, "healthy", "ignore"),
    ],
)
def test_without_a_message_the_exit_code_decides(exit_code, kind, treatment):
    failure = classify("INFO:     Waiting for application startup.", exit_code=exit_code, phase="start")
    assert (failure.kind, failure.treatment) == (kind, treatment)


def test_a_cause_in_the_log_counts_more_than_a_kill():
    log = (LOGS / "oom_kv_cache_wrapped.log").read_text()
    assert classify(log, exit_code=-9, phase="start").kind == "oom_kv_cache_too_small"


def test_an_engine_that_only_waits_hangs():
    log = "DEBUG 07-15 10:00:10 [utils.py:741] Waiting for 1 local, 0 remote core engine proc(s) to start.\n" * 3
    assert classify(log, exit_code=None, phase="start").kind == "hang_timeout"


@pytest.mark.parametrize(
    ("swept", "fixed", "treatment"),
    [
        (["max-num-seqs"], ["max-num-batched-tokens"], "prune"),
        ([], ["max-num-seqs", "max-num-batched-tokens"], "abort_sweep"),
        (["block-size"], ["max-num-batched-tokens"], "abort_sweep"),
        ([], [], "prune"),
        # Words of pydantic's own, behind the message, do not count.
        ([], ["stream-interval"], "prune"),
    ],
)
def test_a_fixed_flag_at_fault_stops_the_sweep(swept, fixed, treatment):
    log = LOGS / "invalid_batched_tokens.log"
    assert classify(log, exit_code=1, phase="start", swept=swept, fixed=fixed).treatment == treatment


def test_a_rule_knows_flags_that_its_message_does_not_name():
    log = "Value error, World size (8) is larger than the number of available GPUs (4) in this node."
    fixed = classify(log, exit_code=1, phase="start", fixed=["tensor-parallel-size"])
    assert (fixed.treatment, fixed.bounds) == ("abort_sweep", {"world_size": 8.0, "gpus": 4.0})
    assert classify(log, exit_code=1, phase="start", swept=["tensor-parallel-size"]).treatment == "prune"


def test_secrets_and_control_characters_do_not_reach_the_evidence():
    log = "ValueError: bad token hf_abcdefghijklmnopqrstuvwx in \x07 header"
    evidence = classify(log, exit_code=1, phase="start").evidence
    assert "hf_abc" not in evidence
    assert evidence.isprintable()


def test_every_rule_gives_advice_and_no_pattern_matches_nothing():
    for rule in RULES:
        assert rule.advice
        assert rule.pattern.search("") is None


@given(
    st.one_of(
        st.text(),
        st.lists(st.sampled_from([rule.pattern.pattern for rule in RULES])).map("\n".join),
        st.binary().map(lambda data: data.decode(errors="replace")),
    ),
    st.one_of(st.none(), st.integers(-200, 400)),
)
def test_classify_never_raises(log, exit_code):
    failure = classify(log, exit_code=exit_code, phase="start", swept=["block-size"], fixed=["dtype"])
    assert len(failure.evidence) < 1000


def test_a_missing_log_is_an_empty_one(tmp_path):
    assert classify(tmp_path / "none.log", exit_code=1, phase="start").kind == "other"


def test_of_a_huge_log_both_ends_are_read(tmp_path):
    path = tmp_path / "server.log"
    with path.open("w") as log:
        log.write("first\n")
        log.write("INFO 01-01 00:00:00 [a.py:1] filler\n" * 700_000)
        log.write("last\n")
    text = read_log(path)
    assert text.startswith("first\n")
    assert text.endswith("last\n")
    assert len(text) < path.stat().st_size / 2
