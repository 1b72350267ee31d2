"""Records made by hand; their times are given in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sweep.measure.prom import Samples, parse
from sweep.model import LoadRun, RequestRecord

MS = 1_000_000


def request(
    *,
    start: float = 0,
    send: float | None = None,
    chunks: Sequence[tuple[float, int]] = ((10, 1), (20, 1)),
    end: float | None = None,
    sched: float | None = None,
    counted: bool = True,
    status: str = "ok",
    prompt_tokens: int = 100,
    group: int | None = None,
    answer: float | None = None,
    **more: Any,
) -> RequestRecord:
    stamps = tuple((round(at * MS), count) for at, count in chunks)
    last = stamps[-1][0] if stamps else round(start * MS)
    values: dict[str, Any] = {
        "request_id": "r",
        "counted": counted,
        "t_sched_ns": None if sched is None else round(sched * MS),
        "t_start_ns": round(start * MS),
        "t_send_ns": round((start if send is None else send) * MS),
        "t_headers_ns": None,
        "t_end_ns": last if end is None else round(end * MS),
        "chunks": stamps,
        "prompt_tokens": prompt_tokens,
        "prefix_group": group,
        "requested_tokens": 2,
        "output_tokens": sum(count for _, count in stamps),
        "status": status,
        "answer_ns": None if answer is None else round(answer * MS),
    }
    return RequestRecord(**{**values, **more})


def load_run(
    records: Sequence[RequestRecord],
    *,
    window: tuple[float, float] = (0, 1000),
    start: float = 0,
    end: float | None = None,
    **more: Any,
) -> LoadRun:
    values: dict[str, Any] = {
        "level": "c=4",
        "records": tuple(records),
        "start_ns": round(start * MS),
        "window_start_ns": round(window[0] * MS),
        "window_end_ns": round(window[1] * MS),
        "end_ns": round((window[1] + 1 if end is None else end) * MS),
        "steady": True,
        "stamp_source": "kernel",
        "cpu_s": 0.01,
    }
    return LoadRun(**{**values, **more})


def scraped(
    at: float,
    *,
    generated: int | None = None,
    hits: int | None = None,
    ttft: tuple[float, int] | None = None,
    config: str = 'block_size="16",enable_prefix_caching="True"',
) -> tuple[int, Samples]:
    """A scrape of /metrics. at: in ms. ttft: sum of seconds, and count."""
    lines = [f"vllm:cache_config_info{{{config}}} 1.0"]
    lines += [f"vllm:generation_tokens_total {generated}"] if generated is not None else []
    lines += [f"vllm:prefix_cache_hits_total {hits}"] if hits is not None else []
    if ttft is not None:
        name = "vllm:time_to_first_token_seconds"
        lines += [f"{name}_sum {ttft[0]}", f"{name}_count {ttft[1]}"]
    return round(at * MS), parse("\n".join(lines))
