"""One sweep on a real vLLM: a memory failure that teaches, prefix caching really off, a kill -9, and the exported file.

About six launches of the tiny model on the CPU build, five minutes on two cores.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import optuna
import pandas as pd
import pytest
import yaml

from sweep.tiny_model import make
from tests.processes import STUDY_FILES, left_over, wait_for

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "results" / ".cache" / "tiny-qwen2"
SERVER = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
# Cold imports on a machine with two busy cores; only a hang takes longer.
PATIENCE_S = 900

TRIAL_FILES = ["spec.json", "serve.yaml", "outcome.json", "server.log", "requests.parquet", "metrics.jsonl"]

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(2 * PATIENCE_S),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (make setup installs it)"),
]

SPACE = {
    "serve": {
        "model": str(MODEL),
        "command": SERVER,
        "args": {"max-model-len": 512, "enforce-eager": True},
    },
    "search": {
        "objective": {"maximize": "output_tps"},
        "sampler": "tpe",
        "baseline": {"gpu-memory-utilization": 0.3},
        "enqueue": [{"gpu-memory-utilization": 0.001}, {"gpu-memory-utilization": 0.3, "enable-prefix-caching": False}],
        "params": {
            "gpu-memory-utilization": [0.001, 0.3],
            "max-num-seqs": [8, 128],
            "enable-prefix-caching": [True, False],
        },
        "rules": ["gpu-memory-utilization >= 0.3 or enable-prefix-caching"],
    },
    "load": {
        "concurrency": 8,
        "prompt": {"tokens": 192, "shared_prefix": 128},
        "output": {"tokens": 16},
        "requests": 48,
    },
    "measure": {"warmup": {"min_s": 2, "max_s": 8}},
    "run": {"name": "real", "trials": 3},
}


def start_sweep(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(ROOT / "run_sweep.py"), "run", "space.yaml", "--json"]
    with (folder / "sweep.log").open("ab") as log:
        return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=log, start_new_session=True)


def outcome(study: Path, trial: int) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((study / "trials" / f"{trial:04d}" / "outcome.json").read_text())
    return data


def test_a_sweep_on_a_real_vllm(tmp_path: Path) -> None:
    make(MODEL)
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(SPACE))
    study = tmp_path / "results" / "real"

    # Killed in the middle of trial 2, while its server loads.
    first = start_sweep(tmp_path)
    server_log = study / "trials" / "0002" / "server.log"
    try:
        wait_for(
            "trial 2 to load",
            lambda: server_log.exists() and "EngineCore" in server_log.read_text(),
            PATIENCE_S,
        )
        assert left_over(study.glob("trials/*"))
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.communicate()
    wait_for("the processes of the killed sweep to end", lambda: not left_over(study.glob("trials/*")), timeout_s=60)
    finished = [outcome(study, trial) for trial in (0, 1)]
    assert not (study / "trials" / "0002" / "outcome.json").exists()

    # The same command goes on.
    second = start_sweep(tmp_path)
    stdout, _ = second.communicate(timeout=PATIENCE_S)
    assert second.returncode == 0, (tmp_path / "sweep.log").read_text()
    assert not left_over(study.glob("trials/*"))
    result = json.loads(stdout)
    assert result["complete"] is True
    assert result["best"] is not None

    # No finished trial is lost or repeated; the interrupted one is run again under a new number.
    assert [outcome(study, trial) for trial in (0, 1)] == finished
    states = {trial: outcome(study, trial)["measured"]["state"] for trial in range(5)}
    assert states[0] == "complete"
    assert states[1] == "skipped"
    assert states[2] == "interrupted"
    assert states[3] == "complete"
    assert outcome(study, 3)["flags"] == outcome(study, 2)["flags"]

    # What trial 0 took of memory tells that a thousandth of it holds no cache: no launch was spent on that, and the
    # sampler was told.
    assert outcome(study, 1)["measured"]["failure"]["kind"] == "oom_kv_cache_none"
    assert "in trial 0" in outcome(study, 1)["measured"]["failure"]["evidence"]
    assert not (study / "trials" / "0001" / "server.log").exists()
    record = optuna.load_study(study_name="real", storage=f"sqlite:///{study / 'study.db'}")
    told = {trial.user_attrs["trial"]: trial for trial in record.trials}
    assert told[1].state == optuna.trial.TrialState.PRUNED
    assert told[1].constraints["launch"] > 0
    assert told[0].state == optuna.trial.TrialState.COMPLETE
    record._storage.remove_session()
    record._storage._backend.engine.dispose()

    # Prefix caching switched off in the YAML is off in the server, and on where nothing was said.
    on, off = outcome(study, 0)["measured"], outcome(study, 3)["measured"]
    assert on["server"]["cache_config"]["enable_prefix_caching"] == "True"
    assert off["server"]["cache_config"]["enable_prefix_caching"] == "False"
    assert on["levels"][0]["server"]["prefix_hits_tokens"] > 0
    assert not off["levels"][0]["server"]["prefix_hits_tokens"]
    assert off["levels"][0]["prefix_offered_frac"] == pytest.approx(128 / 192, abs=0.02)
    for measured in (on, off):
        level = measured["levels"][0]
        assert (level["completed"], level["failed"]) == (48, 0)
        assert level["valid"], level["reasons"]
        # Over the whole level every token that the server made was received, and nobody else had any.
        assert level["client"]["tokens"] == level["client"]["server_tokens"] > 0
        assert level["output_tps"] > 0
        assert measured["server"]["kv_cache_tokens"] > 0
        assert measured["server"]["max_concurrency"] > 0

    # Every file is there, and the tables say the same.
    for name in [*STUDY_FILES, "best_config.yaml"]:
        assert (study / name).stat().st_size > 0, name
    table = pd.read_csv(study / "trials.csv")
    assert list(table["state"])[:4] == ["complete", "skipped", "interrupted", "complete"]
    assert table.loc[1, "failure_kind"] == "oom_kv_cache_none"
    for name in TRIAL_FILES:
        assert (study / "trials" / "0003" / name).exists(), name

    best = study / "best_config.yaml"
    assert "read by the parser of the installed vLLM" in best.read_text()
    assert_it_starts_a_server(best, tmp_path)


def assert_it_starts_a_server(best: Path, folder: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*SERVER, "--config", str(best), "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "exported.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for("the exported configuration to serve", lambda: healthy(url) or server.poll() is not None, PATIENCE_S)
        assert server.poll() is None, (folder / "exported.log").read_text()
        body = json.dumps({"model": yaml.safe_load(best.read_text())["model"], "prompt": "hello", "max_tokens": 4})
        request = urllib.request.Request(
            f"{url}/v1/completions", data=body.encode(), headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.load(response)["usage"]["completion_tokens"] >= 1
    finally:
        server.terminate()
        try:
            server.wait(60)
        finally:
            # The leader may be dead and its engine alive: the group is killed either way.
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait(60)


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False
