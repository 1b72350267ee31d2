"""`status`: how far a study is, read from its files, so that it works while the study runs and after it died."""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from pathlib import Path
from typing import Any

from sweep.config import config_from_data
from sweep.run.ledger import Ledger
from sweep.run.store import Store
from sweep.text import flag_words, percent, quantity


def status_document(root: Path) -> dict[str, Any]:
    """Return the state of a study. Raises ConfigError for a folder that holds none."""
    store = Store(root)
    config = config_from_data(store.config_data(), root / "config.yaml")
    ledger = Ledger(config.objective, config.serve.args, store.outcomes())
    best = ledger.best or ledger.nearest_miss
    base = ledger.baseline
    value = ledger.verdicts[best.trial].value if best else None
    reference = ledger.verdicts[base.trial].value if base else None
    running = _is_running(root)
    return {
        "study": config.run.name,
        "folder": str(root),
        "running": running,
        "trials_done": ledger.counted,
        "trials_planned": config.run.trials,
        "states": dict(Counter(outcome.state for outcome in ledger.outcomes)),
        "running_trials": [spec.job.trial for spec in store.unfinished()] if running else [],
        "baseline_value": reference,
        "best_trial": best.trial if best else None,
        "best_value": value,
        "best_flags": best.flags if best else None,
        "slo_met": ledger.verdicts[best.trial].slo_met if best else None,
        "gain_frac": (value - reference) / abs(reference) if value is not None and reference else None,
        "unit": config.objective.unit,
    }


def _is_running(root: Path) -> bool:
    """Tell whether a process holds the study's lock. Asking takes it for a moment, shared, and changes nothing."""
    try:
        handle = os.open(root / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(handle)


def status_text(document: dict[str, Any]) -> str:
    states = ", ".join(f"{count} {state}" for state, count in document["states"].items()) or "none yet"
    now = "running" if document["running"] else "not running"
    lines = [
        f"{document['study']}: {now}, {document['trials_done']} of {document['trials_planned']} trials done ({states})"
    ]
    if document["running_trials"]:
        lines.append(f"  at work: trial {', '.join(map(str, document['running_trials']))}")
    if document["best_trial"] is not None:
        value = quantity(document["best_value"], document["unit"])
        gain = document["gain_frac"]
        against = f", {percent(gain)} against the baseline" if gain is not None else ""
        missed = "" if document["slo_met"] is not False else ", which misses an SLO"
        lines.append(f"  best: trial {document['best_trial']}, {value}{against}{missed}")
        lines.append(f"    {flag_words(document['best_flags'])}")
    return "\n".join(lines)
