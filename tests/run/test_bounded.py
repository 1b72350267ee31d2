from __future__ import annotations

import threading
import time

import pytest

from sweep.run.bounded import Bounded


def test_an_answer_comes_through_and_so_does_an_error() -> None:
    assert Bounded[int, int](lambda n: n + 1)(41) == 42

    def broken(_: int) -> int:
        raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        Bounded(broken)(1)


def test_what_hangs_is_asked_once_and_given_up() -> None:
    asked = []
    end = threading.Event()

    def hangs(number: int) -> int:
        asked.append(number)
        end.wait(60)
        return number

    question = Bounded(hangs, patience_s=0.05)
    begun = time.monotonic()
    assert question(1) is None
    assert question(2) is None
    assert time.monotonic() - begun < 30
    assert asked == [1]
    end.set()
