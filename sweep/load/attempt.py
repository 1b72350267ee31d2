"""A request under way, and the record that remains of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from sweep.load.sse import Stream, read_stream
from sweep.model import RequestRecord


@dataclass(slots=True, eq=False)
class Attempt:
    """What the client notes while a request runs. Decoding waits until the load is over: it would cost punctuality.

    Stamps are `perf_counter_ns`. status stays empty unless something went wrong that is known at once.
    """

    request_id: str
    counted: bool
    prompt_tokens: int
    prefix_group: int | None
    requested_tokens: int
    t_start_ns: int
    exact_prompt: bool = True  # sent as token ids, so that its length needs no second opinion
    t_sched_ns: int | None = None
    t_send_ns: int | None = None
    t_headers_ns: int | None = None
    t_end_ns: int = 0
    pieces: list[tuple[int, bytes]] = field(default_factory=list)  # (arrived at, bytes of the body)
    status: str = ""
    error: str | None = None


def record(attempt: Attempt, *, vllm: bool) -> RequestRecord:
    """Decode what was received. vllm: the answer was asked to be exactly as long as requested."""
    stream = read_stream(attempt.pieces, vllm=vllm)
    status = attempt.status or _status(stream, attempt.requested_tokens if vllm else None)
    return RequestRecord(
        request_id=attempt.request_id,
        counted=attempt.counted,
        t_sched_ns=attempt.t_sched_ns,
        t_start_ns=attempt.t_start_ns,
        t_send_ns=attempt.t_send_ns,
        t_headers_ns=attempt.t_headers_ns,
        t_end_ns=attempt.t_end_ns,
        chunks=tuple(stream.chunks),
        prompt_tokens=attempt.prompt_tokens if attempt.exact_prompt else stream.prompt_tokens or attempt.prompt_tokens,
        prefix_group=attempt.prefix_group,
        requested_tokens=attempt.requested_tokens,
        output_tokens=stream.tokens,
        status=status,
        finish_reason=stream.finish_reason,
        error=attempt.error or stream.error or _why(status, stream, attempt),
        token_count=stream.counts,
    )


def _status(stream: Stream, requested: int | None) -> str:
    """Class of a stream that ended by itself; requested: its length, where that was to be exact."""
    if stream.error is not None:
        return "inband_error"
    if not stream.done:
        return "truncated"
    if not stream.chunks:
        return "empty"
    reported = stream.completion_tokens
    if requested is not None and (stream.tokens != requested or reported not in {None, stream.tokens}):
        return "length_mismatch"
    return "ok"


def _why(status: str, stream: Stream, attempt: Attempt) -> str | None:
    if status == "length_mismatch":
        return (
            f"{attempt.requested_tokens} tokens were asked for, {stream.tokens} came,"
            f" and the usage says {stream.completion_tokens}"
        )
    return {"truncated": "the stream ended without [DONE]", "empty": "the stream carried no token"}.get(status)
