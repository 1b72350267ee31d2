"""When the load may be measured: the `measure` section, and the judgement that a series has become steady."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

from pydantic import Field, model_validator

from sweep.section import Section

_FEWEST_BINS = 6
_GROWTH = 1.5  # each stretch that is looked at is this much longer than the one before
HORIZON_BINS = 20  # no drift goes on in a straight line for longer


class WarmupSection(Section):
    """Limits of the warm-up, and the drift that a measurement may still contain."""

    min_s: float = Field(default=4, gt=0)
    max_s: float = Field(default=120, gt=0)
    tolerance_frac: float = Field(default=0.05, gt=0, lt=1)

    @model_validator(mode="after")
    def _is_in_order(self) -> Self:
        if self.max_s < self.min_s:
            raise ValueError(f"max_s {self.max_s:g} is shorter than min_s {self.min_s:g}")
        return self


class MeasureSection(Section):
    """How measurements are taken."""

    warmup: WarmupSection = WarmupSection()


def is_steady(bins: Sequence[float], tolerance_frac: float, horizon_bins: int = HORIZON_BINS) -> bool:
    """Tell whether the series has stopped drifting. bins: one figure of the load for each bin of time, oldest first.

    horizon_bins: how long the measurement will take, in bins. It is steady when a line through its latest stretch,
    continued over that time (20 bins at most), changes by less than tolerance_frac of the mean, and this with 95 %
    confidence. Confidence is what keeps both errors away: a slow drift needs a long stretch to be seen, and a short
    stretch passes only where there is hardly any noise; noise alone is averaged out as stretches grow, so it delays the
    verdict without preventing it. Every stretch that ends now is tried, since the series may begin with the drift.
    """
    length = _FEWEST_BINS
    while length <= len(bins):
        if _slope_bound(bins[-length:]) * min(horizon_bins, HORIZON_BINS) <= tolerance_frac:
            return True
        length = math.ceil(length * _GROWTH)
    return False


def _slope_bound(values: Sequence[float]) -> float:
    """Return an upper bound of the slope's size a bin, relative to the mean: least squares, one-sided 95 %."""
    n = len(values)
    mean = sum(values) / n
    if mean <= 0:
        return math.inf
    middle = (n - 1) / 2
    spread = n * (n * n - 1) / 12  # sum of squared distances of 0 to n-1 from their middle
    slope = sum((i - middle) * value for i, value in enumerate(values)) / spread
    residual = sum((value - mean - slope * (i - middle)) ** 2 for i, value in enumerate(values))
    # Student's t for n - 2 degrees of freedom, within some percent
    quantile = 1.65 * (1 + 1.5 / (n - 2))
    return (abs(slope) + quantile * math.sqrt(residual / (n - 2) / spread)) / mean
