"""Stands in for `vllm serve`: its flags, its log, its processes, its memory limits, its answers, and its ways to die.

    python tests/fakes/vllm.py [serve MODEL] [--config FILE.yaml] [flags]

Set by environment:
FAKE_VLLM_TOTAL_GIB (80), FAKE_VLLM_FREE_FRAC (0.99), FAKE_VLLM_WEIGHTS_GIB (16)   the card and the model
FAKE_VLLM_SPEED (1)     how many times faster than its model the engine runs
FAKE_VLLM_START_S (0.1) how long loading takes
FAKE_VLLM_TOKENS_PER_WORD (1)   of a text
FAKE_VLLM_FAULT         what goes wrong: a comma list of name[=value], see FAULTS
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import yaml
from engine_model import Card, Limits, StartError, check_config, plan_memory

FAULTS = {
    "die_at_start": "an error that names no cause, exit 1",
    "gated": "the hub's answer for a gated repository, exit 1",
    "model_missing": "the hub's answer for a repository that is not there, exit 1",
    "hang_start": "never ready, and not a line of log",
    "slow_start": "ready after so many seconds, logging all along",
    "flood_log": "far more log than a pipe holds",
    "ignore_sigterm": "the API server does not stop on SIGTERM",
    "setsid_engine": "the engine process leaves the process group",
    "wrong_model_name": "serves under another name than asked for",
    "exit0_after": "exits 0 after so many requests",
    "engine_dead_after": "the engine process dies after so many requests; the server exits 0, as vLLM does",
    "hang_stream_after": "after so many requests no stream goes on, while /health stays 200",
    "http_500_every": "every N-th request is answered 500",
    "http_503_every": "every N-th request is answered 503",
    "inband_error_every": "every N-th stream carries an error after its first token",
    "cut_every": "every N-th stream ends without [DONE]",
    "warmup_drift": "slower during so many seconds after the first request",
    "other_user": "somebody else's requests are served as well during so many seconds after the first request",
    "plain_openai": "not vLLM: unknown fields of a body are answered 400, no token ids, no /metrics",
}

# Flags that take a value, with its type; a tuple lists the choices.
VALUE_FLAGS: dict[str, type | tuple[str, ...]] = {
    "model": str,
    "tokenizer": str,
    "revision": str,
    "host": str,
    "port": int,
    "api-key": str,
    "config": str,
    "dtype": ("auto", "bfloat16", "float", "float16", "float32", "half"),
    "kv-cache-dtype": ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"),
    "quantization": str,
    "load-format": str,
    "download-dir": str,
    "max-model-len": int,
    "gpu-memory-utilization": float,
    "kv-cache-memory-bytes": int,
    "max-num-seqs": int,
    "max-num-active-seqs": int,
    "max-num-batched-tokens": int,
    "max-num-scheduled-tokens": int,
    "long-prefill-token-threshold": int,
    "block-size": int,
    "seed": int,
    "tensor-parallel-size": int,
    "pipeline-parallel-size": int,
    "data-parallel-size": int,
    "api-server-count": int,
    "cpu-offload-gb": float,
    "performance-mode": ("balanced", "interactivity", "throughput"),
    "optimization-level": ("0", "1", "2", "3"),
    "attention-backend": str,
    "scheduling-policy": ("fcfs", "priority"),
    "scheduler-cls": str,
    "stream-interval": int,
    "shutdown-timeout": float,
    "generation-config": str,
    "reasoning-parser": str,
    "hf-overrides": json.loads,
    "compilation-config": json.loads,
    "speculative-config": json.loads,
    "max-cudagraph-capture-size": int,
    "distributed-executor-backend": str,
    "uvicorn-log-level": str,
}
# Flags with a --no- form.
SWITCHES = (
    "enable-prefix-caching",
    "enable-chunked-prefill",
    "enable-lora",
    "enforce-eager",
    "trust-remote-code",
    "async-scheduling",
    "enable-log-requests",
    "enable-expert-parallel",
    "enable-per-request-metrics",
    "enable-prompt-tokens-details",
    "disable-uvicorn-access-log",
    "disable-log-stats",
)


def human_int(text: str) -> int:
    """4k is 4000 and 4K is 4096, as vLLM reads them."""
    scale = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 1)
    return int(text[:-1] if scale > 1 else text) * scale


human_int.__name__ = "int"  # argparse puts the name into its message


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vllm serve")
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--lora-modules", nargs="+")
    for name, kind in VALUE_FLAGS.items():
        if isinstance(kind, tuple):
            parser.add_argument(f"--{name}", choices=kind)
        else:
            parser.add_argument(f"--{name}", type=human_int if kind is int else kind)
    for name in SWITCHES:
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction)
    return parser


def config_args(path: str) -> list[str]:
    """The file as vLLM 0.32's `serve` turns it into arguments: `false` is dropped without a word."""
    if not path.endswith((".yaml", ".yml")):
        raise ValueError(f"Config file must be of a yaml/yml type. {path.rpartition('.')[2]} supplied")
    found: list[str] = []
    for key, value in yaml.safe_load(Path(path).read_text()).items():
        if value is False or value == []:
            continue
        found.append(f"--{key}")
        if isinstance(value, list):
            found += [str(item) for item in value]
        elif isinstance(value, dict):
            found.append(json.dumps(value))
        elif value is not True:
            found.append(str(value))
    return found


def dashed(arg: str) -> str:
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value if arg.startswith("--") else arg


def parse(argv: list[str]) -> argparse.Namespace:
    """`serve` and the model come first, then the file's arguments, then the command line's, so that these win."""
    head = argv[:1] if argv[:1] == ["serve"] else []
    if head and len(argv) > 1 and not argv[1].startswith("-"):
        head = argv[:2]
    rest = argv[len(head) :]
    if "--config" in rest:  # `--config=FILE` is not found here, and so is ignored
        at = rest.index("--config")
        rest = config_args(rest[at + 1]) + rest[:at] + rest[at + 2 :]
    args = build_parser().parse_args(head[1:] + [dashed(arg) for arg in rest])
    args.model = args.model_tag or args.model or "Qwen/Qwen3-0.6B"
    return args


def read_faults(text: str) -> dict[str, float]:
    faults = {}
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        if name not in FAULTS:
            sys.exit(f"FAKE_VLLM_FAULT: there is no {name!r}; known are {', '.join(FAULTS)}")
        faults[name] = float(value or 1)
    return faults


@dataclass
class Log:
    """Lines as vLLM writes them: process, level, time, source."""

    process: str
    pid: int

    def record(self, level: str, source: str, message: str) -> None:
        self.raw(f"{level} {datetime.now().astimezone():%m-%d %H:%M:%S} [{source}] {message}")

    def info(self, source: str, message: str) -> None:
        self.record("INFO", source, message)

    def raw(self, text: str) -> None:
        print("\n".join(f"({self.process} pid={self.pid}) {line}" for line in text.splitlines()), flush=True)


def name_process(title: str) -> None:
    """Set the name that `ps` shows, both the short one and the command line (Linux)."""
    ctypes.CDLL(None).prctl(15, title.encode(), 0, 0, 0)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end
    ctypes.memmove(start, title.encode()[: end - start - 1].ljust(end - start, b"\0"), end - start)


def fork_engine(*, own_session: bool) -> int:
    """Start the process that holds the GPU. Nothing but SIGKILL ends it, not even the end of its parent."""
    ready_r, ready_w = os.pipe()
    pid = os.fork()
    if pid:
        os.close(ready_w)
        os.read(ready_r, 1)  # its signals and its name are set now
        os.close(ready_r)
        return pid
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if own_session:
        os.setsid()
    name_process("VLLM::EngineCore")
    os.close(ready_r)
    os.close(ready_w)
    while True:
        signal.pause()


def kill_engine(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        return


def bind(host: str | None, port: int | None) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host or "0.0.0.0", 8000 if port is None else port))
    return sock


HUB_GATED = """\
huggingface_hub.errors.GatedRepoError: 401 Client Error. (Request ID: Root=1-0)
Cannot access gated repo for url https://huggingface.co/{model}/resolve/main/config.json.
Access to model {model} is restricted. You must have access to it and be authenticated to access it. Please log in.
OSError: You are trying to access a gated repo.
Make sure to have access to it at https://huggingface.co/{model}."""
HUB_MISSING = """\
huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error. (Request ID: Root=1-0)
Repository Not Found for url: https://huggingface.co/{model}/resolve/main/config.json.
OSError: {model} is not a local folder and is not a valid model identifier listed on 'https://huggingface.co/models'"""


def fail_at_look_up(args: argparse.Namespace, faults: dict[str, float], api: Log) -> None:
    for fault, text in (("gated", HUB_GATED), ("model_missing", HUB_MISSING)):
        if fault in faults:
            api.raw("Traceback (most recent call last):\n" + text.format(model=args.model))
            sys.exit(1)


def fail_in_engine(error: StartError, api: Log, core: Log, engine_pid: int) -> NoReturn:
    """The cause first, far above the last line, which names none."""
    core.record("ERROR", "core.py:1508", "EngineCore failed to start.")
    core.record("ERROR", "core.py:1508", "Traceback (most recent call last):")
    for line in error.chain:
        core.record("ERROR", "core.py:1508", line)
    core.raw("Process EngineCore:\nTraceback (most recent call last):\n" + error.chain[-1])
    kill_engine(engine_pid)
    api.raw(
        "Traceback (most recent call last):\n"
        '  File "/srv/venv/lib/python3.11/site-packages/vllm/v1/engine/utils.py", line 1431, in wait_for_engine\n'
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"
    )
    sys.exit(1)


def start_engine(limits: Limits, card: Card, faults: dict[str, float], core: Log) -> int:
    """Load the model; returns the number of KV cache blocks."""
    if "hang_start" in faults:
        while True:
            time.sleep(60)
    core.info("core.py:112", f"Initializing a V1 LLM engine (v0.32.0) with config: model='{limits.model}'")
    if "flood_log" in faults:
        for n in range(20_000):
            core.info("flood.py:1", f"line {n} " + "x" * 100)
    load_s = faults.get("slow_start", float(os.environ.get("FAKE_VLLM_START_S", "0.1")))
    end = time.monotonic() + load_s
    while (left := end - time.monotonic()) > 0:
        core.info("weight_utils.py:700", f"Loading safetensors checkpoint shards, {left:.1f} s to go")
        time.sleep(min(0.2, left))
    if "die_at_start" in faults:
        raise StartError("RuntimeError: the engine met a state that it does not know")
    memory = plan_memory(limits, card)
    core.info(
        "gpu_model_runner.py:5160", f"Model loading took {card.weights_gib:.2f} GiB memory and {load_s:.2f} seconds"
    )
    core.info("gpu_worker.py:759", f"Available KV cache memory: {memory.kv_gib:.2f} GiB")
    memory.check_kv(limits)
    tokens = memory.blocks * limits.block_size
    core.info(
        "kv_cache_utils.py:2327",
        f"GPU KV cache size: {tokens:,} tokens, Maximum concurrency for {limits.max_model_len:,} tokens per request: "
        f"{tokens / limits.max_model_len:.2f}x",
    )
    memory.check_sampler(limits)
    if not limits.enforce_eager:
        core.info("gpu_model_runner.py:6243", "Graph capturing finished in 2 secs, took 0.11 GiB")
    core.info("core.py:402", f"init engine (profile, create kv cache, warmup model) took {load_s:.2f} s")
    return memory.blocks


def main(argv: list[str]) -> None:
    faults = read_faults(os.environ.get("FAKE_VLLM_FAULT", ""))
    args = parse(argv)
    api = Log("APIServer", os.getpid())
    api.info("api_utils.py:327", f"vLLM server version 0.32.0, serving model {args.model}")
    given = {k: v for k, v in vars(args).items() if v is not None}
    api.info("api_utils.py:286", f"non-default args: {given}")
    fail_at_look_up(args, faults, api)
    card = Card.from_env(os.environ, args.tensor_parallel_size or 1)
    limits = Limits.resolve(args, card)
    if problem := check_config(limits):
        api.raw("Traceback (most recent call last):\n" + problem)
        sys.exit(1)
    try:
        sock = bind(args.host, args.port)
    except OSError as error:
        api.raw(f"Traceback (most recent call last):\nOSError: {error}")
        sys.exit(1)
    engine_pid = fork_engine(own_session="setsid_engine" in faults)
    core = Log("EngineCore", engine_pid)

    def stop_while_loading(number: int, _frame: object) -> NoReturn:
        kill_engine(engine_pid)
        sys.exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN if "ignore_sigterm" in faults else stop_while_loading)
    try:
        blocks = start_engine(limits, card, faults, core)
    except StartError as error:
        fail_in_engine(error, api, core, engine_pid)

    from openai_app import Server  # noqa: PLC0415  # slow to import, and of no use to a start that fails

    server = Server(args, limits, blocks, faults, api, core, engine_pid)
    try:
        asyncio.run(server.serve(sock))
    finally:
        kill_engine(engine_pid)


if __name__ == "__main__":
    main(sys.argv[1:])
