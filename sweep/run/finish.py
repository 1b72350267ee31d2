"""Everything that is derived from a study's outcomes: its view, tables, best configuration, summary and report."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from sweep.config import SweepConfig
from sweep.errors import MachineError
from sweep.model import Flags, Outcome
from sweep.report.export import FILE_NAME, write_best_config
from sweep.report.html import write_report
from sweep.report.summary import write_summary
from sweep.report.table import write_tables
from sweep.report.view import StudyView
from sweep.run.ledger import Ledger, gpus_of
from sweep.run.preflight import config_file, parse
from sweep.run.store import Store
from sweep.serve.kind import resolve_program

UNPROVEN = "not yet: the study was stopped; going on with it, or `report`, lets vLLM's own parser read this file"


def build_view(
    config: SweepConfig,
    store: Store,
    ledger: Ledger,
    *,
    complete: bool,
    notes: Sequence[str] = (),
) -> StudyView:
    """Put together what the reports show. It begins with the first trial and ends now, if it is complete."""
    environment = store.environment()
    outcomes = sorted(ledger.outcomes, key=lambda outcome: outcome.trial)
    objective = config.objective
    best, miss, base = ledger.best, ledger.nearest_miss, ledger.baseline
    return StudyView(
        name=config.run.name,
        folder=str(store.root),
        model=config.serve.model,
        revision=config.serve.revision,
        device=environment.get("device", "unknown device"),
        vllm_version=_vllm_version(environment, outcomes),
        environment=environment,
        objective=objective.label,
        unit=objective.unit,
        direction=objective.direction,
        slo=objective.slo,
        swept=tuple(config.search.params),
        levels=tuple(level.name for level in config.load.levels()),
        load_words=config.load.words,
        gpus=gpus_of(config.serve.args),
        trial_gpus={outcome.trial: ledger.gpus(outcome) for outcome in outcomes},
        outcomes=outcomes,
        verdicts=ledger.verdicts,
        baseline=base.trial if base else None,
        best=best.trial if best else None,
        nearest_miss=miss.trial if miss else None,
        started_at=outcomes[0].started_at if outcomes else "",
        ended_at=datetime.now().astimezone().isoformat(timespec="seconds") if complete else None,
        complete=complete,
        notes=tuple(notes),
        runner_up=_runner_up(ledger),
        command=_command(config),
        defaults=environment.get("defaults", {}),
    )


def doubts(ledger: Ledger) -> list[str]:
    """Say which figures rest on less than they should."""
    unsteady = [o.trial for o in ledger.outcomes if any(not level.steady for level in o.measured.levels)]
    lines = []
    if unsteady:
        trials = ", ".join(map(str, unsteady))
        lines.append(f"Measured before the speed was steady: trial {trials}. A longer measure.warmup.max_s may help.")
    best = ledger.best or ledger.nearest_miss
    if best and (note := ledger.verdicts[best.trial].note):
        lines.append(f"Trial {best.trial}: {note}.")
    return lines


def _command(config: SweepConfig) -> str:
    """Return what starts this vLLM from a shell, with what it wants in its environment."""
    program, *words = config.serve.command
    with suppress(MachineError):
        program = resolve_program(program) if program != "vllm" else program
    return " ".join(
        [*(f"{name}={shlex.quote(value)}" for name, value in config.serve.env.items()), shlex.join([program, *words])]
    )


def _runner_up(ledger: Ledger) -> int | None:
    return next((outcome.trial for outcome in ledger.ranked[1:] if ledger.verdicts[outcome.trial].eligible), None)


def _vllm_version(environment: dict[str, Any], outcomes: Sequence[Outcome]) -> str | None:
    told = environment.get("fingerprint", {}).get("vllm")
    seen = (outcome.measured.server.vllm_version for outcome in outcomes)
    return told or next((version for version in seen if version), None)


def write_progress(view: StudyView, store: Store) -> None:
    """Write what is worth having in the middle of the night: the tables and the summary."""
    write_tables(view, store.root)
    write_summary(view, store.root / "summary.md")


async def write_all(view: StudyView, store: Store, config: SweepConfig, *, prove: bool = True) -> None:
    """Write every derived file. A best configuration of an earlier state of the study does not stay behind.

    prove: let the installed vLLM read the best configuration back, which takes some ten seconds.
    """
    write_progress(view, store)
    path = store.root / FILE_NAME
    outcome = view.outcome(view.shown)
    if outcome is None:
        path.unlink(missing_ok=True)
    else:
        check = await proof(config, outcome.flags) if prove else UNPROVEN
        content = config_file(config, outcome.flags)
        write_best_config(path, view, outcome.trial, content, env=config.serve.env, check=check)
    text = path.read_text(encoding="utf-8") if outcome else ""
    write_report(view, store.root / "report.html", config=text)


async def proof(config: SweepConfig, chosen: Flags) -> str:
    """Let the installed vLLM read the best configuration as `vllm serve --config` would, and say what came of it."""
    parsed = (await parse(config, {"best": chosen}))["best"]
    if parsed.unchecked:
        return f"not checked by vLLM's parser: {parsed.unchecked}"
    if parsed.error:
        return f"vLLM's parser refused it: {parsed.error.strip().splitlines()[-1]}"
    read = parsed.parsed or {}
    wrong = [name for name, value in config.flags(chosen).items() if name in read and read[name] != value]
    if wrong:
        return f"vLLM's parser reads other values than were measured for: {', '.join(sorted(wrong))}"
    return f"read by the parser of the installed vLLM {parsed.vllm_version or ''} with these very values".replace(
        "  ", " "
    )
