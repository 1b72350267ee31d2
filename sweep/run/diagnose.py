"""`diagnose`: why a vLLM server failed and what to change, from a log that may come from anywhere."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO

from sweep.errors import ConfigError
from sweep.failure import BOUNDS, Phase, Treatment
from sweep.serve.advice import gib
from sweep.serve.failures import Diagnosis, diagnose
from sweep.text import FAILURE_WORDS, number, printable

_WIDTH = 100
_IN_A_SWEEP: dict[Treatment, str] = {
    "prune": "the configuration counts as infeasible, and the search learns to stay away from it.",
    "retry": "the trial is tried again, after cleaning up.",
    "fail_trial": "the trial counts as failed and teaches the search nothing; too many of them stop the sweep.",
    "abort_sweep": "it stops, because every trial would fail alike.",
    "ignore": "nothing, for nothing is wrong.",
}


def diagnosis(log: str, *, exit_code: int | None, phase: Phase | None, fixed: Collection[str]) -> Diagnosis:
    """Read a log, of standard input for "-". Raises ConfigError for one that cannot be read."""
    if log == "-":
        return _of(sys.stdin.buffer, "standard input", exit_code, phase, fixed)
    try:
        with Path(log).open("rb") as file:
            return _of(file, log, exit_code, phase, fixed)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {log}: {getattr(error, 'strerror', None) or error}") from error


def _of(stream: BinaryIO, name: str, exit_code: int | None, phase: Phase | None, fixed: Collection[str]) -> Diagnosis:
    try:
        return diagnose(stream, exit_code=exit_code, phase=phase, fixed=fixed)
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror or error}") from error


def diagnosis_document(found: Diagnosis) -> dict[str, Any]:
    """Return what `--json` prints. line: the number of the decisive line; null where how the server ended decided."""
    failure = found.failure
    document = {
        "kind": failure.kind,
        "treatment": failure.treatment,
        "evidence": printable(failure.evidence),
        "advice": failure.advice,
        "line": found.line,
        "phase": failure.phase,
        "exit_code": failure.exit_code,
    }
    return document | ({"bounds": failure.bounds} if failure.bounds else {})


def diagnosis_text(found: Diagnosis) -> str:
    """Return what people read: the kind, the decisive line, what to change, the numbers, what a sweep would do."""
    failure = found.failure
    words = FAILURE_WORDS[failure.kind]
    where = f"line {found.line}" if found.line else "seen"
    parts = [
        f"{_begun(words)}  ({failure.kind})",
        textwrap.fill(f"{where}: {printable(failure.evidence)}", _WIDTH, subsequent_indent="  "),
        "\n".join(_wrapped(step) for step in re.split(r" (?=\d\. )", failure.advice)),
    ]
    if failure.bounds:
        parts.append(
            "\n".join(f"  {_quantity(name, value):>14}  {BOUNDS[name]}" for name, value in failure.bounds.items())
        )
    return "\n\n".join([*parts, f"In a sweep: {_IN_A_SWEEP[failure.treatment]}"])


def _begun(words: str) -> str:
    return words if words.startswith("vLLM") else words[0].upper() + words[1:]


def _wrapped(step: str) -> str:
    """Wrap a sentence, or a numbered step, which is indented."""
    if re.match(r"\d\. ", step):
        return textwrap.fill(step, _WIDTH, initial_indent="  ", subsequent_indent="     ")
    return textwrap.fill(step, _WIDTH)


def _quantity(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return gib(value)
    return f"{number(value)} tokens" if name.endswith("_tokens") else number(value)
