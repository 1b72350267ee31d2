"""The report's figures. Each is a pure `_info` of what is to be seen, and a `_plot` that draws it.

Colours are readable on a light and on a dark ground; text and grid take theirs from the page.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from sweep.model import Dist, FlagValue, LevelStats, Outcome
from sweep.report.view import StudyView
from sweep.text import flag_value, outcome_words, printable, quantity

Role = Literal["baseline", "best", "nearest miss", "meets the SLOs", "misses an SLO", "no result"]

# Drawn in this order: what matters most lies on top.
_MARKERS: dict[Role, dict[str, Any]] = {
    "no result": {"color": "#d64550", "symbol": "x", "size": 8},
    "misses an SLO": {"color": "#8593a8", "symbol": "circle-open", "size": 9, "line": {"width": 2}},
    "meets the SLOs": {"color": "#4c86d9", "symbol": "circle", "size": 9},
    "baseline": {"color": "#e58a1f", "symbol": "diamond", "size": 13},
    "nearest miss": {"color": "#a05cd6", "symbol": "star", "size": 15},
    "best": {"color": "#1fa463", "symbol": "star", "size": 15},
}
_LINE_COLORS: dict[Role, str] = {role: str(marker["color"]) for role, marker in _MARKERS.items()}
_LIMIT_COLOR = "#d64550"


@dataclass(frozen=True, slots=True)
class Point:
    """One mark: y None is a trial without a result, drawn at the foot of the plot."""

    x: float | str
    y: float | None
    role: Role
    hover: str  # HTML, foreign text already escaped


@dataclass(frozen=True, slots=True)
class History:
    """The objective, trial by trial."""

    points: tuple[Point, ...]
    best_so_far: tuple[tuple[int, float], ...]
    baseline: float | None
    title: str  # of the y axis


@dataclass(frozen=True, slots=True)
class Tradeoff:
    """Output throughput against one latency: a mark for every level of every trial."""

    points: tuple[Point, ...]
    lines: dict[Role, tuple[tuple[float, float], ...]]  # the levels of the baseline and of the trial shown, in order
    limit_ms: float | None
    title: str  # of the x axis


@dataclass(frozen=True, slots=True)
class Parameter:
    """The objective against the values of one swept flag."""

    flag: str
    points: tuple[Point, ...]
    ticks: tuple[float | str, ...]
    scale: Literal["linear", "log", "category"]
    baseline: float | None
    title: str


def history(view: StudyView) -> str | None:
    """Return the figure as JSON, or None without trials."""
    info = _history_info(view)
    return _json(_history_plot(info)) if info.points else None


def tradeoffs(view: StudyView) -> list[str]:
    """Return the figures for TTFT and TPOT as JSON; a latency that was not measured has none."""
    infos = [
        # In an open loop the SLO is judged from the scheduled time, so that is what stands beside its line.
        _tradeoff_info(view, "TTFT p99, ms", "ttft_p99", lambda level: level.ttft_sched_s or level.ttft_s),
        _tradeoff_info(view, "TPOT p99, ms", "tpot_p99", lambda level: level.tpot_s),
    ]
    return [_json(_tradeoff_plot(info)) for info in infos if info.points]


def parameters(view: StudyView) -> list[str]:
    """Return a small figure as JSON for every flag that was tried with at least two values."""
    infos = [_parameter_info(view, flag) for flag in view.swept]
    return [_json(_parameter_plot(info)) for info in infos if len(info.ticks) > 1]


def library() -> str:
    """Return plotly.js, with the line ends that a browser makes of them: a hash of it is to fit what it sees."""
    text: str = get_plotlyjs()
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _json(figure: go.Figure) -> str:
    return str(figure.to_json(engine="json"))


def _history_info(view: StudyView) -> History:
    points = [Point(o.trial, view.value(o.trial), _role(view, o), _hover(view, o)) for o in view.outcomes]
    best: list[tuple[int, float]] = []
    better = max if view.direction == "maximize" else min
    for outcome in view.outcomes:
        verdict = view.verdicts.get(outcome.trial)
        if verdict and verdict.eligible and verdict.value is not None:
            best.append((outcome.trial, better(verdict.value, best[-1][1]) if best else verdict.value))
    return History(tuple(points), tuple(best), view.value(view.baseline), _objective_title(view))


def _tradeoff_info(view: StudyView, title: str, slo: str, latency: Callable[[LevelStats], Dist | None]) -> Tradeoff:
    points: list[Point] = []
    lines: dict[Role, tuple[tuple[float, float], ...]] = {}
    for outcome in view.outcomes:
        role = _role(view, outcome)
        measured = [(level, latency(level)) for level in outcome.measured.levels]
        found = [
            Point(1000 * dist.p99, level.output_tps, role, _hover(view, outcome, level))
            for level, dist in measured
            if dist and level.output_tps is not None
        ]
        points += found
        if outcome.trial in {view.baseline, view.shown} and len(found) > 1:
            lines[role] = tuple((float(point.x), point.y) for point in found if point.y is not None)
    limit_s = view.slo.get(slo)
    return Tradeoff(tuple(points), lines, None if limit_s is None else 1000 * limit_s, title)


def _parameter_info(view: StudyView, flag: str) -> Parameter:
    tried = [(outcome, _coordinate(outcome.flags[flag])) for outcome in view.outcomes if flag in outcome.flags]
    ticks = {x for _, x in tried}
    numeric = all(isinstance(x, int | float) for x in ticks)
    ordered = sorted(ticks) if numeric else sorted(ticks, key=str)
    scale: Literal["linear", "log", "category"] = "category"
    if numeric:
        numbers = [float(x) for x in ordered]
        scale = "log" if numbers and numbers[0] > 0 and numbers[-1] / numbers[0] >= 8 else "linear"
    points = tuple(
        Point(x if numeric else str(x), view.value(o.trial), _role(view, o), _hover(view, o)) for o, x in tried
    )
    return Parameter(flag, points, tuple(ordered), scale, view.value(view.baseline), _objective_title(view))


def _coordinate(value: FlagValue) -> float | str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    return printable(flag_value(value))


def _objective_title(view: StudyView) -> str:
    return html.escape(printable(f"{view.objective}, {view.unit}" if view.unit else view.objective))


def _role(view: StudyView, outcome: Outcome) -> Role:
    verdict = view.verdicts.get(outcome.trial)
    if outcome.trial == view.best:
        return "best"
    if verdict is None or verdict.value is None:
        return "no result"
    if outcome.trial == view.baseline:
        return "baseline"
    if outcome.trial == view.nearest_miss:
        return "nearest miss"
    return "meets the SLOs" if verdict.eligible else "misses an SLO"


def _hover(view: StudyView, outcome: Outcome, level: LevelStats | None = None) -> str:
    """Describe a trial, or one of its levels, in lines of HTML; foreign text is escaped."""
    shown = level or view.level(outcome.trial)
    failure = outcome.measured.failure
    lines = [f"<b>{_escaped(view.title(outcome.trial))}</b>"]
    if outcome.state != "complete":
        lines.append(f"{outcome.state}: {_escaped(outcome_words(outcome))}" if failure else outcome.state)
    if level is None and view.value(outcome.trial) is not None:
        lines.append(_escaped(quantity(view.value(outcome.trial), view.unit)))
    if shown:
        lines.append(_escaped(_level_words(shown)))
    if level is None:
        lines += [_escaped(miss) for miss in view.misses(outcome.trial)]
    lines += [_escaped(f"{name}={flag_value(value)}") for name, value in outcome.flags.items()]
    return "<br>".join(lines)


def _level_words(level: LevelStats) -> str:
    figures = [quantity(level.output_tps, "tok/s")] if level.output_tps is not None else []
    figures += [
        f"{name} p99 {quantity(1000 * dist.p99, 'ms')}"
        for name, dist in (("TTFT", level.ttft_s), ("TPOT", level.tpot_s))
        if dist
    ]
    return f"{level.level}: {', '.join(figures)}"


def _escaped(text: str) -> str:
    return html.escape(printable(text))


def _history_plot(info: History) -> go.Figure:
    figure = _figure("trial", info.title)
    _add_points(figure, info.points, info.baseline)
    if info.best_so_far:
        x, y = zip(*info.best_so_far, strict=True)
        line = {"shape": "hv", "color": _LINE_COLORS["best"], "width": 2}
        figure.add_trace(go.Scatter(x=x, y=y, mode="lines", name="best so far", line=line, hoverinfo="skip"))
    return figure


def _tradeoff_plot(info: Tradeoff) -> go.Figure:
    figure = _figure(info.title, "output, tok/s")
    for role, line in info.lines.items():
        x, y = zip(*line, strict=True)
        style = {"color": _LINE_COLORS[role], "width": 2}
        figure.add_trace(go.Scatter(x=x, y=y, mode="lines", line=style, showlegend=False, hoverinfo="skip"))
    _add_points(figure, info.points, None)
    spread = [float(point.x) for point in info.points if float(point.x) > 0]
    log = bool(spread) and max(spread) / min(spread) > 20
    if log:
        figure.update_xaxes(type="log", dtick="D2")
    if info.limit_ms is not None:
        figure.add_vline(x=info.limit_ms, line={"color": _LIMIT_COLOR, "dash": "dash", "width": 1.5})
        # On a logarithmic axis plotly takes a shape's place as it is, but an annotation's as its logarithm.
        place = math.log10(info.limit_ms) if log else info.limit_ms
        figure.add_annotation(x=place, y=1, yref="paper", text="SLO", showarrow=False, xanchor="left")
    return figure


def _parameter_plot(info: Parameter) -> go.Figure:
    figure = _figure(html.escape(printable(info.flag)), info.title, legend=False)
    _add_points(figure, info.points, info.baseline)
    if info.scale == "category":
        figure.update_xaxes(type="category", categoryorder="array", categoryarray=list(info.ticks))
    elif info.scale == "log" or len(info.ticks) <= 6:
        figure.update_xaxes(type=info.scale, tickvals=info.ticks, ticktext=[str(tick) for tick in info.ticks])
    return figure


def _add_points(figure: go.Figure, points: Sequence[Point], baseline: float | None) -> None:
    """Draw the points by role; those without a result stand in a row at the foot."""
    values = [point.y for point in points if point.y is not None]
    foot = min(values) - 0.12 * ((max(values) - min(values)) or abs(max(values)) or 1.0) if values else 0.0
    for role, marker in _MARKERS.items():
        group = [point for point in points if point.role == role]
        if group:
            figure.add_trace(
                go.Scatter(
                    x=[point.x for point in group],
                    y=[foot if point.y is None else point.y for point in group],
                    mode="markers",
                    marker=marker,
                    name=role,
                    hovertext=[point.hover for point in group],
                    hoverinfo="text",
                )
            )
    if baseline is not None:
        figure.add_hline(y=baseline, line={"color": _LINE_COLORS["baseline"], "dash": "dot", "width": 1.5})


def _figure(x_title: str, y_title: str, *, legend: bool = True) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 12},
        margin={"l": 62, "r": 14, "t": 40 if legend else 10, "b": 48},
        height=400 if legend else 260,
        showlegend=legend,
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        hoverlabel={"bgcolor": "#20242c", "bordercolor": "#20242c", "font": {"color": "#ffffff"}, "align": "left"},
        hovermode="closest",
    )
    axis = {"zeroline": False, "gridcolor": "#888888", "automargin": True}
    figure.update_xaxes(title={"text": x_title}, **axis)
    figure.update_yaxes(title={"text": y_title, "standoff": 12}, **axis)
    return figure
