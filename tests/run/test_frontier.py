"""A night beside a memory frontier: what cannot run is hardly launched, and what can run is not passed over."""

from __future__ import annotations

import json
import statistics
from itertools import product
from pathlib import Path

import pytest

from .frontier import DEFAULTS, fails, space, study


def test_a_sixth_of_the_space_cannot_run() -> None:
    told = space()
    names = list(told.search.params)
    points = (
        dict(zip(names, values, strict=True)) for values in product(*(p.values() for p in told.search.params.values()))
    )
    allowed = [point for point in points if told.space.violated(point) is None]
    share = sum(fails({**DEFAULTS, **point}) for point in allowed) / len(allowed)
    assert share == pytest.approx(0.17, abs=0.01)


def test_a_study_beside_the_frontier_spends_two_launches_on_it(tmp_path: Path) -> None:
    studies = [study(tmp_path / str(seed), "tpe", seed) for seed in range(20)]
    assert statistics.median(made.out_of_memory for made in studies) <= 2
    for made in studies:
        launched = [json.dumps(flags, sort_keys=True) for flags in made.launched]
        assert len(set(launched)) == len(launched) == 40
    # A calculation beside the certain bounds may err, but rarely.
    skipped = sum(len(made.skipped) for made in studies)
    assert sum(len(made.skipped_wrongly) for made in studies) <= 0.1 * skipped


def test_without_what_is_known_many_more_are_spent(tmp_path: Path) -> None:
    blind = [study(tmp_path / str(seed), "tpe", seed, skip=False) for seed in range(5)]
    assert statistics.median(made.out_of_memory for made in blind) >= 6
    assert all(made.skipped == [] for made in blind)
