"""Records made by hand; their times are given in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence

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
) -> RequestRecord:
    stamps = tuple((round(at * MS), count) for at, count in chunks)
    last = stamps[-1][0] if stamps else round(start * MS)
    return RequestRecord(
        request_id="r",
        counted=counted,
        t_sched_ns=None if sched is None else round(sched * MS),
        t_start_ns=round(start * MS),
        t_send_ns=round((start if send is None else send) * MS),
        t_headers_ns=None,
        t_end_ns=last if end is None else round(end * MS),
        chunks=stamps,
        prompt_tokens=prompt_tokens,
        prefix_group=group,
        requested_tokens=2,
        output_tokens=sum(count for _, count in stamps),
        status=status,
    )


def load_run(
    records: Sequence[RequestRecord],
    *,
    window: tuple[float, float] = (0, 1000),
    start: float = 0,
    steady: bool = True,
    cpu_s: float = 0.01,
    prefix_tokens: int = 0,
) -> LoadRun:
    return LoadRun(
        level="c=4",
        records=tuple(records),
        start_ns=round(start * MS),
        window_start_ns=round(window[0] * MS),
        window_end_ns=round(window[1] * MS),
        end_ns=round(window[1] * MS) + MS,
        steady=steady,
        stamp_source="kernel",
        cpu_s=cpu_s,
        prefix_tokens=prefix_tokens,
    )
