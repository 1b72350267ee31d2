"""Whether requests arrived as the schedule of an open loop wanted them to."""

from __future__ import annotations

import numpy as np

from sweep.model import Arrivals, LoadRun

_NS = 1e9
_FEWEST_GAPS = 20
_FEWEST_BINS = 10


def arrivals(run: LoadRun) -> Arrivals | None:
    """Describe how requests were sent in the window; None in a closed loop, and where the window never opened.

    Whatever was sent counts, by the time of its first byte. A process is known by its gaps and by how they follow each
    other: too few gaps, or fewer than ten whole seconds, leave that open.
    """
    window_s = (run.window_end_ns - run.window_start_ns) / _NS
    if run.rate_rps is None or window_s <= 0:
        return None
    sent = sorted(
        (r.t_send_ns - run.window_start_ns) / _NS
        for r in run.records
        if r.t_send_ns is not None and run.window_start_ns <= r.t_send_ns < run.window_end_ns
    )
    gaps = np.diff(sent)
    bins = int(window_s)
    counts = np.histogram(sent, bins=bins, range=(0, bins))[0] if bins >= _FEWEST_BINS else np.zeros(0)
    enough = len(gaps) >= _FEWEST_GAPS and gaps.mean() > 0
    return Arrivals(
        asked_rps=run.rate_rps,
        achieved_rps=len(sent) / window_s,
        gap_cv=float(gaps.std(ddof=1) / gaps.mean()) if enough else None,
        dispersion=float(counts.var(ddof=1) / counts.mean()) if counts.sum() > 0 else None,
    )
