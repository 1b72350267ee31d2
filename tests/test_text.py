from __future__ import annotations

import unicodedata
from typing import get_args

import pytest
from hypothesis import given, strategies as st

from sweep.failure import FailureKind
from sweep.text import FAILURE_WORDS, duration, flag_words, limit_words, number, percent, printable, slo_label


@given(st.text())
def test_printable_is_one_line_of_visible_text_and_final(text: str) -> None:
    clean = printable(text)
    assert not {unicodedata.category(char) for char in clean} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert len(clean.splitlines()) <= 1
    assert printable(clean) == clean


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]8;;http://x.test\x07link\x1b]8;;\x07", "link"),
        ("\x9b2Jgone", "gone"),
        ("a\tb\r\nc\u2028d\x85e", "a b c d e"),
        ("user\u202egnp.exe", "user gnp.exe"),
        ("naïve 模型 µ ok", "naïve 模型 µ ok"),
    ],
)
def test_printable(raw: str, clean: str) -> None:
    assert printable(raw) == clean


def test_every_failure_kind_has_words() -> None:
    assert set(FAILURE_WORDS) == set(get_args(FailureKind))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.1234, "0.123"), (4.567, "4.57"), (78.91, "78.9"), (411.6, "412"), (1842.3, "1,842"), (2, "2")],
)
def test_number(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (-3, "0 s"), (99, "99 s"), (540, "9 min"), (3600, "1 h 00 min"), (3599, "1 h 00 min")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_words_for_people() -> None:
    assert (limit_words(0.5), limit_words(2.0), limit_words(1.5)) == ("500 ms", "2 s", "1.50 s")
    assert (slo_label("ttft_p99"), slo_label("e2e_mean")) == ("TTFT p99", "E2E mean")
    assert (percent(0.071, 0), percent(-0.0001), percent(0.2)) == ("+7 %", "0 %", "+20.0 %")
    assert flag_words({"a": True, "b": 0.9, "c": [1], "d": "x y"}) == "a=true b=0.9 c=[1] d=x y"
