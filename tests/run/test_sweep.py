"""The whole program against the fake server: real processes, real signals, real files, no vLLM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from tests.fakes.running import PROGRAM
from tests.processes import STUDY_FILES, left_over, wait_for

ROOT = Path(__file__).resolve().parents[2]

# A client that shares two cores with the server can follow FAIR; FAST is for what ends before its figures matter.
FAIR = {"FAKE_VLLM_SPEED": "1", "FAKE_VLLM_START_S": "0.2"}
FAST = {"FAKE_VLLM_SPEED": "20"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def space(folder: Path, **changes: Any) -> Path:
    """Write a space for the fake server; `changes` are "section__key" = value."""
    data: dict[str, Any] = {
        "serve": {
            "model": "some/model",
            "command": [sys.executable, str(PROGRAM), "serve"],
            "env": FAIR,
            "stop_timeout_s": 5,
            "args": {"max-model-len": 4096},
        },
        "search": {
            "sampler": "random",
            "params": {
                "gpu-memory-utilization": [0.5, 0.9, 0.999],
                "max-num-seqs": [16, 64, 256],
                "enable-prefix-caching": [True, False],
            },
        },
        "load": {"concurrency": 4, "prompt": {"tokens": 64}, "output": {"tokens": 16}, "requests": 30},
        "measure": {"warmup": {"min_s": 0.2, "max_s": 0.6}},
        "run": {"name": "fake", "trials": 3},
    }
    for path, value in changes.items():
        section, _, key = path.partition("__")
        data[section][key] = value
    file = folder / "space.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


def command(*args: str) -> list[str]:
    return [sys.executable, str(ROOT / "run_sweep.py"), *args]


def run(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*args), cwd=folder, capture_output=True, text=True, timeout=150, check=False)


def start(folder: Path, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*args), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def outcomes(study: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(study.glob("trials/*/outcome.json"))]


def test_a_study_from_its_space_to_its_report(tmp_path: Path) -> None:
    file = space(tmp_path, search__enqueue=[{"gpu-memory-utilization": 0.999}])
    done = run(tmp_path, "run", str(file))
    assert done.returncode == 0, done.stderr
    study = tmp_path / "results" / "fake"
    states = [outcome["measured"]["state"] for outcome in outcomes(study)]
    assert states == ["complete", "infeasible", "complete"]
    assert outcomes(study)[1]["measured"]["failure"]["kind"] == "oom_free_memory_lt_requested"
    for name in STUDY_FILES:
        assert (study / name).stat().st_size > 0, name
    table = pd.read_csv(study / "trials.csv")
    assert list(table["trial"]) == [0, 1, 2]
    assert table.loc[0, "kv_cache_tokens"] > 0
    best = yaml.safe_load((study / "best_config.yaml").read_text())
    assert best["model"] == "some/model"
    assert False not in best.values()
    assert "best_config.yaml" in done.stdout
    assert "#1" in done.stderr
    assert not left_over(study.glob("trials/*"))

    # Told again, it has nothing left to do, and says the same.
    again = run(tmp_path, "run", str(file), "--json")
    assert again.returncode == 0
    assert json.loads(again.stdout)["trials"] == 3
    # The derived files can be made again from the outcomes.
    before = (study / "trials.csv").read_text()
    for name in ("trials.csv", "levels.csv", "best_config.yaml", "report.html", "summary.md"):
        (study / name).unlink()
    made_again = run(tmp_path, "report", "fake", "--json")
    assert made_again.returncode == 0
    assert json.loads(made_again.stdout) == json.loads(again.stdout)
    assert (study / "trials.csv").read_text() == before
    assert (study / "best_config.yaml").exists()
    status = run(tmp_path, "status", "fake", "--json")
    assert json.loads(status.stdout)["trials_done"] == 3
    assert json.loads(status.stdout)["running"] is False


def test_prefix_caching_off_reaches_the_server(tmp_path: Path) -> None:
    file = space(
        tmp_path,
        search__baseline={"enable-prefix-caching": False},
        load__prompt={"tokens": 64, "shared_prefix": 48},
        run__trials=1,
    )
    assert run(tmp_path, "run", str(file)).returncode == 0
    study = tmp_path / "results" / "fake"
    serve = yaml.safe_load((study / "trials" / "0000" / "serve.yaml").read_text())
    assert serve["no-enable-prefix-caching"] is True
    (outcome,) = outcomes(study)
    assert outcome["measured"]["server"]["cache_config"]["enable_prefix_caching"] == "False"
    assert not outcome["measured"]["levels"][0]["server"]["prefix_hits_tokens"]


@pytest.mark.parametrize("phase", ["loading", "serving"])
def test_kill_9_costs_one_trial_and_leaves_nothing(tmp_path: Path, phase: str) -> None:
    slow = {"loading": "slow_start=5", "serving": "hang_stream_after=20"}[phase]
    file = space(tmp_path, run__trials=2)
    study = tmp_path / "results" / "fake"
    assert run(tmp_path, "run", str(file), "--trials", "1").returncode == 0
    (first,) = outcomes(study)

    os.environ["FAKE_VLLM_FAULT"] = slow
    try:
        process = start(tmp_path, "run", str(file))
    finally:
        del os.environ["FAKE_VLLM_FAULT"]
    log = study / "trials" / "0001" / "server.log"
    marker = {"loading": "", "serving": "Application startup complete"}[phase]
    wait_for(
        "the server to come that far",
        lambda: log.exists() and marker in log.read_text() and left_over(study.glob("trials/*")),
    )
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_for("all processes to end", lambda: not left_over(study.glob("trials/*")))

    done = run(tmp_path, "run", str(file))
    assert done.returncode == 0, done.stderr
    found = outcomes(study)
    assert found[0] == first
    assert [outcome["measured"]["state"] for outcome in found] == ["complete", "interrupted", "complete"]
    assert found[2]["flags"] == found[1]["flags"]
    assert not left_over(study.glob("trials/*"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_cleanly_and_the_report_is_there(tmp_path: Path, number: signal.Signals, code: int) -> None:
    file = space(tmp_path, run__trials=50, load__requests=2000)
    process = start(tmp_path, "run", str(file))
    study = tmp_path / "results" / "fake"
    wait_for("a server", lambda: left_over(study.glob("trials/*")))
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert "Traceback" not in stderr
    assert not left_over(study.glob("trials/*"))
    assert outcomes(study)[-1]["measured"]["state"] == "interrupted"
    assert (study / "report.html").exists()
    assert (study / "summary.md").exists()


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("wrong_model_name", 4, "serves"),
        ("gated", 4, "no access to the model"),
        ("model_missing", 4, "model not found"),
    ],
)
def test_what_every_trial_would_suffer_stops_at_once(tmp_path: Path, fault: str, code: int, words: str) -> None:
    file = space(tmp_path, serve__env=FAST | {"FAKE_VLLM_FAULT": fault}, run__trials=2)
    done = run(tmp_path, "run", str(file))
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert len(outcomes(tmp_path / "results" / "fake")) == 1
    assert (tmp_path / "results" / "fake" / "report.html").exists()


@pytest.mark.parametrize(
    ("fault", "state"),
    [
        ("engine_dead_after=20", {"failed", "infeasible"}),
        ("exit0_after=20", {"failed", "infeasible"}),
        ("die_at_start", {"failed"}),
        ("http_500_every=2", {"invalid"}),
        ("flood_log", {"complete"}),
        ("setsid_engine", {"complete"}),
        ("ignore_sigterm", {"complete"}),
    ],
)
def test_faults_are_seen_and_no_process_stays(tmp_path: Path, fault: str, state: set[str]) -> None:
    env = (FAIR if state == {"complete"} else FAST) | {"FAKE_VLLM_FAULT": fault}
    file = space(tmp_path, serve__env=env, serve__stop_timeout_s=2, run__trials=1)
    done = run(tmp_path, "run", str(file))
    study = tmp_path / "results" / "fake"
    first = outcomes(study)[0]["measured"]
    assert first["state"] in state, first
    assert done.returncode == (0 if state == {"complete"} else 3), done.stderr
    assert not left_over(study.glob("trials/*"))


def test_a_stall_at_the_start_and_a_hang_under_load_end_in_time(tmp_path: Path) -> None:
    for fault, changes in (("hang_start", {}), ("hang_stream_after=10", {"load__stall_timeout_s": 2})):
        folder = tmp_path / fault.partition("=")[0]
        folder.mkdir()
        env = FAST | {"FAKE_VLLM_FAULT": fault}
        file = space(
            folder, serve__env=env, serve__stall_timeout_s=2, serve__stop_timeout_s=2, run__trials=1, **changes
        )
        done = run(folder, "run", str(file))
        assert done.returncode == 3, done.stderr
        failure = outcomes(folder / "results" / "fake")[0]["measured"]["failure"]
        assert failure["kind"] == "hang_timeout", failure


@pytest.mark.parametrize(
    ("fault", "kinds"),
    [("engine_dead_after=900", {"engine_dead"}), ("hang_stream_after=900", {"hang_timeout"})],
)
def test_a_server_that_fails_in_the_middle_of_the_window_is_no_result(
    tmp_path: Path, fault: str, kinds: set[str]
) -> None:
    env = FAST | {"FAKE_VLLM_FAULT": fault}
    changes = {"load__requests": 1500, "load__stall_timeout_s": 2, "serve__stop_timeout_s": 2, "run__trials": 1}
    done = run(tmp_path, "run", str(space(tmp_path, serve__env=env, **changes)))
    assert done.returncode == 3, done.stderr
    measured = outcomes(tmp_path / "results" / "fake")[0]["measured"]
    assert measured["state"] != "complete"
    assert measured["failure"]["kind"] in kinds, measured["failure"]


def test_a_level_that_is_too_much_leaves_the_lighter_ones_their_figures(tmp_path: Path) -> None:
    changes = {
        "load__concurrency": None,
        "load__rate": [2, 400],
        "load__request_timeout_s": 1,
        "load__requests": 20,
        "load__output": {"tokens": 8},
        "search__objective": {"maximize": "output_tps", "slo": {"ttft_p50": "900ms"}},
        "search__baseline": {"max-num-seqs": 1},
        "run__trials": 1,
    }
    file = space(tmp_path, serve__env={"FAKE_VLLM_SPEED": "0.5"}, **changes)
    done = run(tmp_path, "run", str(file), "--json")
    assert done.returncode == 0, done.stderr
    (outcome,) = outcomes(tmp_path / "results" / "fake")
    levels = {level["level"]: level for level in outcome["measured"]["levels"]}
    assert outcome["measured"]["state"] == "complete"
    assert levels["r=2"]["valid"]
    assert not levels["r=400"]["valid"]


def test_no_trial_meets_the_slos(tmp_path: Path) -> None:
    file = space(tmp_path, search__objective={"maximize": "output_tps", "slo": {"ttft_p50": "0.01ms"}}, run__trials=2)
    done = run(tmp_path, "run", str(file))
    assert done.returncode == 3
    assert "No trial met the SLOs" in done.stdout
    assert "TTFT p50" in done.stdout
    assert "closest" in (tmp_path / "results" / "fake" / "best_config.yaml").read_text()


def test_a_second_sweep_on_the_same_study_is_refused(tmp_path: Path) -> None:
    file = space(tmp_path, run__trials=50, load__requests=2000)
    process = start(tmp_path, "run", str(file))
    study = tmp_path / "results" / "fake"
    wait_for("a server", lambda: left_over(study.glob("trials/*")))
    second = run(tmp_path, "run", str(file))
    assert second.returncode == 5
    assert str(process.pid) in second.stderr
    assert json.loads(run(tmp_path, "status", "fake", "--json").stdout)["running"] is True
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)


def test_several_files_are_run_one_after_another(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        space(tmp_path / name, run__name=name, run__trials=1)
    done = run(tmp_path, "run", "one/space.yaml", "two/space.yaml", "--json")
    assert done.returncode == 0, done.stderr
    assert [document["study"] for document in json.loads(done.stdout)] == ["one", "two"]
    twins = run(tmp_path, "run", "one/space.yaml", "one/space.yaml")
    assert twins.returncode == 2


def test_nothing_secret_is_written(tmp_path: Path) -> None:
    canary = "hf_canary0123456789abcdefghij"
    os.environ["HF_TOKEN"] = canary
    try:
        run(tmp_path, "run", str(space(tmp_path, run__trials=1)))
    finally:
        del os.environ["HF_TOKEN"]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if canary.encode() in path.read_bytes()]


def test_check_tells_the_plan_and_the_mistakes(tmp_path: Path) -> None:
    good = run(tmp_path, "check", str(space(tmp_path)))
    assert good.returncode == 0, good.stderr
    assert "gpu-memory-utilization: 0.5, 0.9, 0.999" in good.stdout
    assert "Command:" in good.stdout
    bad = run(tmp_path, "check", str(space(tmp_path, run__trails=3)))
    assert bad.returncode == 2
    assert "did you mean 'trials'" in bad.stderr
    assert "Traceback" not in bad.stderr
    absent = run(tmp_path, "check", "absent.yaml", "--json")
    assert absent.returncode == 2
    assert json.loads(absent.stdout)["exit_code"] == 2
    assert run(tmp_path, "report", "absent").returncode == 2
