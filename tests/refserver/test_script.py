"""What an answer consists of, before a byte of it is sent."""

from dataclasses import replace

from hypothesis import given, settings, strategies as st

from tests.refserver.events import Asked
from tests.refserver.scenarios import SCENARIOS
from tests.refserver.script import FIRST, script
from tests.refserver.timing import Schedule, Timing

ASKED = Asked(
    chat=False, prompt_tokens=3, tokens=6, finish_reason="length", exact=True, ids=True, usage=True, continuous=False
)
NAMES = st.sampled_from(sorted(SCENARIOS))


def answers(name: str, asked: Asked, split: int = 0) -> tuple[bytes, list[int]]:
    """Return the bytes of an answer, and where in them its tokens are whole."""
    writes = script(SCENARIOS[name], asked, "m", 2, split).writes
    data, ends = b"", []
    for write in writes:
        ends += [len(data) + end for end, count in write.marks for _ in range(count)]
        data += write.data
    return data, ends


@given(NAMES, st.booleans(), st.integers(2, 9), st.integers(1, 4), st.integers(0, 3000))
@settings(deadline=None)
def test_a_split_moves_no_byte_and_no_token(name: str, chat: bool, tokens: int, per_chunk: int, offset: int) -> None:
    asked = replace(ASKED, chat=chat, tokens=tokens, per_chunk=per_chunk)
    assert answers(name, asked, offset) == answers(name, asked)


@given(NAMES, st.booleans(), st.integers(2, 9), st.integers(1, 4))
@settings(deadline=None)
def test_tokens_are_whole_where_an_event_ends(name: str, chat: bool, tokens: int, per_chunk: int) -> None:
    asked = replace(ASKED, chat=chat, tokens=tokens, per_chunk=per_chunk)
    found = script(SCENARIOS[name], asked, "m", 2, 0)
    data, ends = answers(name, asked)
    assert len(ends) == found.tokens
    assert all(data[:end].endswith((b"\n\n", b"\n\r\n")) or name == "tiny_chunks" for end in ends)
    scenario = SCENARIOS[name]
    if scenario.stop:
        assert found.tokens == 2
    elif found.expected == "ok" or scenario.usage == "wrong":
        assert found.tokens == tokens
    waits = [write.wait for write in found.writes]
    assert waits.count(FIRST) == (1 if found.tokens else waits.count(FIRST))


@given(
    st.integers(0, 99),
    st.integers(0, 99),
    st.floats(0, 2),
    st.floats(0, 2),
    st.floats(0, 0.5),
    st.sampled_from(["spread", "burst"]),
)
def test_a_schedule_is_repeatable_and_goes_forward(
    seed: int, ordinal: int, ttft_sigma: float, itl_sigma: float, stall_frac: float, mode: str
) -> None:
    timing = Timing(seed, 0.05, ttft_sigma, 0.02, itl_sigma, stall_frac, 0.1, mode)  # type: ignore[arg-type]

    def deadlines() -> list[int]:
        schedule = Schedule(timing, ordinal, 1_000_003)
        return [schedule.first_ns(), *(schedule.later_ns(1 + i % 3) for i in range(9))]

    first = deadlines()
    assert first == sorted(first)
    assert first == deadlines()
    assert first[0] > 1_000_003
    if mode == "burst":
        assert all(due % 20_000_000 == 0 for due in first)


def test_a_lognormal_schedule_has_its_median_and_sigma() -> None:
    timing = Timing(1, ttft_s=0.1, ttft_sigma=0.5)
    firsts = sorted(Schedule(timing, ordinal, 0).first_ns() / 1e9 for ordinal in range(4000))
    assert abs(firsts[2000] / 0.1 - 1) < 0.05  # the median's standard error is 1 %
    assert abs(firsts[3364] / firsts[2000] - 1.6487) < 0.1  # one sigma above it: exp(0.5)
