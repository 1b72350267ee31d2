"""The load client's own cost and punctuality, and what the server says of the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sweep.measure.latency import dist, ttft_s
from sweep.measure.prom import GENERATED, TTFT, Scrapes, around, between, growth, mean_growth
from sweep.model import ClientStats, LoadRun, RequestRecord

_NS = 1e9
_MOST_UNMATCHED_FRAC = 0.2


@dataclass(frozen=True, slots=True)
class Overhead:
    """Mean TTFT on both sides, over the requests whose first token came between two scrapes.

    slack_s: by how much the difference may be wrong, since the two sides do not know quite the same requests.
    """

    client_s: float
    server_s: float
    slack_s: float

    @property
    def seconds(self) -> float:
        return self.client_s - self.server_s


def client_stats(run: LoadRun, scrapes: Scrapes) -> ClientStats:
    """Describe the client. Without scrapes, what only they tell is None."""
    chunks = sum(len(record.chunks) for record in run.records)
    lag = dist(send_lags_s(run))
    found = overhead(run, scrapes)
    received, generated = whole_tokens(run, scrapes)
    return ClientStats(
        cpu_us_per_event=1e6 * run.cpu_s / chunks if chunks else None,
        send_lag_p99_s=lag.p99 if lag else None,
        stamp_source=run.stamp_source,
        overhead_s=found.seconds if found else None,
        late_events_frac=_late_frac([r for r in run.records if r.counted]),
        unstamped_frac=run.unstamped_frac,
        processes=run.processes,
        busiest_frac=run.busiest_frac,
        loop_lag_p99_s=run.loop_lag_p99_s,
        tokens=received,
        server_tokens=generated,
    )


def send_lags_s(run: LoadRun) -> list[float]:
    """Return how late each counted request was sent: after it was due, in a closed loop after its slot was free."""
    return [
        (r.t_send_ns - (r.t_start_ns if r.t_sched_ns is None else r.t_sched_ns)) / _NS
        for r in run.records
        if r.t_send_ns is not None and r.counted
    ]


def overhead(run: LoadRun, scrapes: Scrapes) -> Overhead | None:
    """Compare the client's TTFT with the server's own; None where they do not speak of nearly the same requests.

    The server notes a TTFT when the token is made, so the requests are those whose first token came between the two
    scrapes at the window's edges. Some near the edges may be known to one side only; then the difference is uncertain
    by their share of the spread.
    """
    found = between(scrapes, run.window_start_ns, run.window_end_ns)
    if not found:
        return None
    start_ns, end_ns = found[0][0], found[-1][0]
    server_s, count = mean_growth(found[0][1], found[-1][1], TTFT)
    here = [r for r in run.records if r.chunks and start_ns < r.chunks[0][0] <= end_ns]
    own = [value for r in here if (value := ttft_s(r)) is not None]
    if server_s is None or not own:
        return None
    unmatched_frac = abs(count - len(own)) / count
    if unmatched_frac > _MOST_UNMATCHED_FRAC:
        return None
    return Overhead(float(np.mean(own)), server_s, unmatched_frac * float(np.ptp(own)))


def whole_tokens(run: LoadRun, scrapes: Scrapes) -> tuple[int, int | None]:
    """Return the tokens received over the whole level, and those that the server made in the same time.

    The latter is None without scrapes around the level, and where what was under way at the end was cut off.
    """
    received = sum(record.output_tokens for record in run.records)
    found = level_scrapes(run, scrapes) if run.drained else ()
    generated = growth(found[0][1], found[-1][1], GENERATED) if found else None
    return received, None if generated is None else round(generated)


def level_scrapes(run: LoadRun, scrapes: Scrapes) -> Scrapes:
    """Return the scrapes from before the level's first request to after its last; none if they are not there."""
    begun = min((record.t_start_ns for record in run.records), default=run.start_ns)
    ended = max((record.t_end_ns for record in run.records), default=run.end_ns)
    return around(scrapes, begun, ended)


def _late_frac(records: Sequence[RequestRecord]) -> float | None:
    chunks = sum(len(record.chunks) for record in records)
    return sum(record.late_events for record in records) / chunks if chunks else None
