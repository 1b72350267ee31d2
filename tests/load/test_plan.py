"""A plan is a pure function of its load and its seed, and its numbers are those that were asked for."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from sweep.errors import ConfigError
from sweep.load.lengths import Lengths
from sweep.load.plan import Ask, Plan
from sweep.load.workload import LoadSection

SHAPE = {"prompt": {"tokens": 64}, "output": {"tokens": 8}}
RICH = {
    "rate": 4,
    "turns": 2,
    "think_s": 1.5,
    "prompt": {"tokens": {"mean": 100, "std": 40}, "shared_prefix": 16, "groups": 3},
    "output": {"tokens": {"mean": 20, "std": 30, "distribution": "lognormal"}},
    "adapters": ["a", "b"],
    "mix": [{"name": "chat", "share": 3}, {"name": "one", "share": 1, "turns": 1, "think_s": 0, "adapters": []}],
}


def plan(seed: int = 0, **load: object) -> Plan:
    return Plan(LoadSection.model_validate(SHAPE | load), seed)


def asks(plan: Plan, count: int, *, warmup: bool = False) -> list[Ask]:
    found = [ask for n in range(count) for ask in plan.conversation(n, warmup=warmup) or ()]
    assert len(found) >= count
    return found


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@settings(max_examples=20)
@given(numbers=st.lists(st.integers(0, 5000), min_size=1, max_size=8), seed=st.integers(0, 9), warmup=st.booleans())
def test_random_access_gives_what_going_through_gives(numbers: list[int], seed: int, warmup: bool) -> None:
    whole, one = plan(seed, **RICH), plan(seed, **RICH)
    in_order = {n: whole.conversation(n, warmup=warmup) for n in range(max(numbers) + 1)}
    for n in numbers:
        assert one.conversation(n, warmup=warmup) == in_order[n]
        one.conversation(n, warmup=not warmup)


def test_the_streams_and_the_seeds_differ() -> None:
    first = asks(plan(**RICH), 200)
    assert first != asks(plan(**RICH), 200, warmup=True)
    assert first != asks(plan(1, **RICH), 200)
    warm = asks(plan(**RICH), 200, warmup=True)
    assert {ask.group for ask in first} == {ask.group for ask in warm}


def test_conversations_have_turns_pauses_and_a_prefix_that_comes_once() -> None:
    for ask in asks(plan(**RICH), 300):
        assert (ask.think_s > 0) == (ask.turn > 0)
        assert (ask.group is not None) == (ask.turn == 0) == (ask.prefix_tokens == 16)
        assert ask.new_tokens > ask.prefix_tokens
        assert ask.adapter == (None if ask.kind == "one" else "ab"[ask.conversation % 2])
        assert ask.history_tokens == 0
        if ask.group is not None:  # what an adapter has computed, the other cannot use
            adapter, kind = ask.group % 2, "chat" if ask.group < 6 else "one"
            assert kind == ask.kind
            assert ask.group < 9
            assert ask.kind == "one" or adapter == ask.conversation % 2


def test_shares_groups_and_turns_are_those_that_were_asked_for() -> None:
    found = asks(plan(**RICH), 8000)
    first = [ask for ask in found if ask.turn == 0]
    assert np.mean([ask.kind == "chat" for ask in first]) == pytest.approx(0.75, abs=0.02)
    counts = np.bincount([ask.group for ask in first if ask.group is not None])
    assert counts.sum() == len(first) == 8000
    assert counts[:6] == pytest.approx([1000] * 6, rel=0.12)
    assert counts[6:] == pytest.approx([667] * 3, rel=0.15)
    assert len(found) == 8000 + sum(ask.kind == "chat" for ask in first)


@settings(max_examples=40)
@given(
    mean=st.floats(20, 5000),
    spread=st.floats(0, 0.6),
    distribution=st.sampled_from(["normal", "lognormal"]),
)
def test_lengths_keep_their_mean_and_their_bounds(mean: float, spread: float, distribution: str) -> None:
    shape = {"mean": mean, "std": spread * mean, "distribution": distribution}
    found = [ask.new_tokens for ask in asks(plan(rate=1, prompt={"tokens": shape}), 3000)]
    lengths = Lengths.model_validate(shape)
    assert all(lengths.min <= length <= lengths.longest for length in found)
    # The tail that is cut off takes less than a twentieth, and the mean of 3,000 varies by std / 55.
    assert np.mean(found) == pytest.approx(mean, rel=0.05 + 4 * spread / 55)
    assert np.std(found) == pytest.approx(spread * mean, rel=0.25, abs=1)


def test_lengths_between_explicit_bounds() -> None:
    tokens = {"mean": 100, "std": 80, "min": 60, "max": 130}
    found = {ask.output_tokens for ask in asks(plan(rate=1, output={"tokens": tokens, "natural": True}), 2000)}
    assert (min(found), max(found)) == (60, 130)
    assert plan(rate=1, output={"tokens": tokens, "natural": True}).conversation(0, warmup=False)[0].natural


def test_a_rate_counts_requests_not_conversations() -> None:
    one, three = plan(rate=6), plan(rate=6, turns=3)
    level = one.load.levels()[0]
    once = list(islice(one.offsets_s(level, warmup=False), 100))
    assert list(islice(three.offsets_s(level, warmup=False), 100)) == pytest.approx([3 * at_s for at_s in once])
    assert list(islice(one.offsets_s(level, warmup=True), 100)) != once
    found = replace(level, rate_rps=12.0)
    assert list(islice(one.offsets_s(found, warmup=False), 100)) == pytest.approx([at_s / 2 for at_s in once])


def test_a_ramp_warms_up_at_the_rate_at_which_it_begins() -> None:
    ramp = plan(rate={"from": 5, "to": 50}, seconds=20, arrivals="constant")
    level = ramp.load.levels()[0]
    times = np.array(list(islice(ramp.offsets_s(level, warmup=False), 2000)))
    assert [((times >= at) & (times < at + 1)).sum() for at in (0, 10, 19, 25)] == pytest.approx([6, 28, 49, 50], abs=1)
    assert list(islice(ramp.offsets_s(level, warmup=True), 3)) == pytest.approx([0.1, 0.3, 0.5])


# --- files


def test_rows_come_in_an_order_of_the_seed_and_again_with_a_salt(tmp_path: Path) -> None:
    rows = [{"prompt": f"prompt {i}", "output_tokens": i + 1} for i in range(50)]
    load = {"rate": 1, "prompt": {"file": write(tmp_path / "p.jsonl", rows)}, "output": None}
    found = asks(plan(**load), 120)
    assert sorted(ask.row for ask in found[:50]) == sorted(ask.row for ask in found[50:100]) == list(range(50))
    assert [ask.row for ask in found[:50]] == [ask.row for ask in found[50:100]] != list(range(50))
    assert [ask.salt for ask in found] == [""] * 50 + ["1"] * 50 + ["2"] * 20
    assert all(ask.output_tokens == ask.row + 1 for ask in found)
    warm = asks(plan(**load), 60, warmup=True)
    assert warm[0].row == found[49].row
    assert {ask.salt for ask in warm} == {"w0", "w1"}
    assert [ask.row for ask in asks(plan(1, **load), 50)] != [ask.row for ask in found[:50]]
    assert {ask.output_tokens for ask in asks(plan(**load | {"output": {"tokens": 9}}), 50)} == {9}


def test_conversations_of_a_file_are_as_long_as_they_are(tmp_path: Path) -> None:
    said = [{"from": role, "value": f"{role} {i}"} for i in range(3) for role in ("human", "gpt")]
    path = tmp_path / "s.json"
    path.write_text(json.dumps([{"conversations": said[:2]}, {"conversations": said}, {"conversations": []}]))
    talks = plan(rate=1, turns=5, prompt={"file": str(path)}, output=None)
    assert sorted(len(talks.conversation(n, warmup=False)) for n in range(2)) == [1, 3]
    assert "1 conversations are left out" in talks.notes()[0]
    level = talks.load.levels()[0]
    once = list(islice(plan(rate=1).offsets_s(level, warmup=False), 50))
    assert list(islice(talks.offsets_s(level, warmup=False), 50)) == pytest.approx([2 * at_s for at_s in once])


def test_a_trace_is_sent_in_its_order(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000 * i, "input_length": 600 + i, "output_length": i + 1, "hash_ids": [1, 100 + i]}
        for i in range(11)
    ]
    load = LoadSection.model_validate({"trace": write(tmp_path / "t.jsonl", rows), "trace_speed": 2})
    whole = Plan(load, 0)
    found = asks(whole, 11)
    assert [ask.row for ask in found] == list(range(11))
    assert [ask.history_tokens + ask.new_tokens for ask in found] == [600 + i for i in range(11)]
    assert [ask.history_tokens for ask in found] == [0] + [512] * 10
    again = whole.conversation(11, warmup=False)[0]  # after its end it begins again, apart from the first time
    assert (again.row, again.salt, whole.length) == (0, "1", 11)
    level = load.levels()[0]
    assert list(islice(whole.offsets_s(level, warmup=False), 13)) == pytest.approx([i / 2 for i in range(13)])
    warm = list(islice(whole.offsets_s(level, warmup=True), 5000))
    assert 5000 / warm[-1] == pytest.approx(2.2, rel=0.05)
    assert whole.conversation(5000, warmup=True)[0].row == 5000 % 11
    assert whole.too_long(605) == [f"{load.trace}:{line}" for line in range(4, 12)]
    assert whole.synthetic
    assert not any(ask.natural for ask in found)
    free = LoadSection.model_validate({"trace": load.trace, "output": {"natural": True}})
    assert all(ask.natural for ask in asks(Plan(free, 0), 11))


def test_rows_that_are_sure_to_be_too_long_are_named(tmp_path: Path) -> None:
    said = [{"prompt": "a b c " * 99, "output_tokens": 10}, {"prompt": "a", "output_tokens": 100}]
    file = {"file": write(tmp_path / "p.jsonl", said)}
    assert plan(rate=1, prompt=file, output=None).too_long(100) == [
        f"{file['file']}:2"
    ]  # a prompt has a token at least
    assert plan(rate=1, prompt=file, output=None).too_long(101) == []
    assert len(plan(rate=1, prompt=file).too_long(1)) == 2
    # A row is one row, in however many classes.
    mix = [{"name": name, "share": 1, "prompt": file, "output": {}} for name in ("a", "b")]
    assert plan(rate=1, mix=mix).too_long(100) == [f"{file['file']}:2"]


def test_later_turns_may_be_too_long(tmp_path: Path) -> None:
    said = [("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d" * 400)]
    talk = {"conversations": [{"from": who, "value": value} for who, value in said]}
    path = tmp_path / "s.json"
    path.write_text(json.dumps([talk]))
    whole = plan(rate=1, prompt={"file": str(path)}, output=None, turns=2)
    assert (whole.too_long(100), whole.too_long(101)) == ([f"{path}, entry 1"], [])


def test_prompts_that_the_endpoint_does_not_take_are_refused(tmp_path: Path) -> None:
    ids = write(tmp_path / "ids.jsonl", [{"prompt": [5, 6], "output_tokens": 2}])
    said = write(tmp_path / "m.jsonl", [{"messages": [{"role": "user", "content": "hi"}], "output_tokens": 2}])
    with pytest.raises(ConfigError, match=r"token ids; set load\.endpoint: completions"):
        plan(rate=1, prompt={"file": ids}, output=None, endpoint="chat")
    with pytest.raises(ConfigError, match=r"messages; set load\.endpoint: chat"):
        plan(rate=1, prompt={"file": said}, output=None)
    assert not plan(rate=1, prompt={"file": said}, output=None, endpoint="chat").synthetic


# --- the digest

CODE = """
import json, sys
from sweep.load.plan import Plan
from sweep.load.workload import LoadSection
print(Plan(LoadSection.model_validate(json.load(sys.stdin)), 3).sha256())
"""


def test_the_digest_is_the_same_in_another_process() -> None:
    found = subprocess.run(
        [sys.executable, "-c", CODE], input=json.dumps(RICH), capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == plan(3, **RICH).sha256()


def test_the_digest_knows_what_is_sent_and_only_that(tmp_path: Path) -> None:
    base = plan(**RICH).sha256()
    same = [plan(**RICH, processes=4), plan(**RICH, stall_timeout_s=9), pickle.loads(pickle.dumps(plan(**RICH)))]
    other = [plan(1, **RICH), plan(**RICH | {"rate": 5}), plan(**RICH, arrivals="constant"), plan(**RICH, requests=9)]
    assert {each.sha256() for each in same} == {base}
    assert len({base, *(each.sha256() for each in other)}) == 5
    rows = [{"prompt": "a", "output_tokens": 2}, {"prompt": "b", "output_tokens": 2}]
    here, there = write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", rows)
    load = {"rate": 1, "output": None}
    digests = [plan(**load, prompt={"file": path}).sha256() for path in (here, there)]
    write(tmp_path / "b.jsonl", [rows[0], rows[1] | {"prompt": "c"}])
    digests.append(plan(**load, prompt={"file": there}).sha256())
    assert digests[0] == digests[1] != digests[2]
