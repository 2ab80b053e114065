"""From measured steps to the coefficients of a cost model: non-negative least squares, robust in its shape and true in its sum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gristmill.errors import GristmillError
from gristmill.simulation.profile import StepCost
from gristmill.worker.work import StepWork

_ROUNDS = 8
_CLIP = 3.0  # residuals beyond so many typical ones count less (Huber)


def nnls(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The x >= 0 that minimises |matrix @ x - target| (Lawson and Hanson 1974, chapter 23)."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    a = matrix / scale
    n = a.shape[1]
    x, free = np.zeros(n), np.zeros(n, dtype=bool)
    tolerance = 1e-12 * max(1.0, float(np.abs(a.T @ target).max(initial=0.0)))
    for _ in range(3 * n):
        gradient = a.T @ (target - a @ x)
        gradient[free] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= tolerance:
            break
        free[best] = True
        while free.any():
            trial = np.zeros(n)
            trial[free] = np.linalg.lstsq(a[:, free], target, rcond=None)[0]
            if (trial[free] > 0).all():
                x = trial
                break
            blocking = free & (trial <= 0)  # go as far towards `trial` as all stay non-negative, and fix those that became 0
            x = x + float((x[blocking] / (x[blocking] - trial[blocking])).min()) * (trial - x)
            free &= x > 1e-15
            x[~free] = 0.0
    return x / scale


def fit_steps(work: Sequence[StepWork], seconds: Sequence[float]) -> tuple[StepCost, dict[str, float]]:
    """Coefficients for measured steps, and how well they fit: relative residuals, median and 90th percentile.

    A step counts relative to its predicted time, so short and long ones matter alike, and a few that the machine disturbed do not bend
    the result. Disturbance is a part of what steps take, though: in the end all coefficients are scaled so that the sums agree.
    """
    times = np.asarray(seconds, dtype=float)
    if times.size < len(StepWork._fields) + 1 or not (times > 0).all():
        raise GristmillError(f"{times.size} measured steps are too few to fit a cost model")
    matrix = np.column_stack([np.ones(times.size), np.asarray(work, dtype=float)])
    weights = 1 / times
    for _ in range(_ROUNDS):
        found = nnls(matrix * weights[:, None], times * weights)
        predicted = np.maximum(matrix @ found, 1e-3 * times)
        residuals = np.abs(times / predicted - 1)
        typical = max(float(np.median(residuals)), 1e-9)
        weights = np.sqrt(np.minimum(1.0, _CLIP * typical / np.maximum(residuals, 1e-12))) / predicted
    found *= times.sum() / (matrix @ found).sum()
    residuals = np.abs(times / (matrix @ found) - 1)
    quality = {
        "steps": int(times.size),
        "median_error": round(float(np.median(residuals)), 4),
        "p90_error": round(float(np.quantile(residuals, 0.9)), 4),
    }
    return StepCost(*(float(value) for value in found)), quality
