"""report.html: one file that works offline, from a mail as from a disk, and runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from sweep.files import write_atomic
from sweep.model import Dist, Outcome
from sweep.report import plots
from sweep.report.figures import LOW_N, compare, interval_words, objective_interval
from sweep.report.summary import beside_words, doubts, failure_groups, flag_rows, headline, limit_lines, state_counts
from sweep.report.template import PAGE, SCRIPT, STYLE
from sweep.report.view import StudyView
from sweep.text import FAILURE_WORDS, flag_value, outcome_words, printable, quantity


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure as the page embeds it: JSON in an element of that id."""

    name: str
    json: Markup


@dataclass(frozen=True, slots=True)
class TrialRow:
    """A line of the table of trials."""

    figures: tuple[str, ...]
    remarks: str
    flags: tuple[str, ...]
    mark: str  # the line's CSS class


def report_html(view: StudyView, *, config: str = "") -> str:
    """Return the page. config: the text of best_config.yaml, shown as it is."""
    plotly_js = plots.library()
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters["clean"] = _clean
    history = plots.history(view)
    return environment.from_string(PAGE).render(
        view=view,
        policy=_policy(plotly_js, SCRIPT),
        style=Markup(STYLE),  # noqa: S704 - ours
        plotly=Markup(plotly_js),  # noqa: S704 - the library's own file
        script=Markup(SCRIPT),  # noqa: S704 - ours
        headline=headline(view),
        counts=state_counts(view),
        caution=" ".join(doubts(view)),
        beside=beside_words(view),
        comparison=[] if view.beside is None else compare(view, view.beside),
        flags=[] if view.beside is None else flag_rows(view, view.beside),
        config=config,
        limits=limit_lines(view),
        history=Plot("history", _island(history)) if history else None,
        tradeoffs=_embed("tradeoff", plots.tradeoffs(view)),
        parameters=_embed("parameter", plots.parameters(view)),
        failures=failure_groups(view),
        words=FAILURE_WORDS,
        columns=_columns(view),
        rows=[_trial_row(view, outcome) for outcome in view.outcomes],
        environment=list(_flat(view.environment)),
    )


def write_report(view: StudyView, path: Path, *, config: str = "") -> None:
    write_atomic(path, report_html(view, config=config).encode("utf-8", "backslashreplace"))


def _policy(*scripts: str) -> str:
    """Allow the page's own scripts by their hash, and nothing from elsewhere."""
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{value}'" for value in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"


def _clean(text: object) -> str:
    return printable(str(text))


def _embed(name: str, figures: Sequence[str]) -> list[Plot]:
    return [Plot(f"{name}-{index}", _island(figure)) for index, figure in enumerate(figures)]


def _island(text: str) -> Markup:
    """Escape JSON so that no text in it can end the script element."""
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)  # noqa: S704 - JSON without a character that HTML knows


def _columns(view: StudyView) -> list[str]:
    figures = ["95 % interval", "load", "TTFT p99", "TPOT p99", "output", "TTFT, client - server"]
    return ["trial", "state", printable(view.objective), *figures, "remarks", *map(printable, view.swept)]


def _trial_row(view: StudyView, outcome: Outcome) -> TrialRow:
    level, value = view.level(outcome.trial), view.value(outcome.trial)
    marks = {view.baseline: "baseline", view.shown: "best"}
    dists = (level.ttft_s, level.tpot_s) if level else (None, None)
    interval = objective_interval(view, outcome, level)
    overhead_s = level.client.overhead_s if level and level.client else None
    figures = (
        str(outcome.trial),
        outcome.state,
        quantity(value, view.unit) if value is not None else "",
        interval_words(interval) if interval else "",
        level.level if level else "",
        *(_p99(dist) if dist else "" for dist in dists),
        quantity(level.output_tps, "tok/s") if level else "",
        quantity(1000 * overhead_s, "ms") if overhead_s is not None else "",
    )
    flags = tuple(printable(flag_value(outcome.flags[name])) if name in outcome.flags else "" for name in view.swept)
    return TrialRow(figures, printable(_remarks(view, outcome)), flags, marks.get(outcome.trial, ""))


def _p99(dist: Dist) -> str:
    return quantity(1000 * dist.p99, "ms") + (f", {LOW_N}" if "p99" in dist.low_n else "")


def _remarks(view: StudyView, outcome: Outcome) -> str:
    verdict, level = view.verdicts.get(outcome.trial), view.level(outcome.trial)
    parts = [outcome.label or "", outcome_words(outcome), *view.misses(outcome.trial)]
    parts += [verdict.note or "" if verdict else "", *(level.reasons if level else ())]
    return "; ".join(part for part in parts if part)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the leaves of nested mappings with dotted names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            yield f"{prefix}{name}", ", ".join(map(str, value))
        elif value is not None:
            yield f"{prefix}{name}", str(value)
