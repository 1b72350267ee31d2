"""trials.csv and levels.csv: every trial, and every level of every trial, for spreadsheets and notebooks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

from sweep.files import write_atomic
from sweep.model import Dist, FlagValue, KindStats, LevelStats, Outcome, Verdict
from sweep.report.figures import FIGURES, MORE, limited, objective_interval, sample
from sweep.report.view import StudyView
from sweep.text import flag_value, flag_words, printable

# A spreadsheet takes a cell that begins like this for a formula.
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")


def trials_frame(view: StudyView) -> pd.DataFrame:
    """One row a trial, failed and skipped ones too, with the figures of the level that its objective is of."""
    return _frame(view, [_row(view, outcome, view.level(outcome.trial)) for outcome in view.outcomes])


def levels_frame(view: StudyView) -> pd.DataFrame:
    """One row a level of a trial. objective and slo_met stand only where the trial's verdict is of that level."""
    rows = [_row(view, outcome, level) for outcome in view.outcomes for level in outcome.measured.levels]
    return _frame(view, rows)


def write_tables(view: StudyView, folder: Path) -> None:
    for name, frame in (("trials.csv", trials_frame(view)), ("levels.csv", levels_frame(view))):
        text = frame.to_csv(index=False, lineterminator="\n")
        # A log line may hold bytes that were no UTF-8.
        write_atomic(folder / name, text.encode("utf-8", "backslashreplace"))


def _frame(view: StudyView, rows: list[dict[str, Any]]) -> pd.DataFrame:
    columns = _columns(view)
    cells = [[_cell(row[column]) for column in columns] for row in rows]
    # dtype=object keeps 8 from becoming 8.0 beside an empty cell.
    return pd.DataFrame(cells, columns=[_cell(column) for column in columns], dtype=object)


def _cell(value: Any) -> Any:
    """Write a boolean as CSV readers know it, and keep a text from being taken for a formula."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        return value
    guarded = f"'{value}" if value.startswith(_FORMULA_STARTS) else value
    # csv quotes a cell for \n but not for a lone \r, which readers take for the end of the row.
    return guarded.replace("\r\n", "\n").replace("\r", "\n")


def _columns(view: StudyView) -> list[str]:
    head = ["trial", "state", "source", "failure_kind", *view.swept, "level", "objective", "slo_met"]
    tail = [
        *(figure.column for figure in (*limited(view), *MORE)),
        "objective_lo",
        "objective_hi",
        "stable",
        "low_n",
        "kinds",
        "label",
        "attempt",
        "completed",
        "failed",
        "steady",
        "other_flags",
        "evidence",
        "remarks",
    ]
    return [*head, *(figure.column for figure in FIGURES), "started_at", *tail]


def _row(view: StudyView, outcome: Outcome, level: LevelStats | None) -> dict[str, Any]:
    measured = outcome.measured
    verdict = view.verdicts.get(outcome.trial)
    judged = verdict if verdict and verdict.level == level else None
    of_level = sample(view, outcome, level)
    low, high = (judged and objective_interval(view, outcome, level)) or (None, None)
    return {
        **{name: _flag(outcome.flags.get(name)) for name in view.swept},
        **{figure.column: _rounded(figure.get(of_level)) for figure in (*FIGURES, *limited(view), *MORE)},
        "trial": outcome.trial,
        "state": outcome.state,
        "source": outcome.source,
        "failure_kind": measured.failure.kind if measured.failure else None,
        "level": level.level if level else None,
        "objective": judged.value if judged else None,
        "slo_met": judged.slo_met if judged else None,
        "objective_lo": _rounded(low),
        "objective_hi": _rounded(high),
        "stable": level.stable if level else None,
        "low_n": _low_n(level) if level else None,
        "kinds": _kinds(level) if level else None,
        "started_at": outcome.started_at,
        "label": outcome.label,
        "attempt": outcome.attempt,
        "completed": level.completed if level else None,
        "failed": level.failed if level else None,
        "steady": level.steady if level else None,
        "other_flags": flag_words({k: v for k, v in outcome.flags.items() if k not in view.swept}) or None,
        "evidence": printable(measured.failure.evidence) if measured.failure else None,
        "remarks": _remarks(level, judged),
    }


def _low_n(level: LevelStats) -> str | None:
    """Name the statistics that rest on too few requests: "p95 p99"."""
    return " ".join(level.ttft_s.low_n) or None if level.ttft_s else None


def _kinds(level: LevelStats) -> str | None:
    """Write the classes of a mix as JSON."""
    return json.dumps({name: _kind(kind) for name, kind in level.kinds.items()}) if level.kinds else None


def _kind(kind: KindStats) -> dict[str, Any]:
    dists = {"ttft": kind.ttft_s, "ttft_sched": kind.ttft_sched_s, "tpot": kind.tpot_s, "e2e": kind.e2e_s}
    return {
        "completed": kind.completed,
        "failed": kind.failed,
        "slo_attainment_frac": _rounded(kind.slo_attainment_frac),
        **{f"{name}_{point}_ms": _point_ms(dist, point) for name, dist in dists.items() for point in ("p50", "p99")},
    }


def _point_ms(dist: Dist | None, point: str) -> float | int | None:
    return None if dist is None else _rounded(1000 * float(getattr(dist, point)))


def _flag(value: FlagValue) -> FlagValue:
    """Keep numbers and booleans; lists and mappings become JSON text."""
    return flag_value(value) if isinstance(value, list | dict) else value


def _rounded(value: float | None) -> float | int | None:
    """Cut what lies below a microsecond or a thousandth of a token: noise that only widens the table."""
    return round(value, 4) if isinstance(value, float) else value


def _remarks(level: LevelStats | None, verdict: Verdict | None) -> str | None:
    remarks = [*(level.reasons if level else ()), *([verdict.note] if verdict and verdict.note else [])]
    return printable("; ".join(remarks)) or None
