"""Every way in which an answer can come, at every place where it can be torn: the right class and the right tokens."""

import asyncio
from collections.abc import Iterator

import pytest

from sweep.load.client import Target, Warmup, run_level
from sweep.load.plan import Plan
from sweep.load.prompts import PromptSource
from sweep.load.workload import LoadSection
from sweep.model import RequestRecord
from tests.refserver.events import Asked
from tests.refserver.running import RefServer, ref_server
from tests.refserver.scenarios import SCENARIOS
from tests.refserver.script import script

pytestmark = pytest.mark.timeout(60)  # a client that waits for ever would hold up all other tests

TOKENS = 3
PROMPT_TOKENS = 4
HANGS = [name for name, found in SCENARIOS.items() if found.expected.startswith("timeout")]
STRIDE = 13  # of the offsets, in all scenarios but the ordinary one
Case = tuple[str, int]  # scenario, offset of the split


@pytest.fixture(scope="module")
def server() -> Iterator[RefServer]:
    with ref_server("--ttft", "0.002", "--itl", "0.001") as running:
        yield running


def drive(url: str, **fields: object) -> tuple[RequestRecord, ...]:
    """Return the records of one level; the server decides what the requests get."""
    load = LoadSection.model_validate(
        {"prompt": {"tokens": PROMPT_TOKENS}, "output": {"tokens": TOKENS}, "request_timeout_s": 20} | fields
    )
    prompts = PromptSource(Plan(load, 3), 2, text=load.endpoint == "chat")
    run = run_level(
        Target(url, "m", endpoint=load.endpoint),
        load.levels()[0],
        load,
        prompts=prompts,
        warmup=Warmup(0.1, 0.1, lambda _bins: True),
    )
    return asyncio.run(run).records


def length(name: str, endpoint: str) -> int:
    asked = Asked(
        chat=endpoint == "chat",
        prompt_tokens=PROMPT_TOKENS,
        tokens=TOKENS,
        finish_reason="length",
        exact=True,
        ids=True,
        usage=True,
        continuous=False,
    )
    return sum(len(write.data) for write in script(SCENARIOS[name], asked, "m", 2, 0).writes)


def cases(endpoint: str) -> list[Case]:
    """Return the ordinary answer torn at every byte, and the others, whole and torn at every few bytes."""
    found: list[Case] = [("normal", offset) for offset in range(length("normal", endpoint))]
    for number, name in enumerate(SCENARIOS):
        if name != "normal" and name not in HANGS:
            found += [(name, offset) for offset in (0, *range(number % STRIDE, length(name, endpoint), STRIDE))]
    # Neighbours are of different scenarios, so that connections that ended badly are followed by others.
    step = next(step for step in range(len(found) // 3, len(found)) if len(found) % step and _prime(step))
    return [found[i * step % len(found)] for i in range(len(found))]


def _prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, int(number**0.5) + 1))


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_every_answer_is_classified_and_counted_wherever_it_is_torn(server: RefServer, endpoint: str) -> None:
    wanted = cases(endpoint)
    server.reset()
    server.play(wanted)
    records = {r.request_id: r for r in drive(server.url, endpoint=endpoint, rate=600, requests=len(wanted))}
    told = server.truth()["requests"]
    assert [entry["scenario"] for entry in told[: len(wanted)]] == [name for name, _ in wanted]
    wrong = []
    for entry, case in zip(told, wanted, strict=False):
        record = records[entry["x_request_id"]]
        seen = (record.status, record.output_tokens, sum(count for _, count in record.chunks))
        if seen != (entry["expected"], entry["tokens"], entry["tokens"]):
            wrong.append((*case, seen, (entry["expected"], entry["tokens"]), record.error))
    assert not wrong, f"{len(wrong)} of {len(wanted)}: {wrong[:10]}"


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("name", HANGS)
def test_a_silence_is_a_time_out_of_its_own_class(server: RefServer, endpoint: str, name: str) -> None:
    server.play([(name, 0)] * 100)
    records = drive(server.url, endpoint=endpoint, concurrency=4, requests=4, request_timeout_s=0.2)
    server.play([])
    assert {r.status for r in records if r.counted} == {SCENARIOS[name].expected}
    assert {r.output_tokens for r in records if r.counted} == {2 if name == "hang_mid" else 0}


def test_connections_that_the_server_closed_while_idle_are_not_used() -> None:
    with ref_server("--ttft", "0.002", "--itl", "0.001", "--keep-alive", "0.03") as server:
        records = drive(server.url, rate=20, arrivals="constant", requests=40)
        accepted = {entry["accept_ns"] for entry in server.truth()["requests"]}
    assert {r.status for r in records} == {"ok"}
    assert len(accepted) >= 40  # every request needed a new one
