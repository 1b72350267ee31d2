"""The client against a running server; what it says must agree with what the server was told to do."""

import asyncio
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from sweep.errors import ConfigError
from sweep.load.attempt import discreet
from sweep.load.client import Target, Warmup, complete_once, probe, run_level, served_models, tokens_per_word
from sweep.load.plan import Plan
from sweep.load.prompts import Prompt, PromptSource
from sweep.load.stamps import StampClock, StampedSocket, allow_open_files
from sweep.load.workload import LoadSection
from sweep.model import LoadRun
from tests.fakes.running import fake_vllm, free_port

BASE = {"prompt": {"tokens": 32}, "output": {"tokens": 8}, "concurrency": 4, "requests": 12}
SHORT = Warmup(0.1, 0.3, lambda _bins: False)


def drive(url: str, warmup: Warmup = SHORT, *, vllm: bool = True, processes: int = 1, **load_fields: object) -> LoadRun:
    load = LoadSection.model_validate(BASE | load_fields)
    prompts = PromptSource(Plan(load, 2), 1, text=load.endpoint == "chat" or not vllm)
    target = Target(url, "m", endpoint=load.endpoint, vllm=vllm)
    level = load.levels()[0]
    return asyncio.run(run_level(target, level, load, prompts=prompts, warmup=warmup, processes=processes))


def statuses(run: LoadRun, *, counted: bool = True) -> Counter[str]:
    return Counter(record.status for record in run.records if record.counted == counted)


def test_readiness_is_a_real_completion(tmp_path: Path) -> None:
    with fake_vllm(tmp_path) as url:
        target = Target(url, "m")
        assert asyncio.run(served_models(target)) == ["m"]
        record = asyncio.run(complete_once(target, [1000, 1001], 3))
        chat = asyncio.run(complete_once(Target(url, "m", endpoint="chat"), "good morning", 3))
        wrong = asyncio.run(complete_once(Target(url, "other"), [1000], 3))
    assert (record.status, record.output_tokens, record.prompt_tokens, record.token_count) == ("ok", 3, 2, "exact")
    assert record.t_start_ns <= record.t_send_ns <= record.t_headers_ns <= record.chunks[0][0] <= record.t_end_ns
    assert (chat.status, chat.output_tokens) == ("ok", 3)
    assert wrong.status == "http_404"
    assert wrong.error == "The model `other` does not exist. Valid aliases: m."


def test_a_missing_key_is_recognised(tmp_path: Path) -> None:
    with fake_vllm(tmp_path, VLLM_API_KEY="secret") as url:
        record = asyncio.run(complete_once(Target(url, "m"), [1000], 1))
        with pytest.raises(ValueError, match="HTTP 401: Unauthorized"):
            asyncio.run(served_models(Target(url, "m")))
        assert asyncio.run(served_models(Target(url, "m", "secret"))) == ["m"]
    assert (record.status, record.error) == ("http_401", "Unauthorized")


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_closed_loop_counts_exactly_what_was_asked_for(tmp_path: Path, processes: int) -> None:
    with fake_vllm(tmp_path) as url:
        run = drive(url, processes=processes)
    assert run.processes == processes
    assert statuses(run) == {"ok": 12}
    assert statuses(run, counted=False)["ok"] > 0
    assert run.start_ns < run.window_start_ns < run.window_end_ns <= run.end_ns
    assert run.stamp_source == "kernel"
    for record in run.records:
        assert record.request_id.startswith("warmup-") != record.counted
        if record.counted:
            assert record.t_start_ns >= run.window_start_ns
            assert (record.output_tokens, record.prompt_tokens) == (8, 32)
    # The load was kept up: until the window's end there were always four requests under way. Then it was drained.
    ended = [r for r in run.records if r.t_end_ns >= run.window_end_ns > r.t_send_ns]
    assert 3 <= len(ended) <= 5
    assert run.drained
    assert set(statuses(run, counted=False)) == {"ok"}


def test_a_window_of_time_counts_what_starts_within_it(tmp_path: Path) -> None:
    with fake_vllm(tmp_path) as url:
        run = drive(url, requests=None, seconds=0.4)
    counted = [r for r in run.records if r.counted]
    assert {r.status for r in counted} == {"ok"}
    assert run.window_end_ns - run.window_start_ns == 400_000_000
    inside = [r for r in run.records if run.window_start_ns <= r.t_start_ns < run.window_end_ns]
    assert counted == inside


def test_the_window_opens_when_the_load_is_steady(tmp_path: Path) -> None:
    seen: list[int] = []

    def third_time(bins: Sequence[float]) -> bool:
        seen.append(len(bins))
        return len(seen) == 3

    with fake_vllm(tmp_path) as url:
        run = drive(url, Warmup(0.2, 30, third_time))
    assert run.steady
    assert len(seen) == 3
    assert statuses(run) == {"ok": 12}


def test_an_open_loop_keeps_its_schedule(tmp_path: Path) -> None:
    with fake_vllm(tmp_path, "--max-num-seqs", "1", "--max-num-batched-tokens", "512", FAKE_VLLM_SPEED="2") as url:
        run = drive(url, concurrency=None, rate=40, requests=15)
    due = [r.t_sched_ns for r in run.records]
    assert due == sorted(due)
    counted = [r for r in run.records if r.counted]
    assert len(counted) == 15
    assert all(r.t_sched_ns >= run.window_start_ns for r in counted)
    # The server takes one request at a time, about 50 ms each; arrivals go on all the same, and their waits show.
    assert max(r.chunks[0][0] - r.t_sched_ns for r in counted) > 4 * (run.window_end_ns - run.window_start_ns) / 15 / 2


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        ("http_500_every=3", "http_500"),
        ("http_503_every=3", "http_503"),
        ("inband_error_every=3", "inband_error"),
        ("cut_every=3", "truncated"),
    ],
)
def test_failures_are_told_apart_and_counted(tmp_path: Path, fault: str, status: str) -> None:
    with fake_vllm(tmp_path, FAKE_VLLM_FAULT=fault) as url:
        run = drive(url, requests=24)
    found = statuses(run)
    assert set(found) == {"ok", status}
    assert 4 <= found[status] <= 12
    assert all(r.error for r in run.records if r.status == status)


def test_a_server_that_dies_ends_the_load(tmp_path: Path) -> None:
    with fake_vllm(tmp_path, FAKE_VLLM_FAULT="engine_dead_after=30") as url:
        run = drive(url, requests=10_000)
    found = statuses(run) + statuses(run, counted=False)
    assert found["ok"] > 0
    assert found["inband_error"] > 0
    assert found["inband_error"] + found["http_500"] + found["connect"] >= 8
    assert run.ended_early == "failing"
    assert len(run.records) < 1000  # a server that refuses for a moment is given some seconds


def test_nobody_at_the_address_ends_the_load_at_once() -> None:
    run = drive(f"http://127.0.0.1:{free_port()}", Warmup(30, 60, lambda _bins: True))
    assert statuses(run, counted=False)["connect"] >= 8
    assert not run.steady
    assert (run.end_ns - run.start_ns) / 1e9 < 20


def test_streams_that_stall_are_found_by_the_client_alone(tmp_path: Path) -> None:
    with fake_vllm(tmp_path, FAKE_VLLM_FAULT="hang_stream_after=20") as url:
        run = drive(url, requests=10_000, stall_timeout_s=0.5, output={"tokens": 64})
    found = statuses(run) + statuses(run, counted=False)
    assert found["ok"] > 0
    assert found["timeout_stall"] + found["timeout_ttft"] > 0


def test_a_request_without_its_first_token_times_out(tmp_path: Path) -> None:
    with fake_vllm(tmp_path, FAKE_VLLM_FAULT="hang_stream_after=0") as url:
        run = drive(url, requests=2, request_timeout_s=0.3)
    assert statuses(run, counted=False)["timeout_ttft"] > 0


def test_a_server_that_is_not_vllm_is_asked_plainly(tmp_path: Path) -> None:
    with fake_vllm(tmp_path, FAKE_VLLM_FAULT="plain_openai") as url:
        target, record = asyncio.run(probe(Target(url, "m"), [1000], "good morning", 4))
        assert not target.vllm
        assert (record.status, record.token_count) == ("ok", "usage")
        run = drive(url, vllm=False, endpoint="chat")
    assert statuses(run) == {"ok": 12}
    assert {r.output_tokens for r in run.records if r.counted} == {6}  # it ends by itself


def test_cancelling_leaves_nothing_behind(tmp_path: Path) -> None:
    async def cancel(url: str) -> int:
        load = LoadSection.model_validate(BASE | {"requests": 10_000})
        run = run_level(
            Target(url, "m"),
            load.levels()[0],
            load,
            prompts=PromptSource(Plan(load, 2), 1),
            warmup=SHORT,
        )
        task = asyncio.create_task(run)
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return len(asyncio.all_tasks())

    with fake_vllm(tmp_path) as url:
        assert asyncio.run(cancel(url)) == 1


def test_a_busy_client_does_not_move_the_stamps() -> None:
    """A server writes one event every 20 ms and notes when; meanwhile the client's loop is blocked again and again."""
    written: list[int] = []
    body = b'data: {"choices":[{"index":0,"text":"a","token_ids":[1],"finish_reason":null}]}\n\n'
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.recv(65536)
            connection.sendall(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            for _ in range(15):
                time.sleep(0.02)
                written.append(time.perf_counter_ns())
                connection.sendall(f"{len(body):x}\r\n".encode() + body + b"\r\n")
            connection.sendall(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    async def ask() -> list[int]:
        async def hog() -> None:
            while True:
                time.sleep(0.015)
                await asyncio.sleep(0)

        task = asyncio.create_task(hog())
        record = await complete_once(Target(f"http://127.0.0.1:{listener.getsockname()[1]}", "m"), [1], 15)
        task.cancel()
        return [at for at, _ in record.chunks]

    thread = threading.Thread(target=serve)
    thread.start()
    with listener:
        received = asyncio.run(ask())
        thread.join()
    late_ms = sorted((at - sent) / 1e6 for at, sent in zip(received, written, strict=True))
    assert late_ms[7] < 2  # the median; a stamp taken by the blocked loop would be 7 ms late on average


def test_open_files_are_raised_or_refused() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        allow_open_files(400)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 528
        with pytest.raises(ConfigError, match="ulimit -Hn"):
            allow_open_files(10**9)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_send_stamp_does_not_depend_on_how_a_long_body_is_written() -> None:
    left, right = socket.socketpair()
    sender = StampedSocket(StampClock(), left.family, left.type, 0)
    for write in (lambda: sender.send(b"x"), lambda: sender.sendmsg([b"x", b"y"])):
        sender.sent_ns, sender._answered = 0, True
        with suppress(OSError):  # it is not connected; the stamp is of the attempt
            write()
        assert sender.sent_ns > 0
    for sock in (left, right, sender):
        sock.close()


def answering(reply: bytes) -> tuple[socket.socket, threading.Thread]:
    """Serve one connection: read a request, write the reply, close."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            for part in reply.split(b"|"):
                connection.sendall(part)
                time.sleep(0.05)
            connection.recv(1)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return listener, thread


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"index":0,"text":"a","token_ids":[1],"finish_reason":null}]}\n\n'


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        (HEAD + b"%x\r\n%s\r\n|zz\r\nhello\r\n" % (len(EVENT), EVENT), "truncated"),
        (HEAD + b"zz\r\nhello\r\n", "truncated"),
        (HEAD + b"%x\r\n%s\r\n" % (2 * 10**5, b"data: " + b"[" * (2 * 10**5 - 6)) + b"0\r\n\r\n", "truncated"),
    ],
)
def test_what_is_no_http_or_no_answer_ends_the_request(reply: bytes, status: str) -> None:
    listener, _ = answering(reply)
    with listener:
        target = Target(f"http://127.0.0.1:{listener.getsockname()[1]}", "m")
        record = asyncio.run(complete_once(target, [1], 1, timeout_s=10))
    assert record.status == status


def test_a_server_that_never_answers_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target = Target(f"http://127.0.0.1:{listener.getsockname()[1]}", "m")
        record = asyncio.run(complete_once(target, [1], 1, timeout_s=0.3))
    assert (record.status, record.error) == ("timeout_ttft", "no answer within 0.3 s")


def test_a_servers_words_carry_neither_the_prompt_nor_the_key() -> None:
    said = "bad input: my password is hunter2 and more; Authorization: Bearer sk-secret"
    prompt = Prompt("please note: my password is hunter2 and more", 8, exact=False)
    assert discreet(said, prompt, None) == "bad input [...]"
    chat = Prompt([{"role": "user", "content": "my password is hunter2"}], 8, exact=False)
    assert discreet(said, chat, None) == "bad input: [...]"
    assert discreet("the key sk-secret is wrong", Prompt([1, 2], 2, exact=True), "sk-secret") == "the key *** is wrong"
    assert discreet("too long: 9 tokens", prompt, None) == "too long: 9 tokens"


def test_a_rate_that_the_client_cannot_send_ends_the_load(tmp_path: Path) -> None:
    with fake_vllm(tmp_path) as url:
        begun = time.monotonic()
        run = drive(url, concurrency=None, rate=50_000, requests=None, seconds=30, output={"tokens": 1})
    assert run.ended_early == "behind"
    assert time.monotonic() - begun < 60
    assert not any("generator" in " ".join(child.cmdline()) for child in psutil.Process().children())


def test_a_server_that_fails_politely_is_not_hammered(tmp_path: Path) -> None:
    with fake_vllm(tmp_path, FAKE_VLLM_FAULT="inband_error_every=1") as url:
        run = drive(url, Warmup(30, 60, lambda _bins: True), requests=None, seconds=30)
    assert run.ended_early == "failing"
    assert len(run.records) < 4 * 12 * 10  # four slots, ten tries a second


def test_slots_that_a_stopped_client_lets_lie_idle_are_seen(tmp_path: Path) -> None:
    def disturb() -> None:
        me = psutil.Process()
        while not (found := [c for c in me.children() if "sweep.load.generator" in c.cmdline()]):
            time.sleep(0.01)
        with suppress(psutil.NoSuchProcess):
            while True:
                found[0].suspend()
                time.sleep(0.3)
                found[0].resume()
                time.sleep(0.1)

    with fake_vllm(tmp_path) as url:
        thread = threading.Thread(target=disturb)
        thread.start()
        run = drive(url, requests=None, seconds=2, output={"tokens": 1})
        thread.join()
    assert max(r.t_send_ns - r.t_start_ns for r in run.records) > 200_000_000


def test_made_up_text_has_the_length_that_was_asked_for(tmp_path: Path) -> None:
    with fake_vllm(tmp_path, FAKE_VLLM_TOKENS_PER_WORD="5") as url:
        target = Target(url, "m", endpoint="chat")
        per_word = asyncio.run(tokens_per_word(target))
        assert per_word == 5
        load = LoadSection.model_validate(BASE | {"endpoint": "chat", "prompt": {"tokens": 400, "shared_prefix": 200}})
        source = PromptSource(Plan(load, 2), 1, text=True, tokens_per_word=per_word)
        run = asyncio.run(run_level(target, load.levels()[0], load, prompts=source, warmup=SHORT))
    assert {r.prompt_tokens for r in run.records} == {404}  # the fake's chat template is four tokens
    with fake_vllm(tmp_path, FAKE_VLLM_FAULT="http_500_every=1") as url:
        assert asyncio.run(tokens_per_word(Target(url, "m", endpoint="chat"))) is None
