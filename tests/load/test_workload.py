import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from sweep.load.workload import Level, LoadSection

SHAPE = {"prompt": {"tokens": 64}, "output": {"tokens": 8}}


def test_levels_have_names_and_keep_their_order() -> None:
    assert LoadSection(concurrency=[64, 8], **SHAPE).levels() == (Level("c=64", 64), Level("c=8", 8))
    assert LoadSection(rate=0.5, **SHAPE).levels() == (Level("r=0.5", rate_rps=0.5),)


def test_a_level_lasts_a_minute_unless_told_otherwise() -> None:
    assert LoadSection(concurrency=1, **SHAPE).window_s == 60
    assert LoadSection(concurrency=1, seconds=5, **SHAPE).window_s == 5
    assert LoadSection(concurrency=1, requests=5, **SHAPE).window_s is None


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
        ({"rate": "max"}, "not available yet"),
        ({"rate": [1, -1]}, "-1.0 is not above 0"),
        ({"concurrency": 1, "seconds": 1, "requests": 1}, "either seconds or requests"),
        ({"concurrency": 1, "prompt": {"tokens": 64, "shared_prefix": 64}}, "leaves 0 of 64 tokens"),
        ({"concurrency": 1, "turbo": 1}, "turbo"),
    ],
)
def test_bad_loads_are_refused_with_a_reason(load: dict, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        LoadSection(**(SHAPE | load))


@given(concurrency=st.lists(st.integers(1, 4096), min_size=1, max_size=5, unique=True))
def test_a_section_survives_json(concurrency: list[int]) -> None:
    load = LoadSection(concurrency=concurrency, **SHAPE)
    assert LoadSection.model_validate(load.model_dump(mode="json")) == load
