"""Results laid out for people: medians over the repeats, and the range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.figures import METRICS, STATS

Row = Mapping[str, Any]


def comparison_table(rows: Sequence[Row], tools: Sequence[str]) -> str:
    """Errors against the truth, and the costs, one column a client; runs of a late server are told, and left out."""
    sound = [row for row in rows if not row["void"]]
    by_tool = {tool: [row for row in sound if row["tool"] == tool] for tool in tools}
    lines = [["", *tools]]
    for metric in METRICS:
        for stat in STATS:
            key = f"{metric}_{stat}"
            cells = [_spread([row["errors"][key] for row in by_tool[tool]], "{:+.2%}") for tool in tools]
            lines.append([f"{metric.upper()} {stat}, error", *cells])
    lines += [
        _line(f"{metric.upper()} p50, ms said - true", by_tool, tools, "{:+.3f}", lambda row, m=metric: _bias(row, m))
        for metric in METRICS
    ]
    lines.append(_line("requests failed", by_tool, tools, "{:.0f}", lambda row: row["failed"]))
    lines.append(_line("tokens said - true", by_tool, tools, "{:+.0f}", lambda row: row["tokens_difference"]))
    lines.append(_line("CPU us a token", by_tool, tools, "{:.1f}", lambda row: row["cpu_us_per_token"]))
    own = [row["cpu_us_per_token"] for row in by_tool.get("ours", []) if row["cpu_us_per_token"]]
    if own:
        ratio = _line("CPU, times ours", by_tool, tools, "{:.2f}", lambda row: _ratio(row, median(own)))
        lines.append(ratio)
    lines.append(_line("start-up, CPU s", by_tool, tools, "{:.1f}", lambda row: row["start_cpu_s"]))
    lines.append(_line("server late, p99 ms", by_tool, tools, "{:.3f}", lambda row: row["server_lateness_p99_ms"]))
    lines.append(["runs (void)", *(f"{len(by_tool[tool])} ({_void(rows, tool)})" for tool in tools)])
    return _laid_out(lines)


def _bias(row: Row, metric: str) -> float | None:
    said = row["said_ms"][metric]["p50"]
    true = row["true_ms"][metric]["p50"]
    return None if said is None or true is None else said - true


def _ratio(row: Row, own: float) -> float | None:
    return row["cpu_us_per_token"] / own if row["cpu_us_per_token"] is not None else None


def _void(rows: Sequence[Row], tool: str) -> int:
    return sum(row["void"] for row in rows if row["tool"] == tool)


def capacity_table(rows: Sequence[Row], tools: Sequence[str]) -> str:
    lines = [["streams", *tools]]
    for streams in sorted({row["streams"] for row in rows}):
        cells = []
        for tool in tools:
            found = next((row for row in rows if row["tool"] == tool and row["streams"] == streams), None)
            cells.append("" if found is None else _capacity_cell(found))
        lines.append([str(streams), *cells])
    return "error of the p99 of the TTFT\n" + _laid_out(lines)


def _capacity_cell(row: Row) -> str:
    wrong = row["errors"]["ttft_p99"]
    words = "-" if wrong is None else f"{wrong:+.2%}"
    void = f" (server late: {row['server_lateness_p99_ms']:.2f} ms)" if row["void"] else ""
    return words + (f", {row['failed']} failed" if row["failed"] else "") + void


def live_table(rows: Sequence[Row], tools: Sequence[str]) -> str:
    by_tool = {tool: [row for row in rows if row["tool"] == tool] for tool in tools}

    def over(row: Row) -> float | None:
        said, server = row["said_ms"]["ttft"]["mean"], row["server_ttft_mean_ms"]
        return None if said is None or server is None else said - server

    lines = [["", *tools]]
    for metric in METRICS:
        for stat in STATS:
            name = f"{metric.upper()} {stat}, ms"
            lines.append(_line(name, by_tool, tools, "{:.2f}", lambda row, m=metric, s=stat: row["said_ms"][m].get(s)))
    lines.append(_line("mean TTFT - the server's own, ms", by_tool, tools, "{:+.3f}", over))
    lines.append(_line("tokens said", by_tool, tools, "{:.0f}", lambda row: row["output_tokens"]))
    lines.append(_line("tokens of the server, warm-up too", by_tool, tools, "{:.0f}", lambda row: row["server_tokens"]))
    lines.append(_line("requests failed", by_tool, tools, "{:.0f}", lambda row: row["failed"]))
    lines.append(_line("CPU s, start-up too", by_tool, tools, "{:.1f}", lambda row: row["cpu_s"]))
    return _laid_out(lines)


def _line(name: str, by_tool: Mapping[str, Sequence[Row]], tools: Sequence[str], form: str, value: Any) -> list[str]:
    return [name, *(_spread([value(row) for row in by_tool[tool]], form) for tool in tools)]


def _spread(values: Sequence[float | None], form: str) -> str:
    """Return "median (lowest to highest)"; the median alone where they are the same."""
    found = sorted(value for value in values if value is not None)
    if not found:
        return "-"
    middle, low, high = (form.format(value) for value in (median(found), found[0], found[-1]))
    return middle if low == high else f"{middle} ({low} to {high})"


def _laid_out(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
