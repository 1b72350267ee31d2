"""summary.md, and the words with which a sweep ends in the terminal: the same text serves both."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from sweep.failure import FailureKind
from sweep.files import write_atomic
from sweep.model import Flags, Outcome, State
from sweep.report.export import FILE_NAME
from sweep.report.figures import LOW_N, LOW_N_WORDS, compare
from sweep.report.limits import limits
from sweep.report.view import StudyView
from sweep.text import FAILURE_WORDS, flag_value, printable, shortened

CAUTION = (
    "A quick check, not proof: each of the two was measured once, "
    "and launches of one and the same configuration differ by several per cent."
)
_SMALL_GAIN_FRAC = 0.05  # of one launch each; what a confirmation could tell apart is less
_TAG_START = re.compile(r"<(?=[A-Za-z/!?])")


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """All trials that failed alike."""

    kind: FailureKind
    trials: tuple[int, ...]
    advice: str
    evidence: str  # of the first of them


def headline(view: StudyView) -> str:
    """Say the result in one or two sentences."""
    base = view.outcome(view.baseline)
    if base is not None and base.source != "baseline" and view.best == view.baseline:
        gist = f"The best is {view.title(base.trial)}: {view.objective} {view.result(base.trial)}."
        return f"{gist} No baseline could run, so there is nothing to count a gain from."
    if view.best is not None and view.best == view.baseline:
        return f"No gain found: the baseline is the best configuration, {view.objective} {view.result(view.best)}."
    if view.best is not None:
        clear = "The best is" if not _small(view) else "No clear gain. The best is"
        return f"{clear} {view.title(view.best)}: {view.objective} {view.result(view.best)}.{_small(view)}"
    if view.nearest_miss is not None:
        closest = [f"No trial met the SLOs. {view.title(view.nearest_miss).capitalize()} comes closest"]
        return "; ".join([*closest, *view.misses(view.nearest_miss)]) + "."
    if view.outcomes:
        return "No trial gave a result. See what failed, and the logs in its trial's folder."
    return "No trial has finished."


def summary_text(view: StudyView) -> str:
    """Return the study's summary as Markdown that reads well in a terminal too."""
    sections = [
        f"# {printable(view.name)}",
        "" if view.complete else "**Unfinished:** the study was stopped early or is still running.",
        headline(view),
        _facts(view),
        _comparison(view),
        _limits(view),
        _failures(view),
        _skipped(view),
        _list("Notes", view.notes),
        _files(view),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def write_summary(view: StudyView, path: Path) -> None:
    write_atomic(path, summary_text(view).encode("utf-8", "backslashreplace"))


def closing(view: StudyView) -> str:
    """Return what a run prints at its end: the result, the configuration beside the baseline, and the files."""
    lines = [f"{printable(view.name)}: {headline(view)}"]
    if view.beside is not None:
        rows = [*flag_rows(view, view.beside), *_figure_rows(view, view.beside, brief=True)]
        lines += ["", *_aligned([("", "baseline", beside_words(view), "change"), *rows])]
    lines += [line for doubt in doubts(view) for line in ("", doubt)]
    lines += ["", *map(printable, view.notes)] if view.notes else []
    lines += ["", *(f"{path}  {what}" for path, what in _aligned_paths(view))]
    if view.shown is not None:
        lines += ["", f"{printable(view.command)} --config {printable(view.folder)}/{FILE_NAME}"]
    return "\n".join(lines) + "\n"


def beside_words(view: StudyView) -> str:
    return f"trial {view.beside}" if view.beside == view.shown else f"trial {view.beside}, next best"


def flag_rows(view: StudyView, trial: int) -> list[tuple[str, str, str, str]]:
    """Put the trial's flags beside the baseline's; a flag that is not set has vLLM's default."""
    base, outcome = view.outcome(view.baseline), view.outcome(trial)
    columns = [found.flags if found else {} for found in (base, outcome)]
    names = dict.fromkeys([*view.swept, *columns[0], *columns[1]])
    left, right = columns
    return [(printable(name), _flag_cell(view, left, name), _flag_cell(view, right, name), "") for name in names]


def failure_groups(view: StudyView) -> list[FailureGroup]:
    """Group the trials that failed by kind, the most frequent kind first."""
    return _groups(outcome for outcome in view.outcomes if outcome.state != "skipped")


def _groups(found: Iterable[Outcome]) -> list[FailureGroup]:
    by_kind: dict[FailureKind, list[Outcome]] = {}
    for outcome in found:
        if outcome.measured.failure:
            by_kind.setdefault(outcome.measured.failure.kind, []).append(outcome)
    groups = [_group(kind, outcomes) for kind, outcomes in by_kind.items()]
    return sorted(groups, key=lambda group: -len(group.trials))


def state_counts(view: StudyView) -> str:
    """Write how many trials ended how: "12 trials: 8 complete, 3 infeasible, 1 failed"."""
    counts = Counter(outcome.state for outcome in view.outcomes)
    parts = [f"{counts[state]} {state}" for state in get_args(State) if counts[state]]
    return f"{len(view.outcomes)} trials: {', '.join(parts)}" if parts else "no trials"


def limit_lines(view: StudyView) -> list[str]:
    """Explain what limited the trial shown, and the baseline when it is another one."""
    lines = []
    for trial in dict.fromkeys((view.shown, view.baseline)):
        outcome, level = view.outcome(trial), view.level(trial)
        if outcome and level:
            found = [*limits(level, outcome.flags), *level.reasons]
            lines += [f"{view.title(outcome.trial).capitalize()}, {level.level}: {printable(text)}" for text in found]
    return lines


def _group(kind: FailureKind, outcomes: Sequence[Outcome]) -> FailureGroup:
    failures = [outcome.measured.failure for outcome in outcomes if outcome.measured.failure]
    advice = Counter(failure.advice for failure in failures).most_common(1)[0][0]
    return FailureGroup(kind, tuple(outcome.trial for outcome in outcomes), advice, failures[0].evidence)


def _small(view: StudyView) -> str:
    gain = view.gain_frac(view.best)
    if gain is None or abs(gain) >= _SMALL_GAIN_FRAC:
        return ""
    return " Two launches of one configuration can differ by as much."


def doubts(view: StudyView) -> list[str]:
    """Say what a reader of the comparison should keep in mind."""
    if view.beside is None:
        return []
    marked = any(LOW_N in row.baseline + row.shown for row in compare(view, view.beside))
    compared = view.gain_frac(view.beside) is not None
    return [*([CAUTION] if compared else []), *([LOW_N_WORDS] if marked else [])]


def _flag_cell(view: StudyView, flags: Flags, name: str) -> str:
    if name in flags:
        return printable(flag_value(flags[name]))
    # Another flag, such as performance-mode, may move a default; then its value is not known.
    known = flags.keys() <= set(view.swept) and view.defaults.get(name) is not None
    return printable(f"{flag_value(view.defaults[name])} (default)") if known else "default"


def _figure_rows(view: StudyView, trial: int, *, brief: bool = False) -> list[tuple[str, str, str, str]]:
    return [(row.label, row.baseline, row.shown, row.change) for row in compare(view, trial, brief=brief)]


def _facts(view: StudyView) -> str:
    facts = {
        "Model": f"{view.model}, revision {view.revision or 'not pinned'}",
        "Device": f"{view.device}, vLLM {view.vllm_version or 'version unknown'}",
        "Workload": view.workload,
        "Objective": f"{view.direction} {view.objective}",
        "SLOs": view.slo_words or "none",
        "Trials": state_counts(view),
        "Time": f"{view.started_at} to {view.ended_at or 'now'}",
    }
    return "\n".join(f"- {name}: {_plain(value)}" for name, value in facts.items())


def _comparison(view: StudyView) -> str:
    if view.beside is None:
        return ""
    rows = [*flag_rows(view, view.beside), *_figure_rows(view, view.beside)]
    table = _table(("", "baseline", beside_words(view), "change"), rows)
    word = "Next best" if view.beside != view.shown else "Best" if view.best is not None else "Nearest miss"
    return "\n\n".join([f"## {word} beside the baseline", table, *doubts(view)])


def _limits(view: StudyView) -> str:
    return _list("What limited the server", limit_lines(view))


def _failures(view: StudyView) -> str:
    groups = failure_groups(view)
    if not groups:
        return ""
    rows = [
        (FAILURE_WORDS[group.kind], " ".join(map(str, group.trials)), shortened(printable(group.advice), 200))
        for group in groups
    ]
    first = [f"- trial {group.trials[0]}: {_code(shortened(printable(group.evidence), 200))}" for group in groups]
    return f"## What failed\n\n{_table(('failure', 'trials', 'advice'), rows)}\n\n" + "\n".join(first)


def _skipped(view: StudyView) -> str:
    """Say what was not launched, and why that is known."""
    groups = _groups(outcome for outcome in view.outcomes if outcome.state == "skipped")
    return _list(
        "Skipped without a launch",
        [
            f"{FAILURE_WORDS[group.kind]} (trial {', '.join(map(str, group.trials))}): {shortened(group.evidence, 400)}"
            for group in groups
        ],
    )


def _list(title: str, items: Sequence[str]) -> str:
    return f"## {title}\n\n" + "\n".join(f"- {_plain(item)}" for item in items) if items else ""


def _files(view: StudyView) -> str:
    return "## Files\n\n" + "\n".join(f"- {_code(path.rstrip())} {what}" for path, what in _paths(view))


def _paths(view: StudyView) -> list[tuple[str, str]]:
    folder = printable(view.folder)
    best = [(f"{folder}/{FILE_NAME}", "the configuration, for `vllm serve --config`")] if view.shown is not None else []
    return [
        *best,
        (f"{folder}/report.html", "plots and all trials, in one file"),
        (f"{folder}/trials.csv", "one row a trial; levels.csv has one row a load level"),
        (f"{folder}/trials/", "each trial's flags, log and measurements"),
    ]


def _aligned_paths(view: StudyView) -> list[tuple[str, str]]:
    paths = _paths(view)
    width = max(len(path) for path, _ in paths)
    return [(path.ljust(width), what.replace("`", "")) for path, what in paths]


def _plain(text: str) -> str:
    """Keep a foreign text from being read as the HTML that Markdown allows."""
    return _TAG_START.sub("&lt;", printable(text))


def _code(text: str) -> str:
    return f"`{text.replace('`', chr(39))}`"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (head, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(head))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    lines.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in lines)
