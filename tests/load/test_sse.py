import json

import pytest
from hypothesis import given, strategies as st

from sweep.load.sse import Stream, error_words, events, read_stream

USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}}


def text(value: str, *, finish: str | None = None, **more: object) -> dict:
    return {"choices": [{"index": 0, "text": value, "finish_reason": finish, **more}]}


def delta(finish: str | None = None, ids: list[int] | None = None, **fields: object) -> dict:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish, "token_ids": ids}]}


def wire(*documents: dict, done: bool = True) -> bytes:
    data = [json.dumps(d, ensure_ascii=False).encode() for d in documents] + [b"[DONE]"] * done
    return b"".join(b"data: " + item + b"\n\n" for item in data)


def read(*documents: dict, done: bool = True, vllm: bool = True) -> Stream:
    body, marks = b"", []
    for at, document in enumerate(documents, start=10):
        body += wire(document, done=False)
        marks.append((at, len(body), 0))
    body += wire(done=done)
    return read_stream(body, [*marks, (99, len(body), 0)], vllm=vllm)


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("comment", [b"", b": ping\n\n", b"event: x\nid: 4\n"])
def test_events_are_found_whatever_stands_between_them(newline: bytes, comment: bytes) -> None:
    body = comment + b'data: {"a": "\xe4\xb8\xad"}\n\ndata:{"b":\ndata: 2}\n\n' + comment + b"data: [DONE]\n\n"
    body = body.replace(b"\n", newline)
    found = list(events(body))
    assert [data for _, data in found] == [b'{"a": "\xe4\xb8\xad"}', b'{"b":\n2}', b"[DONE]"]
    assert all(body[:end].endswith(newline * 2) for end, _ in found)
    assert found[-1][0] == len(body)
    for missing in range(1, 4):  # an event that was cut off ends with the body
        assert list(events(body[:-missing]))[-1][0] == len(body) - missing


@given(cuts=st.lists(st.integers(1, 600), max_size=10))
def test_tokens_do_not_depend_on_how_the_stream_was_cut(cuts: list[int]) -> None:
    body = wire(
        delta(role="assistant", content=""), delta(content="中", ids=[1]), delta("length", [2, 3], content=""), USAGE
    )
    edges = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
    stream = read_stream(body, [(edge, edge, None) for edge in edges[1:]], vllm=True)
    assert [count for _, count in stream.chunks] == [1, 2]
    assert (stream.done, stream.finish_reason, stream.tokens, stream.counts) == (True, "length", 3, "exact")
    first_end = body.index(b"\n\n", body.index(b'token_ids": [1]')) + 2
    assert stream.chunks[0][0] == min(edge for edge in edges if edge >= first_end)
    assert stream.late_events == (stream.chunks[0][0] == stream.chunks[1][0])


def test_a_role_alone_is_no_token_and_an_empty_text_may_be_one() -> None:
    stream = read(
        delta(role="assistant", content=""), delta(content="", ids=[4]), delta("length", [5], content="x"), USAGE
    )
    assert stream.chunks == [(11, 1), (12, 1)]


def test_ids_decide_over_text() -> None:
    stream = read(text("a", token_ids=[1, 2, 3]), text("", finish="length", token_ids=[]), USAGE)
    assert stream.chunks == [(10, 3)]
    assert stream.counts == "exact"


def test_usage_that_grows_with_the_stream_counts_exactly() -> None:
    documents = [text(t) | {"usage": {"completion_tokens": n}} for t, n in (("a", 1), ("bcd", 3), ("", 4))]
    stream = read(*documents, vllm=False)
    assert stream.chunks == [(10, 1), (11, 2), (12, 1)]
    assert stream.counts == "exact"


def test_usage_at_the_end_gives_the_total_and_chunks_the_times() -> None:
    stream = read(text("a"), text("b"), {**USAGE, "usage": {"completion_tokens": 6}}, vllm=False)
    assert stream.chunks == [(10, 3), (11, 3)]
    assert stream.counts == "usage"


def test_usage_on_the_last_chunk_is_a_total_too() -> None:
    last = text("b", finish="stop") | {"usage": {"completion_tokens": 4}}
    stream = read(text("a"), last, vllm=False)
    assert (stream.tokens, stream.counts) == (4, "usage")


def test_without_usage_each_chunk_with_content_is_a_token() -> None:
    stream = read(
        delta(role="assistant"), delta(reasoning="hm"), delta(content=""), delta("stop", content="x"), vllm=False
    )
    assert stream.chunks == [(11, 1), (13, 1)]
    assert stream.counts == "approx"


def test_of_vllm_an_empty_chunk_without_ids_is_a_part_of_a_character() -> None:
    assert read(text(""), text("中"), text("", finish="length")).tokens == 2


@pytest.mark.parametrize("error", [{"message": "it broke", "code": 500}, "it broke"])
def test_an_error_inside_the_stream_is_found(error: object) -> None:
    stream = read(text("a", token_ids=[1]), {"error": error})
    assert stream.error == "it broke"


def test_a_stream_that_was_cut_off_is_not_done() -> None:
    body = wire(text("a", token_ids=[1]), text("b", token_ids=[2]), done=False)
    stream = read_stream(body[:-20], [(1, len(body) - 20, 0)], vllm=True)
    assert not stream.done
    assert stream.tokens == 1


def test_reasoning_counts_as_tokens_and_the_answer_has_a_time_of_its_own() -> None:
    for name in ("reasoning", "reasoning_content"):
        stream = read(delta(role="assistant", content=""), delta(ids=[1], **{name: "hm"}), delta(content="x", ids=[2]))
        assert stream.chunks == [(11, 1), (12, 1)]
        assert (stream.reasoned, stream.answer_ns) == (True, 12)
    assert not read(text("a", token_ids=[1])).reasoned


def test_events_that_were_read_together_are_uncertain_only_if_the_client_was_late() -> None:
    ms = 1_000_000
    parts = [wire(text("a", token_ids=[i]), done=False) for i in range(4)]
    size = len(parts[0])
    for waited_ns, late in ((100, 0), (ms, 0), (3 * ms, 2), (None, 2)):
        marks = [(0, size, 0), (20 * ms, 4 * size, waited_ns)]  # three in one read, 20 ms after the first
        assert read_stream(b"".join(parts), marks, vllm=True).late_events == late


def test_numbers_that_are_none_are_read_as_python_servers_write_them() -> None:
    body = b'data: {"choices": [{"index": 0, "text": "a", "token_ids": [1], "logprobs": [NaN]}]}\n\n'
    assert read_stream(body, [(1, len(body), 0)], vllm=True).tokens == 1


def test_the_answer_is_kept_where_asked() -> None:
    body = wire(text("a", token_ids=[1]), text("b", token_ids=[2, 3])) + wire(delta(content="c", ids=[4]))
    kept, plain = (read_stream(body, [(1, len(body), 0)], vllm=True, keep=keep) for keep in (True, False))
    assert (kept.ids, kept.text) == ([1, 2, 3, 4], "abc")
    assert (plain.ids, plain.text) == ([], "")


def test_words_of_errors() -> None:
    assert error_words({"error": "Unauthorized"}) == "Unauthorized"
    assert error_words({"error": {"message": "a\n  b"}}) == "a b"
    assert len(error_words("x" * 1000)) == 300


@given(st.lists(st.integers(1, 5), min_size=1, max_size=30), st.integers(0, 200))
def test_scaling_keeps_the_total_and_the_order(counts: list[int], total: int) -> None:
    documents = [text("a") for _ in counts]
    stream = read(*documents, {"choices": [], "usage": {"completion_tokens": total}}, vllm=False)
    assert stream.tokens == total
    assert stream.chunks == sorted(stream.chunks)
    assert all(count > 0 for _, count in stream.chunks)


@pytest.mark.parametrize(
    "document",
    [
        {"choices": [None]},
        {"choices": "none"},
        {"choices": {"a": 1}},
        {"choices": [{"token_ids": 3, "text": "x"}]},
        {"choices": [{"delta": "x"}]},
        {"choices": [{"text": "x"}], "usage": "much"},
        {"choices": [{"text": "x"}], "usage": {"completion_tokens": "3", "prompt_tokens": None}},
        {"choices": [{"text": "x", "finish_reason": 7}]},
        [],
        3,
    ],
)
def test_a_server_that_answers_nonsense_is_no_crash(document: object) -> None:
    for vllm in (True, False):
        body = b"data: " + json.dumps(document).encode() + b"\n\n"
        stream = read_stream(body, [(1, len(body), 0)], vllm=vllm, keep=True)
        assert all(isinstance(count, int) and count > 0 for _, count in stream.chunks)
