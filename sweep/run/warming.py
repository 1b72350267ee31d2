"""Puts the load's warm-up and the judgement of steadiness together, which are siblings and do not know each other."""

from __future__ import annotations

import math

from sweep.load.client import Warmup
from sweep.load.level import bin_length_s
from sweep.load.workload import LoadSection
from sweep.measure.warmup import HORIZON_BINS, WarmupSection, is_steady


def warmup_of(section: WarmupSection, load: LoadSection) -> Warmup:
    """Return the warm-up of a level: steady enough for the window that is to follow."""
    bin_s = bin_length_s(section.min_s)
    horizon = HORIZON_BINS if load.window_s is None else math.ceil(load.window_s / bin_s)
    return Warmup(section.min_s, section.max_s, lambda bins: is_steady(bins, section.tolerance_frac, horizon))
