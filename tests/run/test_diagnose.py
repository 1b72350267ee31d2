from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sweep.cli import main
from sweep.serve.failures import classify

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / "tests" / "logs"
ALL = sorted(LOGS.glob("*.log"))


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["diagnose", "--json", *arguments]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_every_log_has_a_diagnosis_in_words_and_in_json(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, str(path))
    failure = classify(path, exit_code=None, phase=None)
    assert (found["kind"], found["treatment"], found["advice"]) == (failure.kind, failure.treatment, failure.advice)
    assert found.get("bounds") == failure.bounds
    assert main(["diagnose", str(path)]) == 0
    text = capsys.readouterr().out
    assert failure.kind in text
    assert all(line.isprintable() and len(line) <= 200 for line in text.splitlines())


def test_the_text_names_the_line_the_steps_the_numbers_and_what_a_sweep_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["diagnose", str(LOGS / "oom_free_memory_cuda.log"), "--exit-code", "1", "--phase", "start"]) == 0
    text = capsys.readouterr().out
    assert "line 6: ValueError: Free memory on device" in text
    assert "1. Set gpu-memory-utilization to at most 0.96." in text
    assert "76.05 GiB  free on the device" in text
    assert "In a sweep: the configuration counts as infeasible" in text


def test_a_flag_that_is_fixed_would_stop_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    log = str(LOGS / "invalid_block_size.log")
    assert document(capsys, log)["treatment"] == "prune"
    assert document(capsys, log, "--fixed", "dtype", "--fixed", "block_size")["treatment"] == "abort_sweep"


def test_a_signal_is_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "server.log"
    log.write_text("INFO 01-02 03:04:05 [a.py:1] Starting to load model x\n")
    assert document(capsys, str(log), "--exit-code", "-9")["kind"] == "host_oom_killed"
    found = document(capsys, str(log), "--exit-code", "137", "--phase", "load")
    assert (found["kind"], found["phase"], found["line"]) == ("host_oom_killed", "load", None)


def test_a_log_from_a_pipe() -> None:
    done = subprocess.run(
        [sys.executable, "run_sweep.py", "diagnose", "-", "--json"],
        input=b"\xff\0 noise\r\nOSError: [Errno 98] Address already in use\r\n",
        stdout=subprocess.PIPE,
        cwd=ROOT,
        check=True,
        timeout=60,
    )
    found = json.loads(done.stdout)
    assert (found["kind"], found["line"]) == ("port_in_use", 2)


@pytest.mark.parametrize("name", ["", "none.log", "a\0b"])
def test_a_log_that_cannot_be_read(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(tmp_path / name)]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_an_empty_log_is_nothing_wrong_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.log").touch()
    found = document(capsys, str(tmp_path / "empty.log"))
    assert (found["kind"], found["evidence"]) == ("healthy", "the log is empty")
