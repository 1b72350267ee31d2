"""Files of prompts and traces: what is read, and what is said of a bad one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from sweep.errors import ConfigError
from sweep.load import datasets
from sweep.load.datasets import Dataset, Turn, read_prompts, read_trace

PRIVATE = "my private words " * 20


def prompts(tmp_path: Path, text: str | bytes, *, turns: int = 1, needs: bool = True, form: str = "auto") -> Dataset:
    path = tmp_path / "data.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_prompts(str(path), form, turns=turns, needs_answers=needs)


def trace(tmp_path: Path, *rows: dict) -> Dataset:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_trace(str(path))


def talk(*said: str) -> dict:
    names = ("human", "gpt")
    return {"id": "x", "conversations": [{"from": names[i % 2], "value": value} for i, value in enumerate(said)]}


def said(**message: object) -> str:
    return json.dumps({"messages": [{"role": "user", "content": "hi"} | message], "output_tokens": 1})


GOOD = json.dumps({"prompt": "a", "output_tokens": 1})


def test_sharegpt_gives_the_user_s_turns_and_the_lengths_of_the_answers(tmp_path: Path) -> None:
    text = json.dumps([talk("q" * 8, "a" * 40, "r" * 12, "b" * 20), talk("s" * 4, "c")])
    one, many = prompts(tmp_path, text), prompts(tmp_path, text, turns=5)
    assert one.rows[0].turns == (Turn("q" * 8, 2, exact=False, answer_tokens=10),)
    assert [[turn.content[0] for turn in row.turns] for row in many.rows] == [["q", "r"], ["s"]]
    assert many.rows[0].turns[1].answer_tokens == 5
    assert many.mean_turns == 1.5
    assert one.sha256 == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("key", ["conversations", "conversation"])
@pytest.mark.parametrize("roles", [("human", "gpt"), ("user", "assistant")])
def test_the_spellings_of_sharegpt(tmp_path: Path, key: str, roles: tuple[str, str]) -> None:
    said = [{"from": "system", "value": "be good"}, *({"from": role, "value": "hello"} for role in roles)]
    assert prompts(tmp_path, json.dumps([{key: said}])).rows[0].turns[0].content == "hello"


def test_conversations_that_cannot_be_used_are_counted(tmp_path: Path) -> None:
    rows = [talk("question", "answer"), {"conversations": [{"from": "gpt", "value": "I begin"}]}, talk("no answer")]
    rows += [talk("", "answer to nothing"), {"conversations": []}]
    data = prompts(tmp_path, json.dumps(rows))
    assert (len(data.rows), data.skipped) == (1, 4)
    data = prompts(tmp_path, json.dumps(rows), needs=False)
    assert (len(data.rows), data.skipped) == (2, 3)
    assert data.rows[1].turns[0].answer_tokens is None


def test_rows_of_a_jsonl(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s" * 40}, {"role": "user", "content": "u" * 40}]
    rows = [
        {"prompt": "p" * 40, "output_tokens": 7},
        {"prompt": [5, 6, 7], "max_tokens": 8},
        {"messages": messages, "output_length": 9},
        {"messages": [*messages, {"role": "assistant", "content": "a" * 8}]},
    ]
    # Unicode's line ends may stand within JSON; blank lines, a mark at the file's start and CRLF do no harm.
    rows[0]["prompt"] += "\u2028"
    lines = "\r\n\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    data = prompts(tmp_path, b"\xef\xbb\xbf" + lines.encode())
    turns = [row.turns[0] for row in data.rows]
    assert [turn.answer_tokens for turn in turns] == [7, 8, 9, 2]
    assert [turn.tokens for turn in turns] == [10, 3, 20, 20]
    assert [turn.exact for turn in turns] == [False, True, False, False]
    assert turns[2].content == turns[3].content == messages


def test_a_mooncake_trace(tmp_path: Path) -> None:
    data = trace(
        tmp_path,
        {"timestamp": 3000, "input_length": 1000, "output_length": 5, "hash_ids": [1, 3]},
        {"timestamp": 1000, "input_length": 1100, "output_length": 4, "hash_ids": [1, 2, 7]},
        {"timestamp": 3000, "input_length": 1024, "output_length": 6, "hash_ids": [1, 2]},
        {"timestamp": 9500.5, "input_length": 10, "output_length": 6},
    )
    assert [row.at_s for row in data.rows] == [0, 2, 2, 8.5005]
    assert [row.blocks for row in data.rows] == [(1, 2, 7), (1, 3), (1, 2), ()]
    # All blocks of the third are known; its last token is computed all the same.
    assert [row.history_tokens for row in data.rows] == [0, 512, 1023, 0]


def test_a_trace_may_bring_its_prompts(tmp_path: Path) -> None:
    data = trace(tmp_path, {"timestamp": 5, "prompt": "hello there", "output_tokens": 3})
    assert data.rows[0].turns[0] == Turn("hello there", 3, exact=False, answer_tokens=3)


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("", "data.json", "the file is empty"),
        (" \n ", "data.json", "the file is empty"),
        (b"\xff\xfe{", "data.json", "not UTF-8"),
        (PRIVATE, "data.json", "neither a JSON array nor"),
        ('{"prompt": "a", "output_tokens": 1}\n{"prompt": ', "data.json:2", "not JSON"),
        ("[]", "data.json", "no prompts: empty"),
        ("[1]", "data.json, entry 1", "no JSON object"),
        ("[" * 100_000, "data.json, entry 1", "not JSON"),
        (json.dumps([talk("a", "b")])[:-1], "data.json, entry 2", "cut off"),
        (json.dumps([talk("a", "b")]) + "x", "data.json", "something follows"),
        (json.dumps([talk("a", "b"), {"conversations": "no"}]), "data.json, entry 2", "no list of messages"),
        (json.dumps([{"conversations": [{"value": PRIVATE}]}]), "data.json, entry 1", "`from`"),
        (json.dumps([{"conversations": [{"from": "human", "value": 3}]}]), "data.json, entry 1", "no text in `value`"),
        (json.dumps([{"conversations": [{"from": "gpt", "value": "x"}]}]), "data.json", "none of its 1 conversations"),
        (json.dumps([{"conversations": [{"from": "human", "value": "\ud800"}]}]), "entry 1", "half of a character"),
        (json.dumps({PRIVATE: 1}), "data.json:1", "wants `prompt` or `messages`"),
        (json.dumps({"prompt": "a", "messages": []}), "data.json:1", "wants `prompt` or `messages`"),
        (json.dumps({"prompt": PRIVATE}), "data.json:1", "give `output_tokens`"),
        (json.dumps({"prompt": "", "output_tokens": 1}), "data.json:1", "neither text nor"),
        (json.dumps({"prompt": [1, -2], "output_tokens": 1}), "data.json:1", "neither text nor"),
        (json.dumps({"prompt": [True], "output_tokens": 1}), "data.json:1", "neither text nor"),
        (json.dumps({"prompt": PRIVATE, "output_tokens": 0}), "data.json:1", "`output_tokens` must be"),
        (json.dumps({"messages": [{"role": "user"}], "output_tokens": 1}), "data.json:1", "`role` and `content`"),
        (json.dumps({"messages": [], "output_tokens": 1}), "data.json:1", "none of the user"),
        (said(content=[]), "data.json:1", "a list of parts"),
        (said(content=["hi"]), "data.json:1", "a list of parts"),
        (said(content=None), "data.json:1", "a list of parts"),
        (said(content="\ud800"), "data.json:1", "half of a character"),
        (said(name="\ud800"), "data.json:1", "half of a character"),
        (said(content=[{"type": "text", "text": "\udfff"}]), "data.json:1", "half of a character"),
        (said(content=[{"type": "text", "\ud800": 1}]), "data.json:1", "half of a character"),
        (said(weight=float("nan")), "data.json:1", "a number that JSON does not know"),
        (json.dumps({"prompt": "\ud800", "output_tokens": 1}), "data.json:1", "half of a character"),
        (json.dumps({"prompt": [0, 1 << 31], "output_tokens": 1}), "data.json:1", "neither text nor"),
        (" \n\n" + json.dumps({"prompt": PRIVATE}), "data.json:3", "give `output_tokens`"),
        ("\n" * (1 << 20) + "\n\n1", "data.json", "neither a JSON array nor"),
        ("\n" * (1 << 20) + '\n\n{"prompt": 1}', "data.json:1048579", "neither text nor"),
        ("[," + GOOD + "]", "data.json, entry 1", "a comma too few before it, or one too many"),
        ("[" + GOOD + ",,]", "data.json, entry 2", "a comma too few before it, or one too many"),
        ("[" + GOOD + ",]", "data.json, entry 2", "a comma too few before it, or one too many"),
        ("[" + GOOD + GOOD + "]", "data.json, entry 2", "a comma too few before it, or one too many"),
        ("[" + GOOD + ", , " + GOOD + "]", "data.json, entry 2", "a comma too few before it, or one too many"),
        ("[" + GOOD + ",", "data.json, entry 2", "cut off"),
    ],
)
def test_errors_name_file_row_and_fix_and_quote_no_text(
    tmp_path: Path, text: str | bytes, place: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        prompts(tmp_path, text)
    assert f"{tmp_path}/data.json" in str(error.value)
    assert place in str(error.value)
    assert PRIVATE[:41] not in str(error.value)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"input_length": 1, "output_length": 1}, "timestamp"),
        ({"timestamp": -1, "input_length": 1, "output_length": 1}, "timestamp"),
        ({"timestamp": int("9" * 401), "input_length": 1, "output_length": 1}, "timestamp"),
        ({"timestamp": float("nan"), "input_length": 1, "output_length": 1}, "timestamp"),
        ({"timestamp": True, "input_length": 1, "output_length": 1}, "timestamp"),
        ({"timestamp": 0, "input_length": 0, "output_length": 1}, "input_length"),
        ({"timestamp": 0, "input_length": 1.5, "output_length": 1}, "input_length"),
        ({"timestamp": 0, "input_length": 1}, "output_length"),
        ({"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1, 2]}, "more `hash_ids`"),
        ({"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": ["1"]}, "no list of numbers"),
        ({"timestamp": 0, "prompt": "text"}, "output_tokens"),
    ],
)
def test_a_bad_row_of_a_trace(tmp_path: Path, row: dict, words: str) -> None:
    good = {"timestamp": 0, "input_length": 1, "output_length": 1}
    with pytest.raises(ConfigError, match=rf"trace\.jsonl:2: .*{words}"):
        trace(tmp_path, good, row)


def test_what_is_no_file(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "none", "no such file"), (tmp_path, "not a file")):
        with pytest.raises(ConfigError, match=words):
            read_trace(str(path))


def test_forms_that_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="jq -c"):
        prompts(tmp_path, json.dumps([talk("a", "b")]), form="jsonl")
    with pytest.raises(ConfigError, match="no `conversations`"):
        prompts(tmp_path, json.dumps({"prompt": "a"}), form="sharegpt")
    with pytest.raises(ConfigError, match="turns wants"):
        prompts(tmp_path, json.dumps({"prompt": "a", "output_tokens": 1}), turns=2)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    said=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip), min_size=1),
    chunk=st.integers(1, 50),
    indent=st.sampled_from([None, 2]),
    lines=st.booleans(),
)
def test_wherever_a_read_ends_the_rows_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str], chunk: int, indent: int | None, lines: bool
) -> None:
    monkeypatch.setattr(datasets, "_CHUNK_BYTES", chunk)
    rows = [talk(word, "answer") for word in said]
    text = json.dumps(rows, indent=indent, ensure_ascii=False)
    if lines:
        text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    rows = prompts(tmp_path, text).rows
    assert [row.turns[0].content for row in rows] == said
    assert [row.place for row in rows] == [f":{i}" if lines else f", entry {i}" for i in range(1, len(said) + 1)]


@given(entries=st.integers(0, 4), chunk=st.integers(1, 9), text=st.text("[],{ ", max_size=12))
def test_an_array_is_read_as_json_reads_it(entries: int, chunk: int, text: str) -> None:
    """Pieces of an array's punctuation between objects: what `json` takes is taken alike, and nothing else."""
    pieces = [piece + '{"a": [1, "],"]}' for piece in text[:entries]]
    whole = "[" + "".join(pieces) + text[entries:] + "]"
    parts = [whole[i : i + chunk] for i in range(1, len(whole), chunk)]
    try:
        expected = json.loads(whole)
    except ValueError:
        with pytest.raises(ConfigError):
            list(datasets._array("path", "", iter(parts)))
    else:
        assert [entry for _, entry in datasets._array("path", "", iter(parts))] == expected
