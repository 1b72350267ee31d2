"""Contents: exact where ids are sent, shared where prefixes are, and fresh for every seed."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from sweep.load.plan import Plan
from sweep.load.prompts import Answer, Prompt, PromptSource, id_range
from sweep.load.workload import LoadSection


def source(seed: int = 1, vocab: int | None = None, *, text: bool = False, **load: object) -> PromptSource:
    section = LoadSection.model_validate({"rate": 1, "output": {"tokens": 8}} | load)
    return PromptSource(Plan(section, 2), seed, vocab, text=text)


def make(prompts: PromptSource, n: int, *, warmup: bool = False) -> Prompt:
    return prompts.make(prompts.plan.conversation(n, warmup=warmup)[0], warmup=warmup)


@given(
    tokens=st.integers(2, 300),
    data=st.data(),
    groups=st.integers(1, 4),
    vocab=st.one_of(st.none(), st.integers(8, 200_000)),
)
def test_prompts_have_their_exact_length_and_ordinary_ids(
    tokens: int, data: st.DataObject, groups: int, vocab: int | None
) -> None:
    prefix = data.draw(st.integers(0, tokens - 1))
    prompts = source(vocab=vocab, prompt={"tokens": tokens, "shared_prefix": prefix, "groups": groups if prefix else 1})
    low, high = id_range(vocab)
    assert 0 < low < high <= (vocab or 32_000)
    heads: dict[int | None, list[int]] = {}
    for n in range(6):
        for warmup in (False, True):
            ask = prompts.plan.conversation(n, warmup=warmup)[0]
            prompt = prompts.make(ask, warmup=warmup)
            assert prompt.exact
            assert len(prompt.content) == prompt.tokens == tokens
            assert all(low <= token < high for token in prompt.content)
            # Warm-up and window share the prefixes of their groups, and nothing else.
            assert heads.setdefault(ask.group, prompt.content[:prefix]) == prompt.content[:prefix]
            assert (ask.group is None) == (prefix == 0)


def test_contents_are_fresh_for_every_seed_request_and_stream() -> None:
    shape = {"tokens": 40, "shared_prefix": 20}
    first, again, other = (make(source(seed, prompt=shape), 3).content for seed in (1, 1, 2))
    assert first == again
    assert first[:20] != other[:20]
    assert first[20:] != other[20:]
    assert make(source(prompt=shape), 4).content[20:] != first[20:]
    warm = make(source(prompt=shape), 3, warmup=True).content
    assert warm[:20] == first[:20]
    assert warm[20:] != first[20:]
    assert make(pickle.loads(pickle.dumps(source(prompt=shape))), 3).content == first


def test_ids_are_spread_evenly_and_independently() -> None:
    prompts = source(prompt={"tokens": 1000})
    low, high = id_range(None)
    ids = np.array([make(prompts, n).content for n in range(200)])
    counts = np.bincount((ids.ravel() - low) * 50 // (high - low), minlength=50)
    expected = ids.size / 50
    assert ((counts - expected) ** 2 / expected).sum() < 85  # chi squared with 49 degrees of freedom, 0.1 %
    assert abs(np.corrcoef(ids[:-1].ravel(), ids[1:].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(ids[:, :-1].ravel(), ids[:, 1:].ravel())[0, 1]) < 0.01


def test_text_prompts_have_one_word_for_each_token() -> None:
    prompt = make(source(text=True, prompt={"tokens": 12, "shared_prefix": 4}), 0)
    assert isinstance(prompt.content, str)
    assert len(prompt.content.split()) == prompt.tokens == 12
    assert not prompt.exact


def test_a_conversation_of_ids_goes_on_from_what_was_answered() -> None:
    prompts = source(turns=2, prompt={"tokens": 10, "shared_prefix": 4})
    first, second = prompts.plan.conversation(0, warmup=False)
    one = prompts.make(first, warmup=False)
    two = prompts.make(second, warmup=False, earlier=(one, Answer([7, 8], "x")))
    assert two.content[:12] == [*one.content, 7, 8]
    assert len(two.content) == two.tokens == 18
    assert two.exact
    assert two.content[12:] != one.content[4:]
    blind = prompts.make(second, warmup=False, earlier=(one, Answer([], "four letters")))
    assert not blind.exact
    assert blind.tokens == 10 + 3 + 6


def test_a_conversation_in_a_chat_is_made_of_messages() -> None:
    prompts = source(text=True, turns=2, prompt={"tokens": 5}, endpoint="chat")
    first, second = prompts.plan.conversation(0, warmup=False)
    one = prompts.make(first, warmup=False)
    two = prompts.make(second, warmup=False, earlier=(one, Answer([], "well")))
    assert [message["role"] for message in two.content] == ["user", "assistant", "user"]
    assert two.content[:2] == [*one.content, {"role": "assistant", "content": "well"}]
    assert len(two.content[2]["content"].split()) == 5


def test_a_conversation_of_text_is_text() -> None:
    prompts = source(text=True, turns=2, prompt={"tokens": 5})
    first, second = prompts.plan.conversation(0, warmup=False)
    one = prompts.make(first, warmup=False)
    two = prompts.make(second, warmup=False, earlier=(one, Answer([], " well")))
    assert two.content.startswith(f"{one.content} well ")
    assert len(two.content.split()) == 11


def write(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_recorded_prompts_are_sent_as_they_are(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"prompt": "héllo there", "output_tokens": 1})
    assert make(source(prompt={"file": file}), 0) == Prompt("héllo there", 3, exact=False)
    chat = make(source(prompt={"file": file}, endpoint="chat", text=True), 0)
    assert chat.content == [{"role": "user", "content": "héllo there"}]
    ids = write(tmp_path / "b.jsonl", {"prompt": [5, 6, 7], "output_tokens": 1})
    assert make(source(prompt={"file": ids}), 0) == Prompt([5, 6, 7], 3, exact=True)
    said = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    file = write(tmp_path / "c.jsonl", {"messages": said, "output_tokens": 1})
    assert make(source(prompt={"file": file}, endpoint="chat", text=True), 0).content == said


@pytest.mark.parametrize("text", [False, True])
def test_equal_blocks_of_a_trace_have_equal_tokens(tmp_path: Path, text: bool) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1200, "output_length": 1, "hash_ids": [1, 2, 3]},
        {"timestamp": 1, "input_length": 1100, "output_length": 1, "hash_ids": [1, 2, 9]},
        {"timestamp": 2, "input_length": 1100, "output_length": 1, "hash_ids": [1, 2, 9]},
        {"timestamp": 3, "input_length": 700, "output_length": 1, "hash_ids": [1]},
        {"timestamp": 4, "input_length": 700, "output_length": 1},
    ]
    section = LoadSection.model_validate({"trace": write(tmp_path / "t.jsonl", *rows)})

    def tokens(seed: int, n: int, *, warmup: bool = False) -> list[int | str]:
        prompts = PromptSource(Plan(section, 0), seed, text=text)
        content = make(prompts, n, warmup=warmup).content
        return content.split() if isinstance(content, str) else content

    first, second, third, short, bare = (tokens(1, n) for n in range(5))
    assert [len(each) for each in (first, second, third, short, bare)] == [1200, 1100, 1100, 700, 700]
    assert first[:1024] == second[:1024]
    assert first[1024:1100] != second[1024:]
    assert second == third
    assert short[:512] == first[:512]
    assert short[512:] != first[512:700]
    assert bare[:512] != short[:512]
    assert first[:512] != first[512:1024]
    assert tokens(2, 0)[:512] != first[:512]
    assert tokens(1, 0, warmup=True)[:512] != first[:512]
    assert tokens(1, 0, warmup=True)[:512] == tokens(1, 3, warmup=True)[:512]
