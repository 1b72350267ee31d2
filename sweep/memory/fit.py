"""What a launch keeps from the KV cache as a function of its sizes, and what it needs beside it, fitted. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from sweep.memory.launches import Launch

_Array: TypeAlias = npt.NDArray[np.float64]
_FEWEST = 3  # launches; their sizes have to differ
# The real dependence is not a straight line (a peak is the larger of two things): a part of what the prediction differs
# from the nearest launch's figure counts as error, and so does a launch's own spread.
_BENT = 0.15
_OWN_SPREAD = 0.005
_ROUNDING = 0.02 * 2**30


@dataclass(frozen=True, slots=True)
class Fit:
    """bytes = base + by_token x max-num-batched-tokens + by_sequence x max-num-seqs, none of them negative.

    sizes, values: what it was fitted to, a row for each launch. trials: their numbers.
    """

    base: float
    by_token: float
    by_sequence: float
    sizes: _Array
    values: _Array
    trials: tuple[int, ...]

    def __call__(self, tokens: int, seqs: int) -> float:
        return self.base + self.by_token * tokens + self.by_sequence * seqs

    def error(self, tokens: int, seqs: int) -> float:
        """Return how far the truth may be from a prediction, in bytes: twice its standard error, and the bend."""
        n, used = len(self.values), 1 + (self.by_token > 0) + (self.by_sequence > 0)
        told = self.base + self.sizes @ np.array([self.by_token, self.by_sequence])
        floor = _OWN_SPREAD * self.base + _ROUNDING / 2
        spread = max(float(np.sqrt(np.sum((self.values - told) ** 2) / max(1, n - used))), floor)
        design = np.column_stack([np.ones(n), self.sizes])
        here = np.array([1.0, tokens, seqs])
        scale = np.abs(design).max(axis=0)
        inner = np.linalg.pinv((design / scale).T @ (design / scale))
        lever = float((here / scale) @ inner @ (here / scale))
        # A direction in which the launches do not differ is one in which nothing is known.
        if np.linalg.matrix_rank(design / scale) < 3 and self._aside(tokens, seqs):
            return float("inf")
        nearest = self.values[np.argmin(np.abs(np.log2(self.sizes / np.array([tokens, seqs]))).sum(axis=1))]
        return 2 * spread * float(np.sqrt(1 + lever)) + _BENT * abs(self(tokens, seqs) - float(nearest))

    def _aside(self, tokens: int, seqs: int) -> bool:
        """Tell whether a point lies off the line on which all launches lie."""
        rows = np.vstack([self.sizes, [tokens, seqs]]).astype(float)
        rows = np.column_stack([np.ones(len(rows)), rows / rows.max(axis=0)])
        return bool(np.linalg.matrix_rank(rows, tol=1e-6) > np.linalg.matrix_rank(rows[:-1], tol=1e-6))


def fit(launches: Sequence[Launch]) -> Fit | None:
    """Fit what launches with the same other flags kept from the KV cache; None where they are too few or too alike."""
    rows = [
        (float(point.tokens), float(point.seqs), launch.outside_least, launch.trial)
        for launch in launches
        if (point := launch.point).tokens is not None
        and point.seqs is not None
        and launch.exact
        and launch.outside_least is not None
    ]
    if len(rows) < _FEWEST or len({row[:2] for row in rows}) < _FEWEST:
        return None
    sizes = np.array([row[:2] for row in rows])
    values = np.array([row[2] for row in rows])
    base, by_token, by_sequence = _no_negative(sizes, values)
    return Fit(base, by_token, by_sequence, sizes, values, tuple(row[3] for row in rows))


def _no_negative(sizes: _Array, values: _Array) -> tuple[float, float, float]:
    """Return the least-squares line whose coefficients are not negative: of three, all subsets can be tried.

    A size that explains nothing more has no coefficient.
    """
    design = np.column_stack([np.ones(len(values)), sizes])
    best, least = (float(values.mean()), 0.0, 0.0), float(np.sum((values - values.mean()) ** 2))
    gain = 1e-9 * float(values @ values)
    for columns in ([0, 1], [0, 2], [0, 1, 2]):
        scaled = design[:, columns] / design[:, columns].max(axis=0)
        if np.linalg.matrix_rank(scaled) < len(columns):
            continue
        found = np.linalg.lstsq(scaled, values, rcond=None)[0]
        missed = float(np.sum((values - scaled @ found) ** 2))
        if (found >= 0).all() and missed < least - gain:
            told = dict(zip(columns, found / design[:, columns].max(axis=0), strict=True))
            best, least = (float(told[0]), float(told.get(1, 0.0)), float(told.get(2, 0.0))), missed
    return best
