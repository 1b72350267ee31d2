import io
import itertools
import json
import re
import time
import tracemalloc
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, strategies as st

from sweep.failure import BOUNDS, FailureKind
from sweep.serve.advice import advice
from sweep.serve.failure_rules import RULES
from sweep.serve.failures import Search, classify, diagnose
from sweep.serve.rule import needles_of
from tests.serve.messages import HARMLESS, MESSAGES

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
        {
            "free_bytes": 5.2 * GIB,
            "total_bytes": 15.6 * GIB,
            "allocation_bytes": 9.75 * GIB,
            "requested_bytes": 10.92 * GIB,
        },
    ),
    (
        "oom_cpu_too_little",
        1,
        "start",
        "oom_kv_cache_none",
        "prune",
        "on kv cache allocation",
        {
            "free_bytes": 12.9 * GIB,
            "total_bytes": 15.6 * GIB,
            "available_bytes": -0.43 * GIB,
            "requested_bytes": 0.78 * GIB,
        },
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
    (
        "oom_rocm_profile",
        1,
        "start",
        "oom_activation_profile",
        "prune",
        "HIP out of memory",
        {"allocation_bytes": 6.5 * GIB, "total_bytes": 63.98 * GIB, "free_bytes": 3.02 * GIB},
    ),
    ("oom_graph_capture_tp", 1, "start", "oom_cudagraph_capture", "prune", "CUDA error: out of memory", None),
    (
        "engine_dead_under_load",
        0,
        "load",
        "oom_runtime",
        "prune",
        "CUDA out of memory",
        {"allocation_bytes": 1.17 * GIB, "total_bytes": 23.57 * GIB, "free_bytes": 402.12 * 1024**2},
    ),
    (
        "invalid_batched_tokens",
        1,
        "start",
        "invalid_argument",
        "prune",
        "max_num_seqs (1024).",
        {"max_num_seqs": 1024.0},
    ),
    ("invalid_block_size", 1, "start", "invalid_argument", "prune", "block_size: Input should be", None),
    ("unknown_flag", 2, "start", "invalid_argument", "abort_sweep", "--swap-space", None),
    ("gated_repository", 1, "start", "auth_gated_model", "abort_sweep", "gated repo", None),
    ("hang_under_load", 0, "load", "hang_timeout", "retry", "RPC call to sample_tokens", None),
    ("worker_killed", 1, "start", "host_oom_killed", "prune", "exit code: -9", None),
    ("healthy_with_scary_words", None, "load", "healthy", "ignore", "", None),
    ("start_0_10_two_lines", None, "start", "healthy", "ignore", "", None),
    ("start_0_32_cpu", None, "start", "healthy", "ignore", "", None),
]


SERVING = 'INFO:     Application startup complete.\nINFO:     1.1.1.1:5 - "POST /v1/completions HTTP/1.1" 200 OK\n'


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


@pytest.mark.parametrize(
    "line",
    [
        "OSError: for url: https://user:hunter2@huggingface.co/x",
        "RuntimeError: clone https://hunter2@192.0.2.1/x failed",
        "ProxyError: http://bob:hunter2@192.0.2.1:3128/",
        "vllm: error: unrecognized arguments: --api_keyy=hunter2 --foo",
        "vllm: error: unrecognized arguments: --api-key hunter2",
        "vllm: error: argument --api-key: invalid value: 'hunter2'",
        "RuntimeError: non-default args: {'api_key': ['hunter2', 'hunter2'], 'model': 'x'}",
        "RuntimeError: HF_TOKEN=hunter2",
        "RuntimeError: Authorization: Basic hunter2==",
        "RuntimeError: {'Authorization': 'Bearer hunter2'}",
        "OSError: https://192.0.2.1/x?X-Amz-Signature=hunter2&X-Amz-Credential=hunter2",
        "OSError: https://192.0.2.1/x?sv=1&sig=hunter2",
        "RuntimeError: password: hunter2",
        "ValueError: wrapped hf_abcdhunter2abcd\nefghijklmnop",
        "RuntimeError: ghp_hunter2hunter2hunter2",
        "INFO 01-02 03:04:05 [logger.py:9] Received request chatcmpl-1: prompt: 'my name is hunter2'",
    ],
)
def test_no_secret_reaches_the_evidence(line):
    failure = classify(line, exit_code=None, phase=None)
    assert failure.evidence
    assert "hunter2" not in failure.evidence


def test_names_that_look_like_secrets_stay_in_the_evidence():
    line = "ValueError: max_num_batched_tokens=8, hf_overrides={}, tokenizer: x; https://192.0.2.1/x?b=1#c"
    assert classify(line, exit_code=None, phase=None).evidence == line
    line = "vllm: error: argument --api-key: expected at least one argument"
    assert classify(line, exit_code=None, phase=None).evidence == line


def test_every_rule_gives_advice_and_no_pattern_matches_nothing():
    for rule in RULES:
        assert advice(rule.kind, rule.advice, {})
        assert rule.pattern.search("") is None


@pytest.mark.parametrize(("kind", "treatment", "log"), MESSAGES)
def test_a_message_and_its_meaning(kind, treatment, log):
    failure = classify(log, exit_code=None, phase=None)
    assert (failure.kind, failure.treatment) == (kind, treatment)
    assert failure.advice
    assert failure.evidence
    assert set(failure.bounds or ()) <= set(BOUNDS)


@pytest.mark.parametrize("line", HARMLESS)
def test_frightening_lines_of_a_run_that_works(line):
    assert classify(line, exit_code=None, phase=None).kind == "healthy"
    assert classify(line + "\n" + SERVING, exit_code=None, phase="load").kind == "healthy"


def test_every_kind_has_a_log():
    kinds = {row[3] for row in GOLDEN} | {kind for kind, *_ in MESSAGES}
    assert kinds == set(get_args(FailureKind))


def test_every_rule_decides_on_a_message():
    logs = [log for *_, log in MESSAGES] + [path.read_text() for path in LOGS.glob("*.log")]
    found = [Search([log.encode()], exit_code=None).run() for log in logs]
    decided = {id(match.rule) for match in found if match is not None}
    assert [rule.pattern.pattern for rule in RULES if id(rule) not in decided] == []


def test_the_document_names_every_kind_with_its_treatments():
    text = (LOGS.parents[1] / "docs" / "failures.md").read_text().split("## The kinds")[1]
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|[^|]*\|$", text, re.MULTILINE)
    named = {kind: set(re.findall(r"`(\w+)`", treatments)) for kind, treatments in rows}
    assert set(named) == set(get_args(FailureKind))
    for rule in RULES:
        assert rule.treatment in named[rule.kind]


def test_a_line_that_a_rule_matches_holds_one_of_its_needles():
    lines = [line for *_, log in MESSAGES for line in [log, *log.splitlines()]]
    for rule in RULES:
        for line in lines:
            if rule.pattern.search(line.strip()):
                assert any(needle in line.encode() for needle in rule.needles), (rule.pattern.pattern, line)


def test_needles_are_the_longest_plain_text_of_each_alternative():
    assert needles_of(r"^abcd(?:x|y)efg[h-z]?\(no\)+ way|\bplain text\d+") == (b"abcd", b"plain text")
    with pytest.raises(ValueError, match="no plain text"):
        needles_of(r"long enough|\d+")


WRAPPED = (
    "{}RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}\n"
    "{}vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.\n"
)


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "(EngineCore_DP0 pid=7) ERROR 01-02 03:04:05 [core.py:7] ",
        "vllm-1  | (Worker_TP1 pid=7) ERROR 01-02 03:04:05 [v1/executor/multiproc_executor.py:7] ",
        "2026-01-02T03:04:05.678901234Z ERROR 01-02 03:04:05 core.py:7] ",
        "2026-01-02T03:04:05.678901234Z stderr F (EngineCore pid=7) ",
        "Nov 30 01:02:03 node-1 vllm[77]: (EngineCore pid=7) ERROR 11-30 01:02:03 [core.py:7] ",
        "INFO 2026-01-02 03:04:05 ERROR 01-02 03:04:05 [core.py:7] ",
        "[rank0]: ",
        "> (VllmWorkerProcess pid=7) ERROR 01-02 03:04:05 worker.py:7] ",
        "2026-01-02 03:04:05.604 [Info] (Process) (EngineCore pid=7) ",
        "2026-01-02 03:04:05 | ERROR | stderr | ",
        "[2026-01-02T03:04:05Z] (Worker_TP0 pid=7) ERROR 01-02 03:04:05 [worker.py:7] ",
        "[pod/vllm-0/server] (RayWorkerWrapper pid=5, ip=192.0.2.6) ERROR 01-02 03:04:05 [worker_base.py:6] ",
    ],
)
def test_the_cause_is_found_behind_every_prefix_and_before_every_wrapper(prefix):
    cause = f"{prefix}ValueError: No available memory for the cache blocks. Try increasing\n"
    log = f"{prefix}Traceback (most recent call last):\n" + WRAPPED.format(prefix, prefix) + cause
    assert classify(log, exit_code=1, phase="start").kind == "oom_kv_cache_none"
    assert diagnose(log.replace("\n", "\r\n")).line == 4


def test_a_log_of_docker_in_json():
    log = '{"log":"ValueError: No available memory for the cache blocks.\\n","stream":"stderr","time":"2026-01-02"}'
    assert classify(log, exit_code=1, phase="start").kind == "oom_kv_cache_none"


def test_what_stands_before_readiness_did_not_stop_the_server():
    failed = "ERROR 01-02 03:04:05 [core.py:7] ValueError: No available memory for the cache blocks.\n"
    assert classify(failed + SERVING, exit_code=None, phase=None).kind == "healthy"
    assert classify(SERVING + failed, exit_code=None, phase=None).kind == "oom_kv_cache_none"


def test_an_error_of_one_request_is_harmless_when_the_next_are_answered():
    error = "ERROR 01-02 03:04:05 [serving.py:7] ValueError: something about one request\n"
    assert classify(SERVING + error + SERVING.splitlines()[1], exit_code=None, phase="load").kind == "healthy"
    assert classify(SERVING + error, exit_code=None, phase="load").kind == "other"


BOOT = (
    "INFO 01-02 03:04:05 [api_server.py:9] vLLM API server version 0.32.0\n"
    "INFO 01-02 03:04:05 [core.py:9] Initializing a V1 LLM engine (v0.32.0) with config: model='/m'\n"
    "INFO 01-02 03:04:05 [runner.py:9] Starting to load model /m...\n"
)
BUSY = "INFO 01-02 03:04:05 [loggers.py:9] Engine 000: Avg generation throughput: 90.5 tokens/s, Running: 5 reqs\n"
IDLE = BUSY.replace("90.5", "0.0")
TOO_SMALL = (
    "ERROR 01-02 03:04:05 [core.py:9] ValueError: To serve at least one request with the models's max seq len, more\n"
)
CUDA_OOM = "ERROR 01-02 03:04:05 [core.py:9] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
NOISE = [
    "RuntimeWarning: Failed to read commit hash:\nNo module named 'vllm._version'\n",
    "ERROR 01-02 03:04:05 [config.py:9] Error retrieving safetensors: Repo id must be in the form 'name': '/m'.\n",
    "A module that was compiled using NumPy 1.x cannot be run in\nNumPy 2.0.1 as it may crash.\n",
    "dlerror: libnvinfer.so.7: cannot open shared object file: No such file or directory\n",
    "ImportError: /x/flash_attn_2_cuda.so: undefined symbol: _ZN3c104\n",
    "PermissionError: [Errno 13] Permission denied: '/.config/vllm/usage_stats.json'\n",
    "OSError: [Errno 30] Read-only file system: '/home/user/.config/vllm'\n",
    "pip._vendor.pkg_resources.VersionConflict: x\n",
    "git: error: could not lock the file\n",
    "slurmstepd: error: couldn't chdir to `/x': No such file or directory: going to /tmp instead\n",
]


@pytest.mark.parametrize("noise", NOISE)
def test_a_harmless_complaint_before_the_cause_does_not_decide(noise):
    assert classify(noise + BOOT + TOO_SMALL, exit_code=1, phase="start").kind == "oom_kv_cache_too_small"
    assert classify(noise + TOO_SMALL, exit_code=1, phase="start").kind == "oom_kv_cache_too_small"
    killed = "ERROR 01-02 03:04:05 [core.py:9] Worker proc 0 died unexpectedly (exit code: -9)\n"
    assert classify(noise + killed, exit_code=1, phase="start").kind == "host_oom_killed"
    assert classify(noise + BOOT + SERVING, exit_code=None, phase=None).kind == "healthy"


@pytest.mark.parametrize(
    "log",
    [
        NOISE[4],
        NOISE[3] + "RuntimeError: Failed to infer device type\n",
        NOISE[4] + "  Value error, Model architectures ['X'] failed to be inspected. [type=value_error]\n",
    ],
)
def test_a_complaint_that_the_server_ended_with_decides(log):
    assert classify(log, exit_code=1, phase="start").kind == "version_mismatch"


UNKNOWN_MODEL = (
    "ERROR 01-02 03:04:05 [serving.py:9] Error with model error=ErrorInfo(message='The model `a` does not exist.')\n"
)
UNAUTHORIZED = 'INFO:     192.0.2.1:5 - "GET /v1/models HTTP/1.1" 401 Unauthorized\n'
FORBIDDEN_IMAGE = "requests.exceptions.HTTPError: 403 Client Error: Forbidden for url: https://192.0.2.1/y.png\n"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UNKNOWN_MODEL, "client_404_model_name"),
        (UNAUTHORIZED, "client_401"),
        (FORBIDDEN_IMAGE, "auth_gated_model"),
        ("OSError: [Errno 28] No space left on device: '/tmp/log'\n", "other"),
        ("ValueError: At most 0 image(s) may be provided in one prompt.\n", "other"),
        ("requests.exceptions.ConnectionError: HTTPSConnectionPool(host='otel', port=4318): gone\n", "client_timeout"),
    ],
)
def test_what_one_request_met_is_not_what_a_live_server_died_of(error, kind):
    assert classify(SERVING + error + IDLE, exit_code=None, phase="load").kind == kind
    assert classify(SERVING + error + BUSY, exit_code=None, phase="load").kind == "healthy"
    assert classify(SERVING + error + SERVING.splitlines()[1], exit_code=None, phase="load").kind == "healthy"
    assert classify(SERVING + error + CUDA_OOM, exit_code=1, phase="load").kind == "oom_runtime"


def test_whoever_waits_for_a_rank_that_runs_out_of_memory_may_say_so_first():
    waits = "[rank0]:[E102 03:04:05.1 ProcessGroupNCCL.cpp:9] Watchdog caught collective operation timeout: WorkNCCL\n"
    assert classify(SERVING + waits, exit_code=1, phase="load").kind == "nccl_or_distributed"
    assert classify(SERVING + waits + CUDA_OOM, exit_code=1, phase="load").kind == "oom_runtime"


def test_a_kernel_that_torch_tried_out_in_vain_is_no_failure():
    ignored = "ERROR 01-02 03:04:05 [select_algorithm.py:9] Ignoring this choice.\n"
    assert classify(SERVING + CUDA_OOM + ignored, exit_code=None, phase=None).kind == "healthy"


@pytest.mark.parametrize(
    ("log", "exit_code", "kind", "phase"),
    [
        (BOOT + SERVING + CUDA_OOM + BOOT + SERVING, None, "healthy", "load"),
        (BOOT + SERVING + CUDA_OOM + BOOT, None, "oom_runtime", "load"),
        (BOOT + SERVING + BOOT + CUDA_OOM, 1, "oom_weights", "start"),
        (BOOT + SERVING + "INFO:     Shutting down\n" + BOOT + "KeyError: 'layers.0.foo'\n", None, "other", "start"),
        (BOOT + SERVING + BOOT + SERVING + CUDA_OOM, 1, "oom_runtime", "load"),
    ],
)
def test_of_several_servers_in_a_log_the_last_one_counts(log, exit_code, kind, phase):
    failure = classify(log, exit_code=exit_code, phase=None)
    assert (failure.kind, failure.phase) == (kind, phase)


@pytest.mark.parametrize("size", [10, 9000, 300_000])
@pytest.mark.parametrize("words", ["OOMKilled", "EngineDeadError", "ERROR 01-02 03:04:05 [a.py:1] CUDA out of memory"])
@pytest.mark.parametrize(
    "record",
    [
        "INFO 01-02 03:04:05 [logger.py:9] Received request cmpl-1: prompt: '{}', params: SamplingParams(n=1)\n",
        "INFO 01-02 03:04:05 logger.py:9] Generated response cmpl-1 (streaming): output: '{}', finish_reason: stop\n",
        '{{"message": "Received request cmpl-1: prompt: \'{}\', params"}}\n',
    ],
)
def test_what_users_ask_is_not_judged(record, words, size):
    log = SERVING + record.format("x " * size + words)
    assert classify(log, exit_code=None, phase=None).kind == "healthy"
    assert words not in classify(log, exit_code=None, phase=None).evidence


def test_the_level_of_a_record_counts_to_its_end():
    words = "x " * 4000 + "ERROR 01-02 03:04:05 [a.py:1] CUDA out of memory\n"
    assert classify("WARNING 01-02 03:04:05 [a.py:9] " + words, exit_code=None, phase=None).kind == "healthy"
    assert classify("ERROR 01-02 03:04:05 [a.py:9] " + words, exit_code=None, phase=None).kind.startswith("oom_")


TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "/srv/vllm/worker.py", line 7, in determine_available_memory',
    "    raise OutOfMemoryError",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
]


@pytest.mark.parametrize(
    "record",
    [
        {"message": "EngineCore failed to start.", "exc_info": "\n".join(TRACEBACK)},
        {"message": "EngineCore failed to start.", "exc_info": TRACEBACK, "levelname": "ERROR"},
        {"message": "\n".join(["EngineCore failed to start.", *TRACEBACK]), "level": "info"},
        {"message": "Traceback", "exc_text": "\n".join(TRACEBACK), "severity": "ERROR"},
    ],
)
def test_a_traceback_in_json(record):
    found = diagnose("first\n" + json.dumps(record) + "\nRuntimeError: Engine core initialization failed.\n")
    assert (found.failure.kind, found.line) == ("oom_activation_profile", 2)
    assert found.failure.evidence == TRACEBACK[-1]


@pytest.mark.parametrize(("level", "kind"), [("WARNING", "healthy"), ("INFO", "healthy"), ("ERROR", "oom_runtime")])
def test_the_level_in_json(level, kind):
    record = {"levelname": level, "message": "CUDA out of memory while tuning, skipping"}
    assert classify(SERVING + json.dumps(record), exit_code=None, phase=None).kind == kind


def test_a_clean_stop_leaves_errors_that_mean_nothing():
    stop = "INFO:     Shutting down\nvllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.\n"
    assert classify(SERVING + stop, exit_code=0, phase="load").kind == "healthy"
    assert classify(SERVING + stop, exit_code=1, phase="load").kind == "engine_dead"


def test_a_server_that_kills_itself_was_not_killed_by_the_kernel():
    log = "CRITICAL 03-10 08:07:20 [core_client.py:7] Got fatal signal from worker processes, shutting down.\nKilled\n"
    assert classify(log, exit_code=-9, phase="start").kind == "other"
    assert classify("Killed\n", exit_code=-9, phase="start").kind == "host_oom_killed"


BLOCKED = "INFO 01-02 03:04:05 [shm_broadcast.py:9] No available shared memory broadcast block found in 60 seconds.\n"
COMPILING = "INFO 01-02 03:04:05 [backends.py:9] Dynamo bytecode transform time: 9.99 s\n"


@pytest.mark.parametrize(
    ("log", "phase", "kind"),
    [
        (BLOCKED, "load", "healthy"),
        (BLOCKED * 2, "load", "hang_timeout"),
        (SERVING + BLOCKED * 2, None, "hang_timeout"),
        (SERVING + BLOCKED * 2 + SERVING.splitlines()[1], None, "healthy"),
        (SERVING + (BLOCKED + BUSY) * 2, None, "healthy"),
        (SERVING + (BLOCKED + IDLE) * 2, None, "hang_timeout"),
        (COMPILING + BLOCKED * 5, "start", "healthy"),
        (COMPILING + BLOCKED * 10, "start", "hang_timeout"),
        (COMPILING + BLOCKED * 10 + SERVING, "start", "healthy"),
        (BLOCKED * 2, None, "healthy"),
        (BLOCKED * 5, None, "hang_timeout"),
    ],
)
def test_a_blocked_engine_hangs_under_load_but_may_compile_at_the_start(log, phase, kind):
    assert classify(log, exit_code=None, phase=phase).kind == kind


def test_a_slow_start_that_comes_to_its_end_is_no_hang():
    log = "DEBUG 07-15 10:00:10 [core_client.py:7] Waiting for 1 core engine proc(s) to start: {0}\n" * 5
    assert classify(log, exit_code=None, phase=None).kind == "hang_timeout"
    assert classify(log + SERVING, exit_code=None, phase=None).kind == "healthy"


def test_the_phase_is_inferred_from_the_log():
    error = "ValueError: a sentence that nobody has seen"
    assert classify(SERVING + error, exit_code=1, phase=None).phase == "load"
    assert classify(error, exit_code=1, phase=None).phase == "start"


@pytest.mark.parametrize(
    ("kind", "numbers", "words"),
    [
        (
            "oom_free_memory_lt_requested",
            {"free_bytes": 76.05 * GIB, "total_bytes": 79.2 * GIB, "requested_bytes": 77 * GIB},
            "at most 0.96",
        ),
        (
            "oom_free_memory_lt_requested",
            {
                "free_bytes": 5.2 * GIB,
                "total_bytes": 15.6 * GIB,
                "allocation_bytes": 9.75 * GIB,
                "requested_bytes": 10.92 * GIB,
            },
            "at most 0.40",
        ),
        (
            "oom_kv_cache_too_small",
            {"max_model_len_tokens": 65536, "fitting_model_len_tokens": 10720},
            "at most 10,720",
        ),
        ("oom_kv_cache_none", {"available_bytes": -0.5 * GIB}, "-0.5 GiB"),
        ("oom_sampler_warmup", {"max_num_seqs": 1024}, "below 1,024"),
        (
            "oom_weights",
            {"total_bytes": 23.7 * GIB, "free_bytes": 0.2 * GIB, "allocation_bytes": 0.35 * GIB},
            "23.7 GiB",
        ),
    ],
)
def test_advice_uses_the_numbers_of_the_message(kind, numbers, words):
    assert words in advice(kind, "", numbers)


def test_the_name_of_a_field_is_told_with_what_is_wrong_with_it():
    log = "2 validation errors for SchedulerConfig\nmax_num_seqs\n  Input should be greater than or equal to 1 [type=x]"
    failure = classify(log, exit_code=1, phase="start", fixed=["max-num-seqs"])
    assert failure.evidence == "max_num_seqs: Input should be greater than or equal to 1"
    assert failure.treatment == "abort_sweep"


def test_a_fixed_flag_that_decides_alone_is_refused_once_and_for_all():
    log = "ValueError: User-specified max_model_len (9000) is greater than the derived max_model_len (x=4096)"
    assert classify(log, exit_code=1, phase="start", fixed=["max_model_len"]).treatment == "abort_sweep"


@given(
    st.one_of(
        st.text(),
        st.lists(st.sampled_from([rule.pattern.pattern for rule in RULES])).map("\n".join),
        st.lists(st.sampled_from([log for *_, log in MESSAGES])).map("\n".join),
        st.binary().map(lambda data: data.decode(errors="replace")),
    ),
    st.one_of(st.none(), st.integers(-200, 400)),
    st.sampled_from([None, "start", "load"]),
)
def test_classify_never_raises(log, exit_code, phase):
    failure = classify(log, exit_code=exit_code, phase=phase, swept=["block-size"], fixed=["dtype"])
    assert len(failure.evidence) < 1000


@given(st.binary(), st.sampled_from([b"", b"\xff\xfe", b"\xfe\xff"]), st.sampled_from([log for *_, log in MESSAGES]))
def test_any_bytes_are_a_log(data, bom, message):
    found = diagnose(io.BytesIO(bom + data + b"\n" + message.encode() + b"\0\n" + data))
    assert found.failure.kind in get_args(FailureKind)


@pytest.mark.parametrize("figure", ["9" * 400, "0." + "0" * 300 + "1", "0", "1.2.3", ","])
def test_figures_that_are_none(figure):
    message = "Free memory on device ({0}/{0} GiB) on startup is less than desired GPU memory utilization (1, {0} GiB)"
    failure = classify("ValueError: " + message.format(figure), exit_code=1, phase="start")
    assert failure.kind == "oom_free_memory_lt_requested"
    assert "at most" not in failure.advice or "at most 1.00" in failure.advice


def test_a_log_that_powershell_has_redirected(tmp_path):
    path = tmp_path / "server.log"
    path.write_text("first\nOSError: [Errno 98] Address already in use\n", encoding="utf-16")
    assert diagnose(path)[1] == 2
    assert diagnose(path).failure.kind == "port_in_use"


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-8-sig"])
def test_a_log_in_another_encoding(encoding, tmp_path):
    path = tmp_path / "server.log"
    path.write_text("vllm: error: unrecognized arguments: --foo\n", encoding=encoding)
    assert diagnose(path).failure.kind == "invalid_argument"


def test_a_mark_of_utf_16_proves_nothing():
    found = diagnose(io.BytesIO(b"\xff\xfevllm: error: unrecognized arguments: --foo\n"))
    assert found.failure.kind == "invalid_argument"


def test_a_record_in_the_same_line_as_a_progress_bar_hides_nothing():
    log = BOOT + "Loading safetensors:   0% | 0/4\rINFO 01-02 03:04:05 [a.py:9] yes\r" + TRACEBACK[-1]
    assert classify(log, exit_code=1, phase=None).kind == "oom_weights"
    assert classify(log.replace("\n", "\r"), exit_code=1, phase=None).kind == "oom_weights"


def test_an_error_after_a_long_time_and_the_answers_to_the_next_requests():
    answer = SERVING.splitlines()[1] + "\n"
    error = "ERROR 01-02 03:04:05 [serving.py:7] ValueError: something about one request\n"
    assert classify(SERVING + answer * 9000 + error + answer, exit_code=None, phase="load").kind == "healthy"
    log = SERVING + (answer * 9000) + error + answer + error.replace("one", "another")
    assert classify(log, exit_code=None, phase="load").kind == "other"


@pytest.mark.parametrize("before", [0, 1, 4096, (1 << 18) - 60, 1 << 18, 600_000])
def test_where_a_message_stands_in_a_log_does_not_matter(before):
    log = (LOGS / "oom_kv_cache_wrapped.log").read_text()
    filler = "INFO 01-01 00:00:00 [a.py:1] filler\n" * (before // 36) + "x" * (before % 36) + "\n"
    found = diagnose(io.BytesIO((filler + log + filler).encode()))
    assert found.line == filler.count("\n") + 2
    assert found.failure.bounds == classify(log, exit_code=None, phase=None).bounds


HUGE = {
    "healthy": b'(APIServer pid=1) INFO:     192.0.2.1:5 - "POST /v1/completions HTTP/1.1" 200 OK\n',
    "errors": b"(EngineCore pid=1) ERROR 01-02 03:04:05 [core.py:7] RuntimeError: nobody has seen this\n",
    "tracebacks": b"ERROR 01-02 03:04:05 [core.py:7] Traceback (most recent call last):\n",
    "one line": b"ValueError: CUDA out of memory ",
    "nothing": b"\0",
    "empty lines": b"\n",
    "progress bar": b"Loading safetensors checkpoint shards:  75% Completed | 3/4\r",
    "bad requests": (
        b'INFO:     192.0.2.1:5 - "POST /v1/completions HTTP/1.1" 200 OK\n'
        b"ERROR 01-02 03:04:05 [serving.py:7] ValueError: something about one request\n"
    ),
    "modules": b"a." * 400 + b"Error: ValueError\n",
}


def distinct(form):
    """Return ten megabytes of lines that differ in more than their digits."""
    names = (f"{i:x}".translate(str.maketrans("0123456789", "ghijklmnop")) for i in itertools.count(1 << 40))
    size = len(form) + 20
    return "".join(form.format(next(names)) for _ in range(10_000_000 // size)).encode()


@pytest.mark.parametrize(
    "form",
    [
        '{{"message": "Error: {0} Exception: {0}", "id": "{0}"}}\n',
        '{{"id": "{0}", "status": "{0}", "x": "a message that is longer than the others"}}\n',
        'Traceback (most recent call last):\n  File "/x/{0}.py", line 5, in {0}\nValueError: {0} is bad\n',
        "{0}: Input should be {0}\n",
    ],
)
def test_floods_of_lines_that_are_all_different_take_seconds_at_most(form):
    log = distinct(form)
    begun = time.process_time()
    diagnose(io.BytesIO(log))
    assert time.process_time() - begun < 12


@pytest.mark.parametrize("name", HUGE)
def test_ten_megabytes_take_about_a_second(name):
    log = HUGE[name] * (10_000_000 // len(HUGE[name]))
    begun = time.process_time()
    diagnose(io.BytesIO(log))
    # Of this process alone, and with room for a slow machine: what takes quadratic time takes minutes.
    assert time.process_time() - begun < 8


class Endless(io.RawIOBase):
    """Thirty megabytes that nobody holds in memory."""

    left = 30_000_000

    def read(self, size=-1):
        self.left -= size
        return (HUGE["healthy"] * (size // len(HUGE["healthy"]) + 1))[:size] if self.left > 0 else b""


def test_a_log_is_read_in_constant_memory():
    tracemalloc.start()
    assert diagnose(Endless()).failure.kind == "healthy"
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_a_missing_log_is_an_empty_one(tmp_path):
    assert classify(tmp_path / "none.log", exit_code=1, phase="start").kind == "other"


def test_a_fixed_share_that_is_too_large_stops_the_sweep():
    log = LOGS / "oom_free_memory_cuda.log"
    fixed = ("gpu-memory-utilization",)
    assert classify(log, exit_code=1, phase="start", fixed=fixed).treatment == "abort_sweep"
    assert classify(log, exit_code=1, phase="start", swept=fixed, fixed=("dtype",)).treatment == "prune"
    neighbour = LOGS / "oom_free_memory_neighbour.log"
    assert classify(neighbour, exit_code=1, phase="start", fixed=fixed).treatment == "retry"
