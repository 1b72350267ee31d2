"""What a study sends, as its folder keeps it: the digest of the planned requests, and the files that they come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from sweep.failure import Failure
from sweep.load.plan import Plan
from sweep.load.workload import LoadSection


def workload_document(load: LoadSection, seed: int) -> dict[str, Any]:
    """Return sha256 (of the planned requests), words, seed, synthetic, trace_s, files (path -> sha256) and notes.

    trace_s: when the last request of a trace is due, in seconds; None of other loads. synthetic: prompts are made of
    random tokens. Raises ConfigError for a file that cannot be used.
    """
    plan = Plan(load, seed)
    whole = [islice(plan.offsets_s(level, warmup=False), plan.length) for level in load.levels() if level.trace]
    return {
        "sha256": plan.sha256(),
        "words": load.words,
        "seed": seed,
        "synthetic": plan.synthetic,
        "trace_s": max((at_s for offsets in whole for at_s in offsets), default=None),
        "files": plan.files,
        "notes": plan.notes(),
    }


def workload_notes(document: Mapping[str, Any], moe: bool | None) -> list[str]:
    """Return what people should know of a workload on this model. moe: whether it is a mixture of experts."""
    notes: list[str] = list(document["notes"])
    if moe and document["synthetic"]:
        notes.append(
            "The model is a mixture of experts, and the prompts are random tokens, which go to other experts than text"
            " does: its speed may differ from yours. Recorded prompts (load.prompt.file) tell."
        )
    return notes


def workload_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Say what differs between the workloads of two calls of one study, whose settings are the same."""
    if not before or before.get("sha256") == now["sha256"]:
        return
    files = before.get("files", {})
    changed = [path for path, digest in now["files"].items() if files.get(path) != digest]
    if changed:
        yield f"load: the content of {', '.join(changed)} has changed since the study began"
    else:
        yield "load: the same settings plan other requests now: numpy, or this program, draws them in another way"


def other_workload(plan: Plan, expected: str | None) -> Failure | None:
    """Return why a worker must not run a trial: it would send other requests than the study's other trials got."""
    if expected is None or plan.sha256() == expected:
        return None
    return Failure(
        kind="other",
        treatment="abort_sweep",
        evidence="This worker would send other requests than the study's other trials got.",
        advice="A file that the load names has changed since the study started, or the worker's numpy is another one.",
    )
