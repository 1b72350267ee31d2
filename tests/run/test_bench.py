import argparse
import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from sweep.errors import ConfigError, NoAnswerError
from sweep.run.bench import run_bench
from sweep.run.bench_args import add_arguments
from sweep.run.bench_document import table
from sweep.run.bench_load import read_task
from sweep.run.records import write_requests
from tests.fakes.running import fake_vllm, free_port
from tests.measure.records import request

QUICK = ["--model", "m", "--input-tokens", "32", "--output-tokens", "8", "--max-warmup", "0.4", "--concurrency", "4"]
DIST = {"mean", "p50", "p90", "p95", "p99", "n", "ci", "low_n"}


SPACE = """
serve: {model: m}
search:
  objective: {maximize: output_tps, slo: {e2e_p99: 9s}}
  params: {max-num-seqs: [8, 16]}
load:
  rate: [20, 40]
  seconds: 0.5
  mix:
    - {name: chat, share: 1, prompt: {tokens: 32}, output: {tokens: 4}, slo: {ttft_p99: 9s}}
    - {name: code, share: 1, prompt: {tokens: 48}, output: {tokens: 6}}
"""


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
    client = doc["client"]
    assert {"cpu_us_per_event", "send_lag_ms", "stamp_source", "overhead_ms", "valid", "reasons"} <= set(client)
    assert client["tokens"] == client["server_tokens"] >= 30 * 8
    assert client["overhead_ms"] is not None
    assert doc["ttft_ms"]["low_n"] == ["p90", "p95", "p99"]
    low, high = doc["ttft_ms"]["ci"]["p50"]
    assert low <= doc["ttft_ms"]["p50"] <= high
    assert doc["server"]["generation_tokens"] > 0
    assert doc["intervals"]["slo_attainment_frac"][0] == 0
    assert not {"ttft_sched_ms", "arrivals", "kinds", "ttfot_ms"} & set(doc)


def test_an_open_loop_also_counts_from_the_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_vllm(tmp_path) as url:
        assert bench("--base-url", url, *QUICK[:-2], "--rate", "40", "--seconds", "0.5", "--json") == 0
    doc = json.loads(capsys.readouterr().out)
    assert set(doc["ttft_sched_ms"]) == DIST
    assert doc["ttft_sched_ms"]["mean"] >= doc["ttft_ms"]["mean"]
    assert "goodput_rps" not in doc
    assert doc["arrivals"]["asked_rps"] == doc["rate_rps"] == 40
    assert doc["stable"] is None  # too short to tell


def test_a_search_space_says_what_is_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space = tmp_path / "space.yaml"
    space.write_text(SPACE)
    quick = ["--model", "m", "--max-warmup", "0.4", "--space", str(space)]
    with fake_vllm(tmp_path) as url:
        assert bench("--base-url", url, *quick, "--slo", "ttft_p90=9s", "--json") == 0
        docs = json.loads(capsys.readouterr().out)["results"]
        for args, words in (
            (["--rate", "3", "--input-tokens", "9"], "leave out --rate, --input-tokens"),
            (["--slo", "chat.ttft_p99=1s"], "unknown latency"),
        ):
            with pytest.raises(ConfigError, match=words):
                bench("--base-url", url, *quick, *args)
        space.write_text(SPACE.replace("[20, 40]", "max").replace("output_tps", "goodput_rps"))
        with pytest.raises(ConfigError, match="rate: max is searched for by a sweep"):
            bench("--base-url", url, *quick)
    assert [doc["level"] for doc in docs] == ["r=20", "r=40"]
    assert set(docs[0]["slo"]) == {"attainment_frac", "ttft_p90", "e2e_p99", "chat.ttft_p99"}
    assert docs[0]["slo"]["chat.ttft_p99"]["met"]
    assert docs[0]["kinds"]["chat"]["ttft_ms"]["n"] + docs[0]["kinds"]["code"]["completed"] == docs[0]["completed"]
    assert table(docs).splitlines()[0].split() == [url, "r=20", url, "r=40"]


def test_every_argument_of_the_load_reaches_it(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = "--rate 7 --arrivals gamma --burstiness 0.5 --requests 9 --input-tokens 99 --output-tokens 3"
    more = "--shared-prefix 32 --prefix-groups 4 --processes 2 --endpoint chat --seed 5 --max-warmup 2"
    args = parser.parse_args(["--base-url", "u", "--model", "m", *words.split(), *more.split()])
    task = read_task(args)
    load = task.load
    assert (load.rate, load.arrivals, load.burstiness, load.requests, load.endpoint) == (7, "gamma", 0.5, 9, "chat")
    assert load.prompt is not None
    assert load.output is not None
    assert (load.prompt.tokens, load.prompt.shared_prefix, load.prompt.groups, load.output.tokens) == (99, 32, 4, 3)
    assert (load.processes, task.seed, task.warmup.max_s, task.warmup.min_s) == (2, 5, 2, 2)


def test_figures_stand_in_the_table_with_their_doubts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_vllm(tmp_path) as url:
        assert bench("--base-url", url, *QUICK, "--requests", "40") == 0
    out = capsys.readouterr().out
    assert re.search(r"TTFT p50 +[0-9.]+ ms \[[0-9.]+, [0-9.]+\]\n", out)
    assert re.search(r"TTFT p99 +[0-9.]+ ms, low n\n", out)
    assert re.search(r"TTFT, client - server +-?[0-9.]+ ms", out)
    assert "low n: too few requests" in out


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


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("foo", "expected an address such as"),
        ("http://h/?x=1", "expected an address such as"),
        ("http://me:hunter2@h", "leave user and password out"),
        ("ftp://me:hunter2@h/?x=1", "leave user and password out"),
    ],
)
def test_an_address_that_is_none_is_refused(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        bench("--base-url", url, *QUICK)
    assert "hunter2" not in str(caught.value)


def test_an_invalid_level_is_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_vllm(tmp_path, FAKE_VLLM_FAULT="http_500_every=3") as url:
        assert bench("--base-url", url, *QUICK, "--requests", "30", "--slo", "ttft_p99=10s") == 0
    shown = capsys.readouterr().out
    assert "INVALID" in shown
    assert "mean time in the queue" in shown
    assert re.search(r"SLO TTFT p99 +missed", shown)
