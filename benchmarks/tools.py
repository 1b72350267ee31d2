"""The clients that are compared: how each is started, and how its result is read."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.figures import METRICS, Figures, Report

ROOT = Path(__file__).resolve().parents[1]
_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_COUNTED = "counted-"


@dataclass(frozen=True, slots=True)
class Job:
    """One load, as every client gets it. tokenizer: a folder, for clients that cannot do without one."""

    url: str
    model: str
    endpoint: str
    streams: int
    requests: int
    tokens: int
    prompt_tokens: int
    tokenizer: str
    seed: int


@dataclass(frozen=True, slots=True)
class Tool:
    """command(job, folder): what is run. read(stdout, folder): what it found. counts(ids): those that it counted."""

    name: str
    missing: Callable[[], bool]
    command: Callable[[Job, Path], list[str]]
    read: Callable[[str, Path], Report]
    counts: Callable[[Sequence[str]], set[str]] = set
    env: Mapping[str, str] = field(default_factory=dict)


def _ours_command(job: Job, _folder: Path) -> list[str]:
    return [
        *(sys.executable, str(ROOT / "run_sweep.py"), "bench", "--json", "--max-warmup", "8"),
        *("--base-url", job.url, "--model", job.model, "--endpoint", job.endpoint, "--seed", str(job.seed)),
        *("--concurrency", str(job.streams), "--requests", str(job.requests)),
        *("--input-tokens", str(job.prompt_tokens), "--output-tokens", str(job.tokens)),
    ]


def _ours_read(stdout: str, _folder: Path) -> Report:
    document = json.loads(stdout)
    return Report(
        figures={metric: _pick(document.get(f"{metric}_ms") or {}, "mean", "p50", "p99") for metric in METRICS},
        completed=document["completed"],
        failed=document["failed"],
        output_tokens=document["whole_run"]["total_output_tokens"],
        own=document["client"],
    )


def _ours_counts(ids: Sequence[str]) -> set[str]:
    """A level that was disturbed is measured again, under another run id, and only the last one is reported."""
    measured = [request_id for request_id in ids if request_id and not request_id.startswith("warmup-")]
    last = measured[-1].partition("-")[0] if measured else ""
    return {request_id for request_id in measured if request_id.partition("-")[0] == last}


def _pick(source: Mapping[str, Any], *keys: str) -> dict[str, float | None]:
    return {stat: source.get(key) for stat, key in zip(("mean", "p50", "p99"), keys, strict=True)}


def _vllm_command(job: Job, folder: Path) -> list[str]:
    backend = "openai-chat" if job.endpoint == "chat" else "openai"
    return [
        *(sys.executable, str(Path(__file__).with_name("vllm_serve_bench.py")), "--backend", backend),
        *("--base-url", job.url, "--endpoint", _PATHS[job.endpoint], "--model", job.model),
        *("--tokenizer", job.tokenizer, "--dataset-name", "random", "--seed", str(job.seed)),
        *("--random-input-len", str(job.prompt_tokens), "--random-output-len", str(job.tokens), "--ignore-eos"),
        *("--num-prompts", str(job.requests), "--max-concurrency", str(job.streams), "--request-rate", "inf"),
        *("--temperature", "0", "--num-warmups", "0", "--ready-check-timeout-sec", "0", "--disable-tqdm"),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99"),
        *("--request-id-prefix", _COUNTED, "--save-result"),
        *("--result-dir", str(folder), "--result-filename", "result.json"),
    ]


def _vllm_read(_stdout: str, folder: Path) -> Report:
    document = json.loads((folder / "result.json").read_text())
    names = {"ttft": "ttft", "tpot": "tpot", "e2e": "e2el"}
    figures: Figures = {
        metric: _pick(document, f"mean_{name}_ms", f"p50_{name}_ms", f"p99_{name}_ms") for metric, name in names.items()
    }
    return Report(figures, document["completed"], document["failed"], document["total_output_tokens"])


def _guidellm_command(job: Job, folder: Path) -> list[str]:
    return [
        *("guidellm", "run", "--backend"),
        f"kind=openai_http,target={job.url},request_format={_PATHS[job.endpoint]},model={job.model}",
        *("--profile", f"kind=concurrent,streams={job.streams}"),
        *("--constraint", f"kind=max_requests,count={job.requests}", "--data"),
        f"kind=synthetic_text,prompt_tokens={job.prompt_tokens},output_tokens={job.tokens}",
        *("--processor", job.tokenizer, "--random-seed", str(job.seed), "--output-dir", str(folder)),
        "--disable-console-interactive",
    ]


def _guidellm_read(_stdout: str, folder: Path) -> Report:
    metrics = json.loads((folder / "benchmarks.json").read_text())["benchmarks"][0]["metrics"]
    # Its time_per_output_token has the time to the first token in it; the inter-token latency has not.
    names = {
        "ttft": ("time_to_first_token_ms", 1),
        "tpot": ("inter_token_latency_ms", 1),
        "e2e": ("request_latency", 1e3),
    }
    figures: Figures = {}
    for metric, (name, to_ms) in names.items():
        found = metrics[name]["successful"]
        figures[metric] = {
            "mean": found["mean"] * to_ms,
            "p50": found["percentiles"]["p50"] * to_ms,
            "p99": found["percentiles"]["p99"] * to_ms,
        }
    totals, output = metrics["request_totals"], metrics["output_token_count"]["successful"]
    return Report(figures, totals["successful"], totals["errored"], round(output["mean"] * totals["successful"]))


def _aiperf_command(job: Job, folder: Path) -> list[str]:
    return [
        *("aiperf", "profile", "--model", job.model, "--tokenizer", job.tokenizer, "--url", job.url),
        *("--endpoint-type", job.endpoint, "--streaming", "--concurrency", str(job.streams)),
        *("--request-count", str(job.requests), "--isl", str(job.prompt_tokens), "--osl", str(job.tokens)),
        *("--extra-inputs", "ignore_eos:true", "--use-server-token-count", "--random-seed", str(job.seed)),
        *("--workers-max", "1", "--ui", "none", "--artifact-dir", str(folder)),
    ]


def _aiperf_read(_stdout: str, folder: Path) -> Report:
    document = json.loads(next(folder.rglob("profile_export_aiperf.json")).read_text())
    names = {"ttft": "time_to_first_token", "tpot": "inter_token_latency", "e2e": "request_latency"}
    completed = round(document["request_count"]["avg"])
    return Report(
        figures={metric: _pick(document[name], "avg", "p50", "p99") for metric, name in names.items()},
        completed=completed,
        failed=round((document.get("error_request_count") or {}).get("avg") or 0),
        output_tokens=round(document["output_sequence_length"]["avg"] * completed),
    )


def _not_on_path(program: str) -> Callable[[], bool]:
    return lambda: shutil.which(program) is None


TOOLS = (
    Tool(
        name="ours",
        missing=lambda: False,
        command=_ours_command,
        read=_ours_read,
        counts=_ours_counts,
    ),
    Tool(
        name="vllm",
        missing=lambda: importlib.util.find_spec("vllm") is None,
        command=_vllm_command,
        read=_vllm_read,
        counts=lambda ids: {request_id for request_id in ids if request_id.startswith(_COUNTED)},
        env={"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"},
    ),
    Tool("guidellm", _not_on_path("guidellm"), _guidellm_command, _guidellm_read),
    Tool("aiperf", _not_on_path("aiperf"), _aiperf_command, _aiperf_read),
)
