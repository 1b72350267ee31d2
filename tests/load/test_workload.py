from __future__ import annotations

import json
from datetime import date

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from sweep.load.workload import Level, LoadSection, Ramp

SHAPE = {"prompt": {"tokens": 64}, "output": {"tokens": 8}}
CHAT = {"name": "chat", "share": 7, "prompt": {"tokens": 100, "shared_prefix": 40, "groups": 3}}
TOOLS = {"name": "tools", "share": 3, "output": {"tokens": 5}, "slo": {"ttft_p99": "500ms"}, "request": {"seed": 1}}


def section(**load: object) -> LoadSection:
    return LoadSection.model_validate(SHAPE | load)


def test_levels_have_names_and_keep_their_order() -> None:
    assert section(concurrency=[64, 8]).levels() == (Level("c=64", 64), Level("c=8", 8))
    assert section(rate=0.5).levels() == (Level("r=0.5", rate_rps=0.5),)
    assert section(rate="max").levels() == (Level("r=max", search=True),)
    assert section(rate={"from": 2, "to": 20}, seconds=9).levels() == (Level("r=2..20", rate_rps=2, to_rps=20),)
    assert LoadSection(trace="t.jsonl").levels() == (Level("trace", trace=True),)


def test_a_level_lasts_a_minute_unless_told_otherwise() -> None:
    assert section(concurrency=1).window_s == 60
    assert section(concurrency=1, seconds=5).window_s == 5
    assert section(concurrency=1, requests=5).window_s is None
    assert LoadSection(trace="t.jsonl").window_s is None
    assert LoadSection(trace="t.jsonl", seconds=9).window_s == 9
    assert [section(concurrency=1).open_loop, section(rate=1).open_loop] == [False, True]


def test_classes_inherit_what_they_leave_out() -> None:
    load = section(rate=1, mix=[CHAT, TOOLS], request={"temperature": 0.5, "seed": 0}, adapters=["a", "b"])
    chat, tools = load.kinds
    assert (chat.share, tools.share) == (0.7, 0.3)
    assert (chat.prompt.tokens, tools.prompt.tokens) == (100, 64)
    assert (chat.output.tokens, tools.output.tokens) == (8, 5)
    assert (chat.request, tools.request) == ({"temperature": 0.5, "seed": 0}, {"temperature": 0.5, "seed": 1})
    assert chat.adapters == tools.adapters == ("a", "b")
    # Each pair of class and adapter has prefix groups of its own.
    assert (chat.groups_from, tools.groups_from) == (0, 6)
    assert load.slo == {"tools.ttft_p99": 0.5}
    assert section(rate=1).kinds[0].name is None


def test_the_longest_request_is_known_where_no_file_decides() -> None:
    assert section(rate=1).longest_tokens == 72
    assert section(rate=1, turns=3).longest_tokens == 3 * 64 + 3 * 8
    assert section(rate=1, turns=3, output={"tokens": 8, "natural": True}).longest_tokens == 3 * 64 + 8
    assert section(rate=1, turns=2, prompt={"tokens": 50, "shared_prefix": 40}).longest_tokens == 40 + 2 * 10 + 2 * 8
    spread = {"tokens": {"mean": 100, "std": 10}}
    assert section(rate=1, prompt=spread).longest_tokens == 148
    assert section(rate=1, prompt={"tokens": spread["tokens"] | {"max": 120}}).longest_tokens == 128
    assert section(rate=1, mix=[CHAT, TOOLS]).longest_tokens == 108
    assert section(rate=1, prompt={"file": "p.jsonl"}).longest_tokens is None


def test_the_load_in_words() -> None:
    plain = section(rate=1, prompt={"tokens": 1024, "shared_prefix": 512}, output={"tokens": 128})
    assert plain.words == "prompts of 1,024 tokens (512 shared), answers of 128 tokens"
    mixed = section(rate=1, mix=[CHAT, TOOLS], turns=2)
    assert mixed.words == (
        "70% chat: prompts of 100 tokens (40 shared), answers of 8 tokens, 2 turns;"
        " 30% tools: prompts of 64 tokens, answers of 5 tokens, 2 turns"
    )
    drawn = section(rate=1, prompt={"tokens": {"mean": 1000, "std": 300}}, output={"tokens": 9, "natural": True})
    assert drawn.words == "prompts of 1,000 ± 300 tokens, answers of at most 9 tokens"
    recorded = LoadSection.model_validate({"rate": 1, "prompt": {"file": "p.jsonl"}})
    assert recorded.words == "prompts of a file, answers as long as the file's"
    assert LoadSection(trace="t.jsonl", trace_speed=2).words == "the requests of a trace at 2 times its speed"
    assert [recorded.synthetic, mixed.synthetic] == [False, True]


@pytest.mark.parametrize(
    ("load", "words"),
    [
        ({}, "either concurrency"),
        ({"concurrency": 1, "rate": 1}, "either concurrency"),
        ({"concurrency": 0}, "0 is not above 0"),
        ({"concurrency": []}, "a number above 0"),
        ({"concurrency": True}, "a number above 0"),
        ({"concurrency": 1.5}, "valid integer"),
        ({"concurrency": [8, 8]}, "stands in the list twice"),
        ({"rate": "most"}, "'max'"),
        ({"rate": [1, -1]}, "-1.0 is not above 0"),
        ({"rate": [8, 2, 4]}, "rates must ascend: .*; write 2, 4, 8"),
        ({"rate": [1, 1]}, "stands in the list twice"),
        ({"rate": [1, 100_001]}, "above 100,000"),
        ({"concurrency": 100_001}, "above 100,000"),
        ({"concurrency": 10**400}, "above 100,000"),
        ({"rate": 10**400}, "number"),
        ({"rate": {"from": 1, "to": 1e300}, "seconds": 9}, "less than or equal to 100000"),
        ({"rate": 1, "turns": 2, "think_s": 1e300}, "less than or equal to 86400"),
        ({"rate": 1, "mix": [CHAT | {"turns": 2, "think_s": 1e300}]}, "less than or equal to 86400"),
        ({"rate": 1, "mix": [CHAT | {"share": 1e308}]}, "less than or equal to 1000000"),
        ({"rate": 1, "prompt": {"tokens": 10**8}}, "less than or equal to 10000000"),
        ({"rate": 1, "prompt": {"tokens": {"mean": 64, "std": 1e308, "max": 128}}}, "less than or equal to 10000000"),
        ({"rate": 1, "prompt": {"tokens": {"mean": 1e308, "std": 1e308}}}, "less than or equal to 10000000"),
        ({"rate": 1, "prompt": {"tokens": {"mean": 64, "std": 1, "max": 10**8}}}, "less than or equal to 10000000"),
        ({"rate": 1, "prompt": {"tokens": 64, "shared_prefix": 4, "groups": 10**400}}, "groups"),
        ({"rate": {"from": 1, "to": 2}}, "give seconds"),
        ({"rate": {"from": 1, "too": 2}, "seconds": 9}, "too"),
        ({"rate": {"from": 0, "to": 2}, "seconds": 9}, "greater than 0"),
        ({"concurrency": 1, "seconds": 1, "requests": 1}, "either seconds or requests"),
        ({"concurrency": 1, "prompt": {"tokens": 64, "shared_prefix": 64}}, "leaves 0 of 64 tokens"),
        ({"concurrency": 1, "prompt": {"tokens": 64, "groups": 2}}, "give shared_prefix"),
        ({"concurrency": 1, "prompt": {"tokens": 64, "file": "a"}}, "either tokens"),
        ({"concurrency": 1, "prompt": {"file": "a", "shared_prefix": 4}}, "shared_prefix goes with tokens"),
        ({"concurrency": 1, "prompt": {"tokens": 64, "format": "jsonl"}}, "format goes with file"),
        ({"concurrency": 1, "prompt": {"tokens": {"mean": 9, "std": 1, "min": 10}}}, "does not lie between"),
        (
            {"concurrency": 1, "prompt": {"tokens": {"mean": 9, "std": 1, "min": 5}, "shared_prefix": 6}},
            "set it to 7 or more",
        ),
        ({"concurrency": 1, "prompt": {"tokens": True}}, "valid integer"),
        ({"concurrency": 1, "output": {"natural": True}}, "output.tokens is missing"),
        ({"concurrency": 1, "prompt": None}, "prompt is missing"),
        ({"concurrency": 1, "turbo": 1}, "turbo"),
        ({"concurrency": 1, "arrivals": "constant"}, "arrivals is about a rate"),
        ({"concurrency": 1, "burstiness": 2}, "burstiness is about a rate"),
        ({"rate": 1, "burstiness": 2}, "give both"),
        ({"rate": 1, "arrivals": "gamma"}, "give both"),
        ({"rate": 1, "trace_speed": 2}, "trace_speed goes with trace"),
        ({"trace": "t"}, "prompt does not go with trace"),
        ({"trace": "t"}, r"output\.tokens does not go with trace"),
        ({"trace": "t", "prompt": None, "output": None, "turns": 2}, "turns"),
        ({"trace": "t", "prompt": None, "output": None, "request": {"stop": "x"}}, "natural: true"),
        ({"rate": 1, "think_s": 2}, "turns of 2 or more"),
        ({"rate": 1, "turns": 0}, "greater than or equal to 1"),
        ({"rate": 1, "mix": [CHAT, CHAT]}, "two classes are named 'chat'"),
        ({"rate": 1, "mix": [CHAT | {"share": 0}]}, "greater than 0"),
        ({"rate": 1, "mix": [CHAT | {"name": "Chat.1"}]}, "will name columns"),
        ({"rate": 1, "mix": [CHAT | {"slo": {"ttft": "1s"}}]}, "unknown latency"),
        ({"rate": 1, "mix": [CHAT | {"think_s": 1}]}, "mix: chat: think_s"),
        ({"rate": 1, "request": {"max_tokens": 3}}, "load.output.tokens"),
        ({"rate": 1, "request": {"truncate_prompt_tokens": 5}}, r"set by load\.prompt\.tokens"),
        ({"rate": 1, "request": {"prompt_embeds": "x"}}, r"set by load\.prompt"),
        ({"rate": 1, "request": {"stream_interval": 10}}, "belongs to the load client"),
        ({"rate": 1, "request": {"repetition_detection": {}}}, "set output.natural: true"),
        ({"rate": 1, "request": {"user": ["\ud800"]}}, "user has half of a character"),
        ({"rate": 1, "request": {"a": {"\ud800": 1}}}, "a has half of a character"),
        ({"rate": 1, "request": {"temperature": float("nan")}}, "temperature has a number that JSON does not know"),
        ({"rate": 1, "mix": [CHAT | {"request": {"a": [float("inf")]}}]}, "a has a number that JSON does not know"),
        ({"rate": 1, "request": {"since": date(2020, 1, 1)}}, "since has a value for which JSON has no form"),
        ({"rate": 1, "request": {"stream": False}}, "belongs to the load client"),
        ({"rate": 1, "mix": [CHAT | {"request": {"n": 2}}]}, "belongs to the load client"),
        ({"rate": 1, "request": {"chat_template_kwargs": {}}}, "set load.endpoint: chat"),
        ({"rate": 1, "request": {"response_format": {}}}, "set output.natural: true"),
        ({"rate": 1, "processes": 0}, "greater than or equal to 1"),
        ({"rate": 1, "processes": "many"}, "'auto'"),
    ],
)
def test_bad_loads_are_refused_with_a_reason(load: dict, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        section(**load)


def test_what_is_not_the_client_s_is_passed_on() -> None:
    body = {"temperature": 0.7, "logprobs": 3, "chat_template_kwargs": {"thinking": True}, "response_format": {}}
    load = section(rate=1, endpoint="chat", request=body, output={"tokens": 8, "natural": True})
    assert load.kinds[0].request == body


LOADS = st.one_of(
    st.fixed_dictionaries({"concurrency": st.lists(st.integers(1, 4096), min_size=1, max_size=5, unique=True)}),
    st.fixed_dictionaries({"rate": st.floats(0.01, 1e4), "arrivals": st.sampled_from(["poisson", "constant"])}),
    st.just({"rate": "max", "arrivals": "gamma", "burstiness": 0.5}),
    st.just({"rate": {"from": 1.0, "to": 2.0}, "seconds": 5.0, "processes": 2}),
    st.just({"rate": [1, 2], "mix": [CHAT, TOOLS], "turns": 2, "think_s": 1.5, "adapters": ["a"]}),
    st.just({"rate": 1, "prompt": {"tokens": {"mean": 90.0, "std": 9, "distribution": "lognormal"}}}),
)


@given(load=LOADS)
def test_a_section_survives_json(load: dict) -> None:
    before = section(**load)
    assert LoadSection.model_validate(json.loads(json.dumps(before.model_dump(mode="json")))) == before
    assert isinstance(before.rate, Ramp) == isinstance(load.get("rate"), dict)
