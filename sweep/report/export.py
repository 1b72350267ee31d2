"""best_config.yaml: what `vllm serve --config` takes as it is, under a header that says where it comes from."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from sweep.files import write_atomic
from sweep.report.view import StudyView
from sweep.text import printable

FILE_NAME = "best_config.yaml"
_SECRET_NAME = re.compile(r"(secret|token|key|passw|api|access|cred)", re.IGNORECASE)


def best_config_yaml(
    view: StudyView, trial: int, config: Mapping[str, Any], *, env: Mapping[str, str], check: str
) -> str:
    """Return the text of best_config.yaml.

    config: the keys of a `vllm serve --config` file, switched-off flags already in their `no-` form.
    check: how the file was checked, or why it was not, as a sentence.
    """
    off = [name for name, value in config.items() if value is False or value is None]
    if off:
        # vLLM 0.32 drops `x: false` in silence and reads `x: null` as the word "None".
        raise ValueError(f"not expressible in a vLLM config file: {', '.join(off)}")
    # A line break in a name must not end the comment and begin a key.
    comments = [f"# {name:<10} {printable(text)}".rstrip() for name, text in _header(view, trial, env, check)]
    body = yaml.safe_dump(dict(config), sort_keys=True, default_flow_style=False, width=1000)
    return "\n".join(comments) + "\n" + body


def write_best_config(
    path: Path, view: StudyView, trial: int, config: Mapping[str, Any], *, env: Mapping[str, str], check: str
) -> None:
    write_atomic(path, best_config_yaml(view, trial, config, env=env, check=check))


def _header(view: StudyView, trial: int, env: Mapping[str, str], check: str) -> list[tuple[str, str]]:
    """Return the lines of the header as (name, text); the names are ours."""
    outcome = view.outcome(trial)
    return [
        ("Result:", _verdict(view, trial)),
        ("Study:", f"{view.name}, {view.title(trial)}"),
        ("Measured:", outcome.started_at if outcome else ""),
        ("vLLM:", view.vllm_version or "version unknown"),
        ("Device:", view.device),
        ("Model:", f"{view.model}, revision {view.revision or 'not pinned'}"),
        ("Workload:", view.workload),
        ("Objective:", f"{view.objective}, {view.result(trial)}"),
        ("SLOs:", view.slo_words or "none"),
        *(("Missed:", miss) for miss in (view.misses(trial) if view.best is None else ())),
        ("Checked:", check),
        ("", ""),
        ("Run it:", f"{view.command} --config {FILE_NAME}"),
        *([("elsewhere:", f"vllm serve --config {FILE_NAME}")] if view.command != "vllm serve" else []),
        ("", "(with a space: vLLM 0.32 ignores --config=FILE)"),
        *(("Set first:", f"export {_assignment(*item)}") for item in env.items()),
    ]


def _verdict(view: StudyView, trial: int) -> str:
    if view.best is None:
        return "No trial met the SLOs. This configuration comes closest, and misses them as said below."
    if trial == view.baseline:
        return "The best configuration found is the baseline: no trial did better."
    return "The best configuration found, measured in one launch."


def _assignment(name: str, value: str) -> str:
    return f"{name}=..." if _SECRET_NAME.search(name) else f"{name}={shlex.quote(value)}"
