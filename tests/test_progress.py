from __future__ import annotations

import io
import os
import pty
import re
import threading
import time

import pytest

from sweep.model import Event
from sweep.progress import Status, event_line, finished_line, open_progress
from tests.report.studies import complete, failed, judge, level, skipped


def finished(outcome, **more) -> Event:
    return Event("trial_finished", trial=outcome.trial, outcome=outcome, verdict=judge(outcome), unit="tok/s", **more)


def test_an_infeasible_trial_says_why() -> None:
    event = finished(failed(3, {"gpu-memory-utilization": 0.01}), total=12)
    assert finished_line(event) == (
        "#3 of 12  infeasible  out of memory: no room for the KV cache  gpu-memory-utilization=0.01"
    )


def test_a_skipped_trial_gives_its_reason_with_the_numbers() -> None:
    reason = "trial 2 found only 70.2 of 79.2 GiB free; this asks for 73.0"
    line = finished_line(finished(skipped(3, {"gpu-memory-utilization": 0.93}, reason=reason), total=12))
    assert line == f"#3  skipped  {reason}  gpu-memory-utilization=0.93"


def test_a_better_trial_says_how_much() -> None:
    outcome = complete(4, {"max-num-seqs": 64}, level(output_tps=412.0, ttft_s=0.09))
    line = finished_line(finished(outcome, total=12, gain_frac=0.071, best=True, eta_s=540))
    assert line == (
        "#4 of 12  412 tok/s  TTFT p99 180 ms  TPOT p99 20 ms  (best so far +7 % over baseline)"
        "  max-num-seqs=64 · 9 min left"
    )


def test_a_worse_trial_and_the_baseline() -> None:
    assert "(-3 % against baseline)" in finished_line(finished(complete(5, {"max-num-seqs": 1}), gain_frac=-0.03))
    line = finished_line(finished(complete(0, {}, label="baseline"), total=12, best=True))
    assert line == "#0 of 12  400 tok/s  TTFT p99 200 ms  TPOT p99 20 ms  (best so far)  baseline"


def test_an_unknown_failure_shows_its_evidence_without_control_characters() -> None:
    event = finished(failed(1, {"a": "\x1b[2Jx\ny"}, kind="other", evidence="Boom\x1b[31m \x07at\r\nline 2"))
    assert finished_line(event) == "#1  infeasible  other cause: Boom at line 2  a=x y"


def test_a_note_keeps_its_lines_and_loses_the_rest() -> None:
    assert event_line(Event("note", text="one\x1b[1m\ntwo\x07")) == "one\ntwo"


def test_the_status_follows_the_trials() -> None:
    status = Status()
    for event in (
        Event("trial_started", trial=1, total=9),
        Event("phase", trial=1, text="loading c=64", eta_s=3600),
        Event("trial_started", trial=2),
    ):
        status = status.after(event, now_s=100.0)
    assert status.line(now_s=110.0) == "trial 1: loading c=64 10 s · trial 2: starting 10 s · 60 min left".replace(
        "60 min", "1 h 00 min"
    )
    status = status.after(finished(complete(1, {}), best=True), now_s=120.0)
    assert status.line(now_s=130.0) == "trial 2: starting 30 s · best 400 tok/s · 59 min left".replace(
        "59 min", "60 min"
    ).replace("60 min", "1 h 00 min")
    assert status.after(Event("study_finished"), 140.0).line(150.0) == ""


def test_many_running_trials_are_counted() -> None:
    status = Status()
    for trial in range(8):
        status = status.after(Event("trial_started", trial=trial), 0.0)
    assert status.line(1.0).endswith("· 5 more")


def test_plain_lines_without_a_terminal() -> None:
    stream = io.StringIO()
    with open_progress(stream) as show:
        show(Event("plan", text="2 trials"))
        show(Event("trial_started", trial=0, total=2))
        show(Event("phase", trial=0, text="loading"))
        show(finished(complete(0, {}), total=2))
        show(Event("study_finished", text="done"))
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["2 trials", "#0 of 2", "#0 of 2", "done"]
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()


def test_a_heartbeat_tells_that_it_is_alive() -> None:
    stream = io.StringIO()
    with open_progress(stream, heartbeat_s=0.02) as show:
        show(Event("phase", trial=3, text="starting the server"))
        deadline = time.monotonic() + 20
        while "trial 3: starting the server" not in stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "trial 3: starting the server" in stream.getvalue()
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]


def test_a_reader_that_left_does_not_end_the_study() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", buffering=1) as stream:
        with open_progress(stream) as show:
            show(Event("note", text="nobody listens"))
            show(Event("note", text="still nobody"))
        with pytest.raises(OSError):
            os.write(write, b"x")
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)  # so that closing the stream can flush


def test_a_terminal_gets_the_line_and_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as stream:
        with open_progress(stream) as show:
            show(Event("trial_started", trial=7))
            show(Event("note", text="[red]not markup[/red] \x1b]0;title\x07"))
        stream.flush()
        seen = os.read(leader, 65536).decode()
    os.close(leader)
    assert "trial 7: starting" in seen
    assert "[red]not markup[/red]" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen)
    assert "title" not in seen
