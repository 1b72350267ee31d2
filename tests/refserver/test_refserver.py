"""The reference server against a bare socket: what it says it did is what arrives."""

import http.client
import itertools
import json
import statistics
import time
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.refserver.rawclient import Answer, connect, exchange, request
from tests.refserver.running import RefServer, ref_server
from tests.refserver.scenarios import SCENARIOS

TTFT_S, ITL_S = 0.01, 0.005


@pytest.fixture(scope="module")
def server() -> Iterator[RefServer]:
    with ref_server("--ttft", str(TTFT_S), "--itl", str(ITL_S)) as running:
        yield running


def ask(url: str, endpoint: str, tokens: int, *headers: str, timeout_s: float = 10, **fields: object) -> Answer:
    with connect(url, timeout_s) as sock:
        return exchange(sock, request(url, endpoint, tokens, *headers, **fields))


def last(server: RefServer) -> Mapping[str, Any]:
    entry: Mapping[str, Any] = server.truth()["requests"][-1]
    return entry


def token_stamps(answer: Answer) -> list[int]:
    """Return when each event with token ids was whole; of streams whose events come in one read each."""
    return [at for at, data in answer.reads if b'"token_ids":[' in data]


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_its_stamps_are_those_of_the_kernel(server: RefServer, endpoint: str) -> None:
    with connect(server.url) as sock:
        answers = [exchange(sock, request(server.url, endpoint, 12)) for _ in range(5)]
        told = server.truth()["requests"][-5:]
    for answer, entry in zip(answers, told, strict=True):
        stamps, writes = token_stamps(answer), [at for at, _ in entry["writes"]]
        assert len(stamps) == len(writes) == 12
        assert answer.sent_ns <= entry["recv_ns"] < answer.sent_ns + 5e6
        delays_us = [(seen - written) / 1e3 for seen, written in zip(stamps, writes, strict=True)]
        assert min(delays_us) > -50  # the two processes find the distance of the clocks each by itself
        assert statistics.median(delays_us) < 200


def test_the_schedule_is_kept(server: RefServer) -> None:
    ask(server.url, "completions", 20)
    entry = last(server)
    due = [entry["recv_ns"] + round(1e9 * (TTFT_S + i * ITL_S)) for i in range(20)]
    assert entry["scheduled_ns"] == due
    late_ms = [(at - planned) / 1e6 for (at, _), planned in zip(entry["writes"], due, strict=True)]
    assert min(late_ms) >= 0
    assert statistics.median(late_ms) < 1
    assert entry["ended"] == "done"


def test_a_burst_writes_all_streams_at_the_same_steps() -> None:
    options = ("--ttft", "0.02", "--itl", "0.01", "--mode", "burst", "--step", "0.02", "--tokens-per-chunk", "2")
    with ref_server(*options) as server:
        socks = [connect(server.url) for _ in range(4)]
        for sock in socks:
            sock.sendall(request(server.url, "completions", 6))
            time.sleep(0.002)
        for sock in socks:
            exchange(sock, b"")
            sock.close()
        entries = server.truth()["requests"]
    scheduled = [entry["scheduled_ns"] for entry in entries]
    assert all(due % 20_000_000 == 0 for dues in scheduled for due in dues)
    assert all([count for _, count in entry["writes"]] == [2, 2, 2] for entry in entries)
    # Requests that came within 8 ms share all their steps but, at most, one at each end.
    assert len({due for dues in scheduled for due in dues}) <= 4


def decoded(url: str, endpoint: str, name: str) -> tuple[http.client.HTTPResponse, bytes]:
    """Let Python's own HTTP client take an answer apart."""
    sock = connect(url)
    sock.sendall(request(url, endpoint, 5, f"X-Scenario: {name}"))
    response = http.client.HTTPResponse(sock)
    response.begin()
    with response, sock:
        return response, response.read()


WHOLE = [
    name
    for name, found in SCENARIOS.items()
    if found.http == 200 and not found.json_body and found.stop in {"", "error", "event_error", "no_done"}
    if found.head not in {"never", "hang_after"} and not found.refuse
]


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_every_whole_answer_is_right_http_and_right_json(server: RefServer, endpoint: str) -> None:
    for name in WHOLE:
        response, body = decoded(server.url, endpoint, name)
        assert response.getheader("content-type") == "text/event-stream; charset=utf-8", name
        lines = body.decode().replace("\r\n", "\n").split("\n\n")
        assert lines.pop() == ""
        data = [line.split("data: ", 1)[1] for line in lines if not line.startswith(":")]
        assert (data[-1] == "[DONE]") == (name != "no_done"), name
        documents = [json.loads(text) for text in data if text != "[DONE]"]
        choices = [choice for document in documents for choice in document.get("choices", [])]
        ids = sum(len(choice.get("token_ids") or ()) for choice in choices)
        entry = last(server)
        assert entry["scenario"] == name
        assert entry["tokens"] == (ids or entry["tokens"]), name
        usage = [document["usage"]["completion_tokens"] for document in documents if document.get("usage")]
        if SCENARIOS[name].usage == "asked" and not SCENARIOS[name].stop:
            assert usage[-1] == entry["tokens"], name


@pytest.mark.parametrize("code", [400, 429, 500, 503])
def test_refusals_have_a_body(server: RefServer, code: int) -> None:
    response, body = decoded(server.url, "completions", f"http_{code}")
    assert response.status == code
    assert json.loads(body)["error"]["code"] == code
    assert last(server)["expected"] == f"http_{code}"


def test_a_split_event_arrives_in_two_reads(server: RefServer) -> None:
    offset = ask(server.url, "completions", 3).data.index(b'"text":" w1001"')
    apart = 0
    for _ in range(5):
        answer = ask(server.url, "completions", 3, f"X-Split: {offset}")
        ends = list(itertools.accumulate(len(data) for _, data in answer.reads))
        apart += offset in ends[:-1]
        if offset in ends[:-1]:
            early, late = answer.reads[ends.index(offset)], answer.reads[ends.index(offset) + 1]
            assert 1e6 < late[0] - early[0] < 50e6
        assert [count for _, count in last(server)["writes"]] == [1, 1, 1]
    assert apart >= 2  # a client that is late finds both parts in one read


@pytest.mark.parametrize("name", ["cut:1", "cut_mid_event:1", "reset:1", "until_close", "connection_close"])
def test_connections_are_closed_where_the_scenario_says(server: RefServer, name: str) -> None:
    with connect(server.url) as sock:
        answer = exchange(sock, request(server.url, "chat", 3, f"X-Scenario: {name}"), until=b"never")
    assert answer.closed
    assert answer.data.count(b'"token_ids":[') == last(server)["tokens"] == (1 if ":" in name else 3)


@pytest.mark.parametrize(("name", "tokens"), [("hang", 0), ("hang_after_head", 0), ("hang_mid:2", 2)])
def test_a_hang_says_no_more(server: RefServer, name: str, tokens: int) -> None:
    answer = ask(server.url, "completions", 5, f"X-Scenario: {name}", timeout_s=0.1)
    assert not answer.closed
    assert answer.data.count(b'"token_ids":[') == last(server)["tokens"] == tokens
    assert bool(answer.data) == (name != "hang")


def test_nothing_is_written_in_a_freeze(server: RefServer) -> None:
    with connect(server.url) as sock:
        sock.sendall(request(server.url, "completions", 40))
        time.sleep(0.05)
        frozen_ns = time.perf_counter_ns()
        server.freeze(0.2)
        stamps = token_stamps(exchange(sock, b""))
    gaps = [b - a for a, b in itertools.pairwise(stamps)]
    assert max(gaps) == pytest.approx(2e8, rel=0.1)
    assert stamps[gaps.index(max(gaps))] < frozen_ns + 2e7


def test_the_model_s_name_can_name_a_scenario_and_a_wrong_one_is_refused(server: RefServer) -> None:
    ask(server.url, "completions", 5, model="m?scenario=cut:3&split=50")
    assert (last(server)["scenario"], last(server)["tokens"]) == ("cut:3", 3)
    wrong = ask(server.url, "completions", 5, model="other", timeout_s=0.2)
    assert wrong.data.startswith(b"HTTP/1.1 404")


def test_what_the_command_line_decides() -> None:
    options = ("--natural-ends", "--keep-alive", "0.1", "--scenario", "http_503", "--every", "3", "--ttft", "0.001")
    with ref_server(*options, "--itl", "0.001") as server:
        for fields in ({"ignore_eos": True}, {"ignore_eos": False}, {}, {"ignore_eos": False, "min_tokens": 50}):
            ask(server.url, "completions", 50, timeout_s=0.3, **fields)
        exact, free, refused, least = server.truth()["requests"]
        with connect(server.url) as sock:
            exchange(sock, request(server.url, "completions", 1))
            started = time.perf_counter()
            assert sock.recv(1) == b""
            assert 0.05 < time.perf_counter() - started < 1
    assert (exact["tokens"], least["tokens"]) == (50, 50)
    assert 0 < free["tokens"] < 50
    assert refused["expected"] == "http_503"


def test_metrics_and_truth_are_counted(server: RefServer) -> None:
    def generated() -> float:
        with urllib.request.urlopen(f"{server.url}/metrics") as response:
            text = response.read().decode()
        assert 'vllm:cache_config_info{block_size="16"' in text
        return float(text.split("\nvllm:generation_tokens_total{")[1].split("} ")[1].split("\n")[0])

    before = generated()
    server.reset()
    ask(server.url, "completions", 7, "X-Request-Id: mine")
    assert generated() - before == 7
    (entry,) = server.truth()["requests"]
    assert (entry["x_request_id"], entry["tokens"], entry["prompt_tokens"]) == ("mine", 7, 2)
