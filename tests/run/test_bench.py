import argparse
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from sweep.errors import ConfigError, NoAnswerError
from sweep.run.bench import run_bench
from sweep.run.bench_args import add_arguments
from sweep.run.records import write_requests
from tests.fakes.running import fake_vllm, free_port
from tests.measure.records import request

QUICK = ["--model", "m", "--input-tokens", "32", "--output-tokens", "8", "--max-warmup", "0.4", "--concurrency", "4"]
DIST = {"mean", "p50", "p90", "p95", "p99", "n"}


def bench(*args: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run_bench(parser.parse_args(args))


def test_the_document_has_its_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_vllm(tmp_path) as url:
        limits = ["--slo", "ttft_p99=10s", "--slo", "ttft_p50=0.001ms"]
        code = bench("--base-url", url, *QUICK, "--requests", "30", *limits, "--json")
    doc = json.loads(capsys.readouterr().out)
    assert code == 0
    assert (doc["completed"], doc["failed"], doc["errors"]) == (30, 0, {})
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        assert set(doc[name]) == DIST
    assert doc["ttft_ms"]["n"] == 30
    assert doc["duration_s"] > 0
    assert doc["output_tps"] == pytest.approx(8 * doc["request_rps"], rel=0.5)
    assert doc["slo"]["ttft_p99"]["met"]
    assert not doc["slo"]["ttft_p50"]["met"]
    assert doc["goodput_rps"] == 0
    assert doc["warmup"]["requests"] > 0
    assert doc["whole_run"]["completed"] == 30
    assert set(doc["client"]) == {"cpu_us_per_event", "send_lag_ms", "stamp_source", "valid", "reasons"}
    assert "ttft_sched_ms" not in doc


def test_an_open_loop_also_counts_from_the_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_vllm(tmp_path) as url:
        assert bench("--base-url", url, *QUICK[:-2], "--rate", "40", "--seconds", "0.5", "--json") == 0
    doc = json.loads(capsys.readouterr().out)
    assert set(doc["ttft_sched_ms"]) == DIST
    assert doc["ttft_sched_ms"]["mean"] >= doc["ttft_ms"]["mean"]
    assert "goodput_rps" not in doc


def test_two_endpoints_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "two").mkdir()
    plain = fake_vllm(tmp_path / "two", FAKE_VLLM_FAULT="plain_openai")
    with fake_vllm(tmp_path) as url, plain as other:
        code = bench("--base-url", url, "--base-url", other + "/v1", *QUICK, "--requests", "8", "--endpoint", "chat")
    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert lines[0].split() == [url, other + "/v1"]
    assert ["requests", "completed", "8", "8"] in [line.split() for line in lines]


def test_nothing_succeeded_is_exit_code_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_vllm(tmp_path, FAKE_VLLM_FAULT="http_500_every=1") as url:
        assert bench("--base-url", url, *QUICK, "--requests", "5", "--json") == 3
    doc = json.loads(capsys.readouterr().out)
    assert doc["completed"] == 0
    assert doc["errors"]["http_500"] > 0
    assert doc["ttft_ms"] is None
    assert not doc["client"]["valid"]


def test_bad_arguments_are_told_before_any_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = ["--base-url", f"http://127.0.0.1:{free_port()}"]
    cases = [
        ([*nowhere, *QUICK, "--slo", "ttft_p99"], "expected NAME=LIMIT"),
        ([*nowhere, *QUICK, "--slo", "speed=1s"], "unknown latency 'speed'"),
        ([*nowhere, *QUICK, "--requests", "0"], "requests"),
        ([*nowhere, *QUICK, "--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY is not set"),
    ]
    for args, words in cases:
        with pytest.raises(ConfigError, match=words):
            bench(*args)
    with pytest.raises(NoAnswerError, match="Cannot connect"):
        bench(*nowhere, *QUICK)
    with fake_vllm(tmp_path, VLLM_API_KEY="secret") as url:
        with pytest.raises(ConfigError, match="Unauthorized"):
            bench("--base-url", url, *QUICK)
        monkeypatch.setenv("KEY_OF_THE_SERVER", "secret")
        with pytest.raises(ConfigError, match="serves m; take a name"):
            bench("--base-url", url, *QUICK, "--model", "other", "--api-key-env", "KEY_OF_THE_SERVER")


def test_requests_are_kept_without_their_texts(tmp_path: Path) -> None:
    path = tmp_path / "requests.parquet"
    write_requests(
        path, [("c=4", request(chunks=[(1, 1), (2, 3)])), ("c=8", request(chunks=[], status="connect", sched=3))]
    )
    rows = pq.read_table(path).to_pylist()
    assert [row["level"] for row in rows] == ["c=4", "c=8"]
    assert rows[0]["chunk_t_ns"] == [1_000_000, 2_000_000]
    assert rows[0]["chunk_tokens"] == [1, 3]
    assert (rows[1]["status"], rows[1]["t_sched_ns"], rows[1]["chunk_tokens"]) == ("connect", 3_000_000, [])
