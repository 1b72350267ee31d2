"""What a failure means in the light of the trials before it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sweep.failure import FailureKind
from sweep.model import Measured, Outcome

# Ends that do not say whose fault they are: once may be an accident, twice with the same flags is theirs.
UNEXPLAINED: frozenset[FailureKind] = frozenset({"engine_dead", "hang_timeout", "host_oom_killed"})


def reconsidered(measured: Measured, earlier: Sequence[Outcome], outcomes: Sequence[Outcome]) -> Measured:
    """Return what was measured, with the failure's treatment as the trials before it have it.

    earlier: tries of the same trial. outcomes: all trials so far.
    """
    failure = measured.failure
    if failure is None:
        return measured
    if failure.kind in UNEXPLAINED and failure.treatment != "abort_sweep":
        before = [outcome.trial for outcome in earlier if _kind(outcome) == failure.kind]
        if not before:
            return replace(measured, state="failed", failure=replace(failure, treatment="retry"))
        advice = f"It ended like this in trial {before[-1]} as well, so these flags are taken to be the cause."
        told = replace(failure, treatment="prune", advice=f"{failure.advice} {advice}")
        return replace(measured, state="infeasible", failure=told)
    if failure.kind == "oom_free_memory_lt_requested" and failure.treatment in {"prune", "abort_sweep"}:
        roomier = _found_as_much(outcomes, (failure.bounds or {}).get("requested_bytes"))
        if roomier is not None:
            advice = f"Trial {roomier.trial} found as much free, so something else holds the memory now."
            told = replace(failure, treatment="retry", advice=advice)
            return replace(measured, state="failed", failure=told)
    return measured


def _kind(outcome: Outcome) -> FailureKind | None:
    return outcome.measured.failure.kind if outcome.measured.failure else None


def _found_as_much(outcomes: Sequence[Outcome], requested_bytes: float | None) -> Outcome | None:
    """Return a trial whose server found this much memory free, or was given it."""
    if requested_bytes is None:
        return None
    return next((outcome for outcome in reversed(outcomes) if _found_bytes(outcome) >= requested_bytes), None)


def _found_bytes(outcome: Outcome) -> float:
    facts, failure = outcome.measured.server, outcome.measured.failure
    found = [facts.free_bytes or 0.0]
    if outcome.state == "complete":
        found.append(facts.requested_bytes or 0.0)
    if failure is not None and failure.kind == "oom_free_memory_lt_requested":
        found.append((failure.bounds or {}).get("free_bytes", 0.0))
    return max(found)
