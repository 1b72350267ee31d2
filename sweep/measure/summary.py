"""Figures of a level, from the records of its requests and what its server said meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from sweep.measure.arrivals import arrivals
from sweep.measure.client import client_stats
from sweep.measure.goodput import Cohort, cohort
from sweep.measure.latency import (
    dist_of,
    e2e_s,
    e2e_sched_s,
    gap_dist,
    icl_s,
    itl_s,
    tpot_s,
    ttfot_s,
    ttft_s,
    ttft_sched_s,
)
from sweep.measure.prefix import offered_frac
from sweep.measure.prom import Samples, window_stats
from sweep.measure.rates import window_rates
from sweep.measure.stability import stable
from sweep.measure.validity import cautions, faults, stale_hits
from sweep.model import KindStats, LevelStats, LoadRun, RequestRecord

_NS = 1e9


def level_stats(
    run: LoadRun,
    slo: Mapping[str, float],
    scrapes: Sequence[tuple[int, Samples]] = (),
    *,
    exact_prompts: bool = True,
) -> LevelStats:
    """Summarise a run. slo: such as ttft_p99 -> seconds; for goodput the same number is the limit of each request.

    Rates are of the steady window, by the time at which tokens arrived. Latencies are of the counted requests that
    succeeded; what failed is a miss of every SLO. scrapes: of the server's metrics, in the order of time; none for a
    server that has none. exact_prompts: what prompts share is known to the token, as of random ones sent as ids; the
    text of a file may share more than anybody knows.
    """
    counted = sorted((r for r in run.records if r.counted and r.status != "cancelled"), key=_begun_ns)
    good = [r for r in counted if r.status == "ok"]
    failed = [r for r in counted if r.status != "ok"]
    judged = cohort(run.records, slo)
    rates = window_rates(run, judged if slo else None)
    # Where nothing was counted, the warm-up's failures are all there is to tell.
    errors = Counter(r.status for r in failed or (r for r in run.records if r.status not in {"ok", "cancelled"}))
    client = client_stats(run, scrapes)
    found = [*faults(run, counted, errors, client, scrapes), *(stale_hits(run, scrapes) if exact_prompts else ())]
    is_stable = stable(run)
    return LevelStats(
        level=run.level,
        completed=len(good),
        failed=len(failed),
        errors=dict(errors),
        window_s=(run.window_end_ns - run.window_start_ns) / _NS,
        warmup_s=(run.window_start_ns - run.start_ns) / _NS,
        warmup_requests=sum(not r.counted and r.t_start_ns < run.window_start_ns for r in run.records),
        steady=run.steady,
        ttft_s=dist_of(good, ttft_s),
        ttft_sched_s=dist_of(good, ttft_sched_s),
        tpot_s=dist_of(good, tpot_s),
        itl_s=gap_dist(good, itl_s),
        e2e_s=dist_of(good, e2e_s),
        e2e_sched_s=dist_of(good, e2e_sched_s),
        icl_s=gap_dist(good, icl_s),
        ttfot_s=dist_of(good, ttfot_s),
        output_tps=rates.output_tps,
        total_tps=rates.total_tps,
        request_rps=rates.request_rps,
        goodput_rps=rates.goodput_rps,
        slo_attainment_frac=rates.slo_attainment_frac,
        intervals=rates.intervals,
        prompt_tokens=sum(r.prompt_tokens for r in good),
        output_tokens=sum(r.output_tokens for r in good),
        prefix_offered_frac=offered_frac(run.records),
        client=client,
        server=window_stats(scrapes, run.window_start_ns, run.window_end_ns),
        rate_rps=run.rate_rps,
        arrivals=arrivals(run),
        stable=is_stable,
        cut_off=len(judged.cut_off),
        kinds=_kinds(counted, judged, slo),
        verdict=run.verdict,
        valid=not found,
        reasons=(*(fault.words for fault in found), *cautions(run, is_stable, scrapes)),
        # What the server did itself will not go away by measuring again.
        again=bool(found) and all(fault.again for fault in found),
    )


def _begun_ns(record: RequestRecord) -> int:
    return record.t_start_ns if record.t_sched_ns is None else record.t_sched_ns


def _kinds(counted: Sequence[RequestRecord], judged: Cohort, slo: Mapping[str, float]) -> dict[str, KindStats]:
    names = sorted({record.kind for record in counted if record.kind is not None})
    return {name: _kind(name, counted, judged, slo) for name in names}


def _kind(name: str, counted: Sequence[RequestRecord], judged: Cohort, slo: Mapping[str, float]) -> KindStats:
    own = [record for record in counted if record.kind == name]
    good = [record for record in own if record.status == "ok"]
    met, missed = (sum(record.kind == name for record in part) for part in (judged.good, judged.missed))
    return KindStats(
        completed=len(good),
        failed=len(own) - len(good),
        ttft_s=dist_of(good, ttft_s),
        ttft_sched_s=dist_of(good, ttft_sched_s),
        tpot_s=dist_of(good, tpot_s),
        itl_s=gap_dist(good, itl_s),
        e2e_s=dist_of(good, e2e_s),
        e2e_sched_s=dist_of(good, e2e_sched_s),
        slo_attainment_frac=met / (met + missed) if slo and met + missed else None,
    )
