import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from pydantic import ValidationError

from sweep.measure.warmup import MeasureSection, WarmupSection, is_steady

SECONDS = np.arange(120)
FLAT = np.full(120, 300.0)
# As seen on a CPU: 195, then 245, then 304 tokens a second in three runs over a minute.
DRIFT = np.minimum(195 + 2.1 * SECONDS, 320)
SLOWING_DRIFT = 320 - 150 * np.exp(-SECONDS / 25)
RAMP = np.minimum(SECONDS / 4, 1) * 300


def noisy(series: np.ndarray, sigma: float, seed: int) -> list[float]:
    return list(series * (1 + sigma * np.random.default_rng(seed).standard_normal(len(series))))


def steady_after(series: list[float]) -> int | None:
    return next((n for n in range(1, len(series) + 1) if is_steady(series[:n], 0.05)), None)


def verdicts(series: np.ndarray, sigma: float) -> np.ndarray:
    found = [steady_after(noisy(series, sigma, seed)) for seed in range(40)]
    return np.array([n or 999 for n in found])


@pytest.mark.parametrize("sigma", [0.01, 0.02, 0.03, 0.05])
def test_a_minute_of_drift_does_not_reach_the_result(sigma: float) -> None:
    for series in (DRIFT, SLOWING_DRIFT):
        at = verdicts(series, sigma)
        assert at.max() <= 120
        reached = series[np.minimum(at, 120) - 1] / 320
        assert np.percentile(reached, 10) > 0.92  # the little that is left of the drift is about the tolerance
        assert np.median(reached) > 0.95


@pytest.mark.parametrize(("sigma", "longest"), [(0.005, 20), (0.02, 35), (0.05, 60)])
def test_noise_delays_the_verdict_without_preventing_it(sigma: float, longest: int) -> None:
    assert verdicts(FLAT, sigma).max() <= longest


def test_a_quiet_series_needs_few_bins_and_a_ramp_is_left_behind() -> None:
    assert steady_after(list(FLAT)) == 6
    assert steady_after(list(RAMP)) == 10


def test_a_short_measurement_needs_less_certainty_about_the_time_after_it() -> None:
    series = noisy(FLAT, 0.05, 1)
    short = next(n for n in range(1, len(series)) if is_steady(series[:n], 0.05, 8))
    assert short < (steady_after(series) or 0)
    assert not is_steady(list(DRIFT[:30]), 0.05, 8)


def test_a_jump_starts_the_wait_again() -> None:
    assert not is_steady([100.0] * 10 + [200.0] * 3, 0.05)
    assert is_steady([100.0] * 10 + [200.0] * 6, 0.05)


def test_nothing_at_all_is_not_steady() -> None:
    assert not is_steady([0.0] * 50, 0.05)
    assert not is_steady([], 0.05)


@settings(max_examples=50)
@given(st.lists(st.floats(1, 1e6), min_size=6, max_size=60), st.floats(1e-3, 1e3))
def test_the_unit_of_the_series_does_not_matter(series: list[float], factor: float) -> None:
    assert is_steady(series, 0.05) == is_steady([value * factor for value in series], 0.05) or np.std(series) < 1e-6


def test_the_section() -> None:
    assert MeasureSection().warmup == WarmupSection(min_s=4, max_s=120, tolerance_frac=0.05)
    with pytest.raises(ValidationError, match="max_s 1 is shorter than min_s 4"):
        MeasureSection.model_validate({"warmup": {"max_s": 1}})
