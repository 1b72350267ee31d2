"""What a watcher sees of a study: a live status line on a terminal, plain lines elsewhere; never on stdout."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from sweep.model import Event, LevelStats, State
from sweep.text import duration, flag_words, outcome_words, percent, printable, quantity

_STYLES: dict[State, str] = {
    "infeasible": "yellow",
    "skipped": "dim",
    "pruned": "dim",
    "invalid": "yellow",
    "failed": "red",
    "interrupted": "red",
}
_SHOWN_RUNNING = 3  # trials on the status line; with eight GPUs it would not fit


def open_progress(stream: TextIO, *, heartbeat_s: float = 60) -> AbstractContextManager[Callable[[Event], None]]:
    """Return a context manager that gives a function which shows events on `stream`, usually sys.stderr."""
    console = Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True)
    return Terminal(console) if stream.isatty() and not console.is_dumb_terminal else Lines(stream, heartbeat_s)


@dataclass(frozen=True, slots=True)
class Running:
    """A trial under way: what it does, and since when (monotonic)."""

    trial: int
    phase: str
    since_s: float


@dataclass(frozen=True, slots=True)
class Status:
    """What the status line and the heartbeat tell; every event makes the next one."""

    running: dict[int, Running] = field(default_factory=dict)
    best: str = ""
    end_s: float | None = None  # monotonic time at which the study is expected to end

    def after(self, event: Event, now_s: float) -> Status:
        if event.kind == "study_finished":
            return Status()
        end_s = self.end_s if event.eta_s is None else now_s + event.eta_s
        best = _value(event) if event.best else self.best
        return replace(self, running=_running(self.running, event, now_s), best=best, end_s=end_s)

    def line(self, now_s: float) -> str:
        shown = list(self.running.values())[:_SHOWN_RUNNING]
        parts = [f"trial {run.trial}: {run.phase} {duration(now_s - run.since_s)}" for run in shown]
        if len(self.running) > len(shown):
            parts.append(f"{len(self.running) - len(shown)} more")
        if self.best:
            parts.append(f"best {self.best}")
        if self.end_s is not None:
            parts.append(f"{duration(self.end_s - now_s)} left")
        return " · ".join(parts)


class Lines:
    """Plain lines: one an event worth keeping, and a heartbeat when nothing else was said for a while."""

    def __init__(self, stream: TextIO, heartbeat_s: float) -> None:
        self._stream = stream
        self._heartbeat_s = heartbeat_s
        self._status = Status()
        self._spoke_s = time.monotonic()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="heartbeat")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._status = self._status.after(event, time.monotonic())
            self._say(event_line(event))

    def _beat(self) -> None:
        wait_s = self._heartbeat_s
        while not self._ended.wait(wait_s):
            with self._lock:
                silent_s = time.monotonic() - self._spoke_s
                if silent_s >= self._heartbeat_s:
                    self._say(self._status.line(time.monotonic()))
                    silent_s = 0.0
                wait_s = self._heartbeat_s - silent_s

    def _say(self, line: str | None) -> None:
        if line:
            with suppress(OSError):  # whoever read this may be gone; the study goes on
                print(line, file=self._stream, flush=True)
            self._spoke_s = time.monotonic()


class Terminal:
    """A status line that stays at the bottom and is redrawn every second; finished trials scroll by above it."""

    def __init__(self, console: Console) -> None:
        self._status = Status()
        self._console = console
        self._live = Live(self, console=console, refresh_per_second=1, transient=True, redirect_stdout=False)

    def __rich__(self) -> Text:
        return Text(self._status.line(time.monotonic()), style="cyan", no_wrap=True, overflow="ellipsis")

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._live.stop()

    def __call__(self, event: Event) -> None:
        self._status = self._status.after(event, time.monotonic())
        line = event_line(event)
        if line and event.kind != "trial_started":
            with suppress(OSError):  # the terminal may be gone; the study goes on
                self._console.print(Text(line, style=_style(event)))


def event_line(event: Event) -> str | None:
    """Return the line that stays, or None for what only the status line shows."""
    match event.kind:
        case "trial_started":
            flags = flag_words(event.flags) or printable(event.text)
            return "  ".join(part for part in (_place(event), "started", flags) if part)
        case "trial_finished":
            return finished_line(event)
        case "phase":
            return None
        case _:
            return "\n".join(printable(line) for line in event.text.splitlines())


def finished_line(event: Event) -> str:
    """Write a finished trial on one line: what it gave or why it gave nothing, its flags, the time left."""
    outcome = event.outcome
    if outcome is None:
        raise ValueError("a finished trial has an outcome")
    parts = [_place(event)]
    if outcome.state != "complete":
        parts.append(outcome.state)
    parts.append(outcome_words(outcome))
    parts += [*_results(event), *_comparison(event)]
    flags = flag_words(outcome.flags) or printable(outcome.label or "")
    left = "" if event.eta_s is None else f"· {duration(event.eta_s)} left"
    parts.append(f"{flags} {left}".strip())
    return "  ".join(part for part in parts if part)


def _results(event: Event) -> list[str]:
    verdict = event.verdict
    if verdict is None or verdict.level is None:
        return []
    level: LevelStats = verdict.level
    latencies = (("TTFT p99", level.ttft_s), ("TPOT p99", level.tpot_s))
    figures = [f"{name} {quantity(1000 * dist.p99, 'ms')}" for name, dist in latencies if dist]
    return [_value(event), *figures, *(["misses the SLOs"] if verdict.slo_met is False else [])]


def _comparison(event: Event) -> list[str]:
    gain = event.gain_frac
    against = "" if gain is None else f"{percent(gain, 0)} {'over' if gain >= 0 else 'against'} baseline"
    if event.best:
        return [f"(best so far {against})".replace(" )", ")")]
    return [f"({against})"] if against else []


def _value(event: Event) -> str:
    return quantity(event.verdict.value, event.unit) if event.verdict and event.verdict.value is not None else ""


def _place(event: Event) -> str:
    # A skipped one is no trial of those that were planned.
    skipped = event.outcome is not None and event.outcome.state == "skipped"
    return f"#{event.trial}" if event.total is None or skipped else f"#{event.trial} of {event.total}"


def _running(running: dict[int, Running], event: Event, now_s: float) -> dict[int, Running]:
    if event.trial is None or event.kind not in {"trial_started", "phase", "trial_finished"}:
        return running
    others = {trial: run for trial, run in running.items() if trial != event.trial}
    if event.kind == "trial_finished":
        return others
    phase = printable(event.text) if event.kind == "phase" else "starting"
    return {**others, event.trial: Running(event.trial, phase, now_s)}


def _style(event: Event) -> str:
    if event.best:
        return "bold green"
    return _STYLES.get(event.outcome.state, "") if event.outcome else ""
