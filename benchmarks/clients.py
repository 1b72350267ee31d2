"""Load clients side by side: how far their figures are from the truth, and what they cost.

`python benchmarks/clients.py --help` says what can be chosen; README.md says how to read the result.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.figures import Report, counted, errors, truth_figures
from benchmarks.live import counters
from benchmarks.process import Run, run
from benchmarks.table import capacity_table, comparison_table, live_table
from benchmarks.tokenizer import make_tokenizer
from benchmarks.tools import TOOLS, Job, Tool
from tests.refserver.running import VOID_LATENESS_MS, RefServer, ref_server

_WORST_FRAC = 0.05  # of the 99th percentile of the TTFT: what a client may be wrong by at its capacity
_CAPACITY_STREAMS = (50, 100, 200, 400, 800, 1000)


@dataclass(frozen=True, slots=True)
class Bench:
    """What all runs share."""

    args: argparse.Namespace
    folder: Path
    core: int | None

    def job(self, url: str, streams: int, requests: int, repeat: int) -> Job:
        args = self.args
        return Job(
            url=url,
            model=args.model,
            endpoint=args.endpoint,
            streams=streams,
            requests=requests,
            tokens=args.tokens,
            prompt_tokens=args.prompt_tokens,
            tokenizer=args.tokenizer or str(self.folder / "tokenizer"),
            seed=repeat,
        )

    def run(self, tool: Tool, job: Job) -> tuple[Run, Report | None]:
        """Run a client; the report is None where it failed, and then its words are on stderr."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        done = run(tool.command(job, folder), folder, core=self.core, timeout_s=self.args.timeout, env=tool.env)
        try:
            return done, tool.read(done.stdout, folder)
        except (OSError, ValueError, KeyError, StopIteration) as error:
            sys.stderr.write(f"{tool.name}: exit code {done.code}, {error!r}\n{done.stderr[-2000:]}\n")
            return done, None


def main() -> int:
    args = _arguments()
    two = (os.cpu_count() or 1) >= 2 and not args.unpinned
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder), 1 if two else None)
        tools = [tool for tool in TOOLS if tool.name in args.tools and not _is_missing(tool)]
        if not args.tokenizer:
            make_tokenizer(bench.folder / "tokenizer")
        if args.against != "ref":
            document = _live(bench, tools)
        else:
            with _server(args, 0 if two else None) as server:
                document = _capacity(bench, tools, server) if args.capacity else _compare(bench, tools, server)
    if args.json:
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    return 0


def _is_missing(tool: Tool) -> bool:
    if tool.missing():
        sys.stderr.write(f"{tool.name}: not installed\n")
        return True
    return False


@contextmanager
def _server(args: argparse.Namespace, core: int | None) -> Iterator[RefServer]:
    options = [
        *("--model", args.model, "--mode", args.mode, "--tokens-per-chunk", str(args.tokens_per_chunk)),
        *("--ttft", str(args.ttft), "--ttft-sigma", str(args.ttft_sigma)),
        *("--itl", str(args.itl), "--itl-sigma", str(args.itl_sigma)),
    ]
    if args.empty_text:
        options += ["--scenario", "empty_text"]
    with ref_server(*options, core=core) as server:
        yield server


def _compare(bench: Bench, tools: Sequence[Tool], server: RefServer) -> dict[str, Any]:
    """Run all clients in turn, as often as asked; the first is another one each time."""
    args = bench.args
    starts = {tool.name: _start_cost(bench, tool, server) for tool in tools}
    rows: list[dict[str, Any]] = []
    for repeat in range(args.repeats):
        for tool in (*tools[repeat % len(tools) :], *tools[: repeat % len(tools)]):
            row = _measure(bench, tool, server, bench.job(server.url, args.streams, args.requests, repeat))
            if row is not None:
                row["cpu_us_per_token"] = _cost(row, starts[tool.name])
                rows.append(row)
                sys.stderr.write(f"{repeat + 1}/{args.repeats} {tool.name}: {_brief(row)}\n")
    document = {"arguments": vars(args), "pinned": bench.core is not None, "runs": rows}
    if not args.json:
        sys.stdout.write(comparison_table(rows, [tool.name for tool in tools]) + "\n")
    return document


def _measure(bench: Bench, tool: Tool, server: RefServer, job: Job) -> dict[str, Any] | None:
    server.reset()
    done, report = bench.run(tool, job)
    truth = server.truth()
    if report is None:
        return None
    entries = counted(truth, tool.counts)
    if not entries:
        sys.stderr.write(f"{tool.name}: the server saw none of its requests end\n")
        return None
    true = truth_figures(entries)
    lateness_ms = truth["lateness_ms"]["p99"]
    return {
        "tool": tool.name,
        "streams": job.streams,
        "completed": report.completed,
        "failed": report.failed,
        "tokens_difference": None
        if report.output_tokens is None
        else report.output_tokens - sum(entry["tokens"] for entry in entries),
        "requests_difference": report.completed - len(entries),
        "said_ms": report.figures,
        "true_ms": true,
        "errors": errors(report.figures, true),
        "cpu_s": done.cpu_since_s(truth["requests"][0]["recv_ns"]),
        "start_cpu_s": done.cpu_s - done.cpu_since_s(truth["requests"][0]["recv_ns"]),
        "streamed_tokens": sum(entry["tokens"] for entry in truth["requests"]),
        "server_lateness_p99_ms": lateness_ms,
        "void": lateness_ms > VOID_LATENESS_MS,
        "own": report.own,
    }


def _start_cost(bench: Bench, tool: Tool, server: RefServer) -> tuple[float, int]:
    """Return what a run of next to nothing costs once it has begun to send: (CPU seconds, tokens)."""
    small = replace(bench.job(server.url, 1, 2, 0), tokens=2)
    row = _measure(bench, tool, server, small)
    return (0.0, 0) if row is None else (row["cpu_s"], row["streamed_tokens"])


def _cost(row: dict[str, Any], start: tuple[float, int]) -> float | None:
    tokens = row["streamed_tokens"] - start[1]
    return 1e6 * (row["cpu_s"] - start[0]) / tokens if tokens > 0 else None


def _brief(row: dict[str, Any]) -> str:
    wrong = {name: row["errors"][name] for name in ("ttft_p99", "tpot_p99", "e2e_p99")}
    words = ", ".join(f"{name} {value:+.2%}" for name, value in wrong.items() if value is not None)
    void = f", void: the server was {row['server_lateness_p99_ms']:.2f} ms late" if row["void"] else ""
    doubts = "".join(f", it says: {reason}" for reason in row["own"].get("reasons", []))
    return f"{words}, {row['failed']} failed{void}{doubts}"


def _capacity(bench: Bench, tools: Sequence[Tool], server: RefServer) -> dict[str, Any]:
    """Add streams until a client's p99 of the TTFT is wrong by more than a twentieth, or requests fail."""
    rows: list[dict[str, Any]] = []
    for tool in tools:
        for streams in (n for n in _CAPACITY_STREAMS if n <= bench.args.most_streams):
            row = _measure(bench, tool, server, bench.job(server.url, streams, 2 * streams, 0))
            if row is None:
                break
            wrong = row["errors"]["ttft_p99"]
            row["within"] = wrong is not None and abs(wrong) <= _WORST_FRAC and not row["failed"]
            rows.append(row)
            sys.stderr.write(f"{tool.name}, {streams} streams: {_brief(row)}\n")
            if not row["within"]:
                break
    if not bench.args.json:
        sys.stdout.write(capacity_table(rows, [tool.name for tool in tools]) + "\n")
    return {"arguments": vars(bench.args), "runs": rows}


def _live(bench: Bench, tools: Sequence[Tool]) -> dict[str, Any]:
    """Compare with what a running server says of the same time; there is no truth of single requests."""
    args = bench.args
    rows = []
    for repeat in range(args.repeats):
        for tool in (*tools[repeat % len(tools) :], *tools[: repeat % len(tools)]):
            before = counters(args.against)
            done, report = bench.run(tool, bench.job(args.against, args.streams, args.requests, repeat))
            ttft_ms, tokens = counters(args.against).since(before)
            if report is not None:
                rows.append(
                    {
                        "tool": tool.name,
                        "completed": report.completed,
                        "failed": report.failed,
                        "said_ms": report.figures,
                        "server_ttft_mean_ms": ttft_ms,
                        "server_tokens": tokens,
                        "output_tokens": report.output_tokens,
                        "cpu_s": done.cpu_s,
                        "own": report.own,
                    }
                )
    if not args.json:
        sys.stdout.write(live_table(rows, [tool.name for tool in tools]) + "\n")
    return {"arguments": vars(args), "runs": rows}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare load clients with the truth, or with a server's metrics.")
    names = [tool.name for tool in TOOLS]
    parser.add_argument("--tools", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ttft", type=float, default=0.1, metavar="S")
    parser.add_argument("--ttft-sigma", type=float, default=0.3)
    parser.add_argument("--itl", type=float, default=0.02, metavar="S")
    parser.add_argument("--itl-sigma", type=float, default=0.0)
    parser.add_argument("--mode", choices=("burst", "spread"), default="burst")
    parser.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    parser.add_argument("--empty-text", action="store_true", help="tokens without text, as of a random model")
    parser.add_argument("--tokens-per-chunk", type=int, default=1)
    parser.add_argument("--against", default="ref", metavar="ref|URL", help="the reference server, or a running one")
    parser.add_argument("--model", default="m", help="as the running server spells it")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="of the running server's model, for clients that need it")
    parser.add_argument("--capacity", action="store_true", help="how many streams each client can measure")
    parser.add_argument("--most-streams", type=int, default=_CAPACITY_STREAMS[-1])
    parser.add_argument("--unpinned", action="store_true", help="do not give server and client a core each")
    parser.add_argument("--timeout", type=float, default=600, metavar="S", help="of one run of a client")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.against != "ref" and args.capacity:
        parser.error("--capacity needs the truth: it goes with --against ref")
    return args


if __name__ == "__main__":
    sys.exit(main())
