"""What limited the server, in plain words, as far as its own metrics can tell."""

from __future__ import annotations

from sweep.model import Flags, LevelStats, ServerStats
from sweep.report.figures import prefix_hit_frac
from sweep.text import number, quantity

_FULL_FRAC = 0.95  # of the KV cache: the last few per cent are blocks that are only partly filled
_AMPLE_FRAC = 0.6
_BOUND_FRAC = 0.75  # of the time to first token


def limits(level: LevelStats, flags: Flags) -> list[str]:
    """Explain one level of a trial. flags: as the trial set them; a limit that is not among them is not blamed."""
    server = level.server or ServerStats()
    found = (
        _errors(level),
        _queue(server, flags),
        _prefill(server),
        _kv_cache(server, level),
        _prefix(server, level, flags),
    )
    return [text for text in found if text]


def _errors(level: LevelStats) -> str | None:
    if not level.failed:
        return None
    classes = ", ".join(f"{name} {count}" for name, count in sorted(level.errors.items()))
    return f"{level.failed} of {level.failed + level.completed} requests failed: {classes or 'class unknown'}."


def _queue(server: ServerStats, flags: Flags) -> str | None:
    share = _queue_share(server)
    if server.queue_s is None or share < 0.5:
        return None
    waited = f"Requests waited {_time(server.queue_s)} in the queue, {_share(share)} of the time to their first token: "
    limit = flags.get("max-num-seqs")
    if _is_full(server):
        return waited + "the KV cache was full, so no more could start. More KV cache would lower TTFT."
    if isinstance(limit, int) and server.running_peak is not None:
        if server.running_peak >= limit:
            return waited + f"all {limit} places (max-num-seqs) were taken. More places would lower TTFT."
        return (
            waited
            + "they queued behind the prefill of others, with places and KV cache to spare. TTFT grows with load."
        )
    return waited + "they queued behind the prefill of others or for a place (max-num-seqs). TTFT grows with load."


def _prefill(server: ServerStats) -> str | None:
    if not server.prefill_s or not server.ttft_s or server.prefill_s < server.ttft_s / 2 or _queue_share(server) >= 0.5:
        return None
    spent = f"Of {_time(server.ttft_s)} to the first token, {_time(server.prefill_s)} were the request's own prefill"
    if server.prefill_s >= _BOUND_FRAC * server.ttft_s:
        return f"{spent}: TTFT is bound by computing the prompt."
    return f"{spent}; most of the rest is the API server's own work (tokenizing, handing over), little was waiting."


def _kv_cache(server: ServerStats, level: LevelStats) -> str | None:
    if server.preemptions:
        return (
            f"The KV cache ran full: {number(server.preemptions)} preemptions for {number(level.completed)} requests. "
            "A preempted request is computed again, which raises TPOT and E2E p99."
        )
    peak = server.kv_usage_peak_frac
    if peak is None or _AMPLE_FRAC <= peak < _FULL_FRAC:
        return None
    if peak >= _FULL_FRAC:
        return (
            f"The KV cache was {_share(peak)} full at its peak, without preemptions: just large enough for this load."
        )
    return f"The KV cache was never more than {_share(peak)} full: more memory for it would not help under this load."


def _prefix(server: ServerStats, level: LevelStats, flags: Flags) -> str | None:
    hits = prefix_hit_frac(server)
    offered = level.prefix_offered_frac or 0.0
    if hits:
        could = f"; an ideal cache could have served {_share(offered)}" if offered else ""
        return f"The prefix cache served {_share(hits)} of the prompt tokens{could}."
    if offered < 0.01:
        return None
    if flags.get("enable-prefix-caching") is False:
        return f"Prefix caching was off, while {_share(offered)} of the prompt tokens were shared."
    return (
        f"The prefix cache served nothing, though {_share(offered)} of the prompt tokens were shared; a prefix shorter"
        " than a block cannot be served."
    )


def _queue_share(server: ServerStats) -> float:
    """Return how much of the time to first token was waiting; 0 where the server did not tell."""
    return min(1.0, (server.queue_s or 0.0) / server.ttft_s) if server.ttft_s else 0.0


def _is_full(server: ServerStats) -> bool:
    return bool(server.preemptions) or (server.kv_usage_peak_frac or 0.0) >= _FULL_FRAC


def _time(seconds: float) -> str:
    return quantity(1000 * seconds, "ms") if seconds < 1 else quantity(seconds, "s")


def _share(frac: float) -> str:
    return f"{100 * frac:.0f} %" if frac >= 0.01 or frac == 0 else "1 %"
