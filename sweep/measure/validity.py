"""Whether a level's figures can be trusted: what makes them worthless, and what one should know of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sweep.measure.client import Overhead, level_scrapes, overhead, send_lags_s
from sweep.measure.prefix import block_tokens, expected_hits, is_cached
from sweep.measure.prom import PREFIX_HITS, Scrapes, cache_config, growth, restarted
from sweep.model import ClientStats, LoadRun, RequestRecord

_NS = 1e9
_MOST_FAILED_FRAC = 0.05
_MOST_OVERHEAD_S = 0.005
_MOST_OVERHEAD_FRAC = 0.05  # of the server's TTFT
_MOST_LAG_FRAC = 0.05  # of the mean gap between two requests
_HARMLESS_LAG_S = 0.001
_MOST_CENSORED_FRAC = 0.01
_COUNT_TOLERANCE_FRAC = 0.005
_HIT_TOLERANCE_FRAC = 0.02  # of the prompt tokens
_BUSY_FRAC = 0.7  # of a core
_LAGGING_S = 0.002
_ENDINGS = {
    "stalled": "no stream brought a byte any more",
    "failing": "request after request failed",
    "behind": "the client could not send as fast as was asked for",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """What makes a level worthless. again: not the server's doing, so that a second try may go better."""

    words: str
    again: bool = False


def faults(
    run: LoadRun, counted: Sequence[RequestRecord], errors: Mapping[str, int], client: ClientStats, scrapes: Scrapes
) -> list[Fault]:
    """Return what makes the figures worthless. counted: the counted requests that were not cut off.

    The client is judged by its effect on what was measured; how busy it was only explains that. Rules that need the
    server's own metrics are silent without them.
    """
    context = _context(client)
    by_client = [Fault(words + context, again=True) for words in (*_late_eyes(run, client, scrapes), *_late_hand(run))]
    return [*_worthless(run, counted, errors, scrapes), *by_client, *_foreign(run, client)]


def cautions(run: LoadRun, stable: bool | None, scrapes: Scrapes) -> Iterator[str]:
    """Yield what a reader should know of figures that are good all the same."""
    if not run.steady:
        yield "the warm-up's longest time came before the speed was steady"
    if stable is False:
        yield "the queue grew during the window, so latencies depend on how long was measured"
    found = overhead(run, scrapes)
    if found and _is_large(found, found.seconds) and _stamped_by_kernel(run):
        yield (
            f"first tokens came {_ms(found.seconds)} after the server made them ({_both(found)}): that time went by in"
            " the server's HTTP front end or on the network, since the kernel's time stamps do not wait for the client"
        )
    if found and _is_large(found, -found.seconds):
        yield (
            f"by its own figures the server was slower than the client saw ({_both(found)}): its clock is off, or it"
            " also answers somebody else"
        )
    config = _config(scrapes)
    shared = max((r.prefix_tokens for r in run.records), default=0)
    if config and is_cached(config) and 0 < shared < block_tokens(config):
        yield (
            f"the shared prefix of {shared} tokens is shorter than a block of the KV cache ({block_tokens(config)}),"
            " so the prefix cache cannot serve it"
        )


def _worthless(
    run: LoadRun, counted: Sequence[RequestRecord], errors: Mapping[str, int], scrapes: Scrapes
) -> Iterator[Fault]:
    words = ", ".join(f"{status} {count}" for status, count in errors.items())
    failed = sum(record.status != "ok" for record in counted)
    if run.ended_early:
        yield Fault(f"the load ended early: {_ENDINGS[run.ended_early]}")
    if any(record.status == "ok" and record.t_send_ns is None for record in counted):
        yield Fault("the time at which requests were sent could not be had, so latencies are not known")
    if not counted:
        yield Fault(f"no request was counted{f'; before that: {words}' if words else ''}")
    elif failed > _MOST_FAILED_FRAC * len(counted):
        yield Fault(f"{failed} of {len(counted)} requests failed ({words}), more than {_MOST_FAILED_FRAC:.0%}")
    if restarted(level_scrapes(run, scrapes)):
        yield Fault("a counter of the server went down: it was started anew during the load")


def _late_eyes(run: LoadRun, client: ClientStats, scrapes: Scrapes) -> Iterator[str]:
    """Yield how the client saw tokens later than they came."""
    found = overhead(run, scrapes)
    if found and _is_large(found, found.seconds) and not _stamped_by_kernel(run):
        yield f"the client saw first tokens {_ms(found.seconds)} after the server made them ({_both(found)})"
    if (client.late_events_frac or 0.0) > _MOST_CENSORED_FRAC:
        yield f"of {client.late_events_frac:.1%} of the events it is only known that they came no later than noted"
    if (client.unstamped_frac or 0.0) > _MOST_CENSORED_FRAC:
        yield f"{client.unstamped_frac:.1%} of the reads came without the kernel's time stamp"


def _is_large(found: Overhead, seconds: float) -> bool:
    return seconds > found.slack_s + max(_MOST_OVERHEAD_S, _MOST_OVERHEAD_FRAC * found.server_s)


def _both(found: Overhead) -> str:
    return f"mean TTFT {_ms(found.client_s)} against the server's {_ms(found.server_s)}"


def _stamped_by_kernel(run: LoadRun) -> bool:
    """Tell whether arrivals are known however late the client read; too many bare reads are a fault of their own."""
    return run.stamp_source == "kernel"


def _late_hand(run: LoadRun) -> Iterator[str]:
    """Yield how the client sent requests later than it should have, so that the server had less to do than was said.

    The gap that counts is that between two arrivals in an open loop, between two requests of a slot in a closed one.
    What is below a millisecond is no fault: an engine takes up requests between its steps, which are longer.
    """
    lags = send_lags_s(run)
    sent = [r for r in run.records if r.counted and r.t_send_ns is not None]
    if not sent:
        return
    if any(r.t_sched_ns is not None for r in sent):
        gap_s = (run.window_end_ns - run.window_start_ns) / _NS / len(sent)
    else:
        gap_s = float(np.mean([r.t_end_ns - r.t_start_ns for r in sent])) / _NS
    mean_s = float(np.mean(lags))
    if mean_s > max(_HARMLESS_LAG_S, _MOST_LAG_FRAC * gap_s):
        yield f"requests were sent {_ms(mean_s)} late on average, with {_ms(gap_s)} from one to the next"


def _context(client: ClientStats) -> str:
    parts = []
    if (client.loop_lag_p99_s or 0.0) > _LAGGING_S:
        parts.append(f"its event loop was up to {_ms(client.loop_lag_p99_s or 0.0)} late")
    if (client.busiest_frac or 0.0) > _BUSY_FRAC:
        parts.append(f"it used {client.busiest_frac:.0%} of a core")
    return f"; the client was slow: {', '.join(parts)}" if parts else ""


def _foreign(run: LoadRun, client: ClientStats) -> Iterator[Fault]:
    """Yield signs that the server did not only serve this load."""
    exact = all(record.token_count in {"exact", "usage"} for record in run.records)
    if client.tokens is not None and client.server_tokens is not None and exact:
        # What a server made for a request that failed on the way may not have arrived.
        lost = sum(max(0, r.requested_tokens - r.output_tokens) for r in run.records if r.status != "ok")
        more = client.server_tokens - client.tokens
        allowed = _COUNT_TOLERANCE_FRAC * client.tokens
        if more > allowed + lost or -more > allowed:
            why = "somebody else uses the server" if more > 0 else "it is not the only one that answers"
            yield Fault(
                f"over the whole level the server made {client.server_tokens} tokens, the client received"
                f" {client.tokens}: {why}",
                again=True,
            )


def stale_hits(run: LoadRun, scrapes: Scrapes) -> Iterator[Fault]:
    """Yield a fault if the prefix cache served more than the prompts of this level, known to the token, can explain."""
    level = level_scrapes(run, scrapes)
    hits = growth(level[0][1], level[-1][1], PREFIX_HITS) if level else None
    if hits is not None:
        block = block_tokens(_config(scrapes))
        expected, sent = expected_hits(run.records, block)
        # A chat template begins all prompts alike, which fills a block at most beyond what is shared anyway.
        allowed = expected + _HIT_TOLERANCE_FRAC * sent + block * len(run.records)
        if hits > allowed:
            yield Fault(
                f"the prefix cache served {round(hits)} tokens, while the prompts share {expected} at most: it still"
                " knew prompts from before",
                again=True,
            )


def _config(scrapes: Scrapes) -> Mapping[str, str]:
    return cache_config(scrapes[-1][1]) if scrapes else {}


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"
