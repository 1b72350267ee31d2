"""`check`: what a sweep would do, and whether vLLM would take its flags, before a night is spent on it."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path
from typing import Any

from sweep.config import SweepConfig
from sweep.errors import MachineError
from sweep.run.knowledge import Knowledge, what_is_known
from sweep.run.loop import first_guess_s
from sweep.run.night import plan_text
from sweep.run.preflight import Preflight, config_file, known_before, preflight
from sweep.run.value_check import values_to_ask
from sweep.run.workload import workload_document, workload_notes
from sweep.serve.kind import argv
from sweep.text import flag_value

_SHOWN = 12


def check_document(config: SweepConfig, *, ask_vllm: bool) -> dict[str, Any]:
    """Check a space and return the plan. Raises ConfigError or MachineError for what would stop the sweep."""
    checked = asyncio.run(preflight(config) if ask_vllm else known_before(config))
    workload = workload_document(config.load, config.search.seed)
    trace_s, moe = workload["trace_s"], checked.moe
    known = what_is_known(config, checked)
    folder = Path("results") / config.run.name / "trials" / "0000"
    launch = config.serve.launch(config.baseline, swept=tuple(config.search.params), trial_dir=folder)
    try:
        command = shlex.join(argv(launch, port=8000))
    except MachineError as fault:
        command = f"not known: {fault}"
    return {
        "plan": plan_text(config, trace_s),
        "space_points": config.space.size,
        "trials": config.run.trials,
        "expected_s": round(config.run.trials * first_guess_s(config, trace_s)),
        "swept": {
            name: {"values": [*param.values()[:_SHOWN], *param.values()[-1:]][: param.size], "size": param.size}
            for name, param in config.search.params.items()
        },
        "baseline": config_file(config, config.baseline),
        "baseline_resolved": _left_to_vllm(config, checked) if ask_vllm else None,
        "vllm_version": checked.vllm_version,
        "platform": checked.platform,
        "catalogue": _known_flags(checked),
        "refused": {
            name: [{"value": check.value, "reason": check.error} for check in found if check.error]
            for name, found in checked.alone.items()
        },
        "same_config": {name: _alike(checked, name) for name in checked.alone},
        "command": command,
        "memory": known.expectation(),
        "too_large": _too_large(config, known),
        "notes": [*checked.notes, *config.notes(), *workload_notes(workload, moe)],
    }


def _too_large(config: SweepConfig, known: Knowledge) -> dict[str, list[dict[str, Any]]]:
    """Return of each swept flag the values that do not fit, by how they do not, the other flags being the baseline's.

    Where the baseline itself does not fit, its other flags may be to blame, and nothing is said.
    """
    if not config.memory.skip or known.impossible(config.baseline):
        return {}
    found: dict[str, list[dict[str, Any]]] = {}
    for name, values in values_to_ask(config).items():
        kinds: dict[str, dict[str, Any]] = {}
        for value in values:
            why = known.impossible({**config.baseline, name: value})
            if why is not None and why.kind.startswith("oom_"):
                kinds.setdefault(why.kind, {"values": [], "reason": why.evidence})["values"].append(value)
        if kinds:
            found[name] = list(kinds.values())
    return found


def _left_to_vllm(config: SweepConfig, checked: Preflight) -> dict[str, Any]:
    told = config.flags(config.baseline)
    return {name: checked.resolved.get(name) for name in config.search.params if name not in told}


def _known_flags(checked: Preflight) -> dict[str, Any] | None:
    """Return against which flags the space was checked; kept: they were read in an earlier call."""
    known = checked.catalogue
    return {"vllm_version": known.version, "flags": len(known.flags), "kept": known.kept} if known else None


def _alike(checked: Preflight, name: str) -> list[list[Any]]:
    """Return the values of a flag that give the engine one and the same configuration."""
    return [list(group) for group in checked.same_config(name) if len(group) > 1]


def check_text(document: dict[str, Any]) -> str:
    lines = [document["plan"], "", "Swept:"]
    lines += [f"  {name}: {_values(**swept)}" for name, swept in document["swept"].items()]
    lines += ["", "Trial 0, the baseline, is started with"]
    lines += [f"  {name}: {flag_value(value)}" for name, value in document["baseline"].items()]
    resolved = document["baseline_resolved"]
    if resolved:
        lines += ["where vLLM's own defaults give"]
        lines += [
            f"  {name}: {'not known before the launch' if value is None else flag_value(value)}"
            for name, value in resolved.items()
        ]
    lines += ["", f"Command: {document['command']}"]
    lines += _checked_against(document)
    lines += [document["memory"]] if document["memory"] else []
    for name, groups in document["too_large"].items():
        for group in groups:
            values = ", ".join(map(flag_value, group["values"]))
            lines += [f"Note: search.params.{name}: {values}: {group['reason']}. Such configurations are skipped."]
    for name, groups in document["same_config"].items():
        for group in groups:
            values = ", ".join(map(flag_value, group))
            lines += [f"Note: search.params.{name}: {values} give the engine the same configuration."]
    return "\n".join([*lines, *(f"Note: {note}" for note in document["notes"])])


def _checked_against(document: dict[str, Any]) -> list[str]:
    lines = []
    known, version = document["catalogue"], document["vllm_version"]
    if known:
        lines += [f"The flags' names and values are among the {known['flags']} that vLLM {known['vllm_version']} has."]
    if version:
        lines += [
            f"The flags were read by the parser of the installed vLLM {version}, platform {document['platform']}."
        ]
    return lines


def _values(values: list[Any], size: int) -> str:
    """Write all values of a flag, or of many the first ones and the last."""
    shown = [flag_value(value) for value in values]
    return ", ".join(shown) if size <= _SHOWN else f"{', '.join(shown[:4])}, … {shown[-1]} ({size:,} values)"
