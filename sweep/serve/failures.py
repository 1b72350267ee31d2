"""Why a vLLM server failed, read from its log and from how it ended.

A log is searched as a whole. A message that names the cause wins over a symptom, a symptom over a consequence, and the
first of several over the later ones: an engine that dies makes every process around it complain after it.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from sweep.failure import Failure, FailureKind, Phase, Treatment
from sweep.serve import vllm_log
from sweep.serve.failure_rules import CAUSE, CONSEQUENCE, LESS_MEMORY, RULES, WEIGHTS, WRAPPER, Rule
from sweep.serve.vllm_flags import normalise
from sweep.serve.vllm_log import Line

_HALF_LOG_BYTES = 4 << 20
_MAX_EVIDENCE = 500
_SECRET = re.compile(r"hf_\w{20,}|sk-[\w-]{20,}|Bearer \S+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

# What was going on when memory ran out. First by the functions of the traceback, of which the outermost decides …
_FUNCTIONS: tuple[tuple[re.Pattern[str], FailureKind], ...] = (
    (re.compile(r"\b(?:load_model|get_model)\b"), "oom_weights"),
    (re.compile(r"\bdetermine_(?:available_memory|num_available_blocks)\b|\bprofile_run\b"), "oom_activation_profile"),
    (re.compile(r"\b(?:initialize_cache|compile_or_warm_up_model|capture_(?:model|end))\b"), "oom_cudagraph_capture"),
    (re.compile(r"\b(?:run_engine_loop|run_busy_loop|sample_tokens)\b|MQLLMEngine"), "oom_runtime"),
)
# … else by the last step of the start that the log has told of.
_STEPS: tuple[tuple[re.Pattern[str], FailureKind], ...] = (
    (re.compile(r"Initializing an? (?:V1 )?LLM engine|Starting to load model"), "oom_weights"),
    (re.compile(r"Loading (?:model )?weights took|Model loading took"), "oom_activation_profile"),
    (re.compile(r"KV cache size|KV cache memory|# \w+ blocks|Captur"), "oom_cudagraph_capture"),
    (re.compile(r"Application startup complete|Uvicorn running"), "oom_runtime"),
)
_OOM_ADVICE: dict[FailureKind, str] = {
    "oom_weights": WEIGHTS,
    "oom_activation_profile": "Lower max-num-batched-tokens or max-num-seqs, or use more GPUs.",
    "oom_cudagraph_capture": "Lower gpu-memory-utilization, max-num-seqs or cudagraph-capture-sizes.",
    "oom_runtime": LESS_MEMORY,
}

# Records of these levels are no errors, whatever words stand in them ("If OOM'ed, check …").
_QUIET = frozenset({"DEBUG", "INFO", "WARNING"})
_WAITING = re.compile(r"Waiting for \d+ local, \d+ remote core engine|No available shared memory broadcast block found")
_PYDANTIC_NOISE = re.compile(r"\s*\[type=.*")
_MAX_LINE = 4000


@dataclass(frozen=True, slots=True)
class _Found:
    rule: Rule
    kind: FailureKind
    evidence: str
    bounds: dict[str, float]


def classify(
    log: Path | str,
    *,
    exit_code: int | None,
    phase: Phase,
    swept: Collection[str] = (),
    fixed: Collection[str] = (),
) -> Failure:
    """Return why the server failed; kind "healthy" when nothing speaks of a failure. Never raises.

    log: the path of a log, or its text. swept, fixed: names of flags; a fixed flag at fault stops the sweep.
    """
    lines = _merged(read_log(log) if isinstance(log, Path) else log)
    found = _search(lines, phase)
    killed = _signal_of(exit_code) == "SIGKILL"
    if found is None or (killed and found.rule.rank >= CONSEQUENCE):
        return _without_message(lines, exit_code, phase)
    return Failure(
        found.kind,
        _treatment(found, frozenset(swept), frozenset(fixed)),
        evidence=_clean(found.evidence),
        advice=found.rule.advice if found.kind == found.rule.kind else _OOM_ADVICE[found.kind],
        phase=phase,
        bounds=found.bounds or None,
        exit_code=exit_code,
    )


def read_log(path: Path) -> str:
    """Return the log, of a huge one its two ends; nothing when there is none."""
    try:
        with path.open("rb") as file:
            head = file.read(2 * _HALF_LOG_BYTES)
            size = file.seek(0, 2)
            if size <= len(head):
                return head.decode(errors="replace")
            file.seek(max(size - _HALF_LOG_BYTES, _HALF_LOG_BYTES))
            return (head[:_HALF_LOG_BYTES] + b"\n" + file.read()).decode(errors="replace")
    except OSError:
        return ""


def _merged(log: str) -> list[Line]:
    """Return the lines, with pydantic's two lines for a field as one: `block_size: Input should be greater than 0`."""
    merged: list[Line] = []
    for line in vllm_log.lines(log):
        if line.text.startswith("Input should ") and merged:
            merged[-1] = line._replace(text=f"{merged[-1].text}: {line.text}")
        else:
            merged.append(line._replace(text=line.text[:_MAX_LINE]))
    return merged


def _search(lines: Sequence[Line], phase: Phase) -> _Found | None:
    """Go through the log once, and keep the first line of the best rank."""
    best: _Found | None = None
    doing = _Doing(phase)
    seen: set[Line] = set()
    for i, line in enumerate(lines):
        doing.see(line)
        if line in seen:  # an error that repeats with every request says no more the second time
            continue
        seen.add(line)
        rule = _first_rule(line, below=WRAPPER + 1 if best is None else best.rule.rank)
        if rule is None:
            continue
        # A terminal may have wrapped the message, and with it the numbers.
        whole = "".join(part.text for part in lines[i : i + 3])
        kind = doing.kind() if rule.kind == "oom_runtime" else rule.kind
        best = _Found(rule, kind, line.text, _bounds(rule, whole))
        if rule.rank == CAUSE:
            break
    return best


def _first_rule(line: Line, *, below: int) -> Rule | None:
    """Return the first rule of the lowest rank that the line satisfies."""
    best = None
    for rule in RULES:
        if rule.rank < below and (line.level not in _QUIET or rule.any_level) and rule.pattern.search(line.text):
            best, below = rule, rule.rank
    return best


def _bounds(rule: Rule, text: str) -> dict[str, float]:
    match = rule.pattern.search(text)
    named = match.groupdict() if match else {}
    numbers = {name: float(value.rstrip(".")) for name, value in named.items() if value}
    return {
        f"{name[:-4]}_bytes" if name.endswith("_gib") else name: value * 1024**3 if name.endswith("_gib") else value
        for name, value in numbers.items()
    }


class _Doing:
    """What the server was doing at a line of its log."""

    def __init__(self, phase: Phase) -> None:
        self._serving = phase == "load"
        self._function: FailureKind | None = None
        self._step: FailureKind | None = None

    def see(self, line: Line) -> None:
        self._step = next((kind for pattern, kind in _STEPS if pattern.search(line.text)), self._step)
        if line.level in _QUIET:
            return
        if line.text.startswith("Traceback ("):
            self._function = None
        elif self._function is None:
            self._function = next((kind for pattern, kind in _FUNCTIONS if pattern.search(line.text)), None)

    def kind(self) -> FailureKind:
        return "oom_runtime" if self._serving else self._function or self._step or "oom_activation_profile"


def _treatment(found: _Found, swept: frozenset[str], fixed: frozenset[str]) -> Treatment:
    """Return the rule's treatment, unless who set the flag at fault, or the numbers, say otherwise."""
    rule = found.rule
    if rule.treatment == "abort_sweep":
        return "prune" if swept.intersection(rule.flags) else "abort_sweep"
    if found.kind in {"invalid_argument", "unsupported_feature"} and rule.treatment == "prune":
        message = _PYDANTIC_NOISE.sub("", found.evidence)
        named = {normalise(word) for word in re.findall(r"[A-Za-z][\w-]+", message)} | set(rule.flags)
        return "abort_sweep" if named & fixed and not named & swept else "prune"
    if (
        "memory on device" in found.evidence
        and found.bounds.get("free_bytes", 1.0) < found.bounds.get("total_bytes", 0.0) / 2
    ):
        return "retry"  # an empty card has nearly all of its memory free: something else holds this one
    return rule.treatment


def _without_message(lines: Sequence[Line], exit_code: int | None, phase: Phase) -> Failure:
    """Judge by how the process ended, when its log names no cause."""
    name = _signal_of(exit_code)
    last = _clean(lines[-1].text) if lines else "the log is empty"
    kind: FailureKind
    treatment: Treatment
    if name == "SIGKILL":
        kind, treatment = "host_oom_killed", "prune"
        advice = "Most likely the kernel, for want of memory on the host (dmesg): let the server take less of it."
    elif name in {"SIGTERM", "SIGINT", "SIGHUP"}:
        kind, treatment, advice = "other", "retry", "Somebody stopped the server from outside."
    elif exit_code:
        kind, treatment, advice = "other", "fail_trial", "Look at the last lines of server.log."
    elif _WAITING.search(last):
        kind, treatment, advice = (
            "hang_timeout",
            "retry",
            "The engine does not answer; if that stays so, end the server.",
        )
    else:
        return Failure(
            "healthy", "ignore", evidence=last, advice="Nothing in the log speaks of a failure.", phase=phase
        )
    seen = f"the server ended by {name or f'exit code {exit_code}'}; last line: {last}" if exit_code else last
    return Failure(kind, treatment, evidence=seen, advice=advice, phase=phase, exit_code=exit_code)


def _signal_of(exit_code: int | None) -> str | None:
    """Return the signal's name: -9 as Python says it, 137 as a shell says it."""
    if exit_code is None:
        return None
    number = -exit_code if exit_code < 0 else exit_code - 128
    return signal.Signals(number).name if number in set(signal.Signals) else None


def _clean(text: str) -> str:
    text = _SECRET.sub("***", _CONTROL.sub(" ", _PYDANTIC_NOISE.sub("", text)))
    return text if len(text) <= _MAX_EVIDENCE else text[: _MAX_EVIDENCE - 1] + "…"
