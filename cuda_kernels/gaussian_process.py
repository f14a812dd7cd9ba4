"""A small Gaussian process and Bayesian optimisation over a finite set of points. NumPy and SciPy only.

Squared-exponential kernel with one length scale per axis on coordinates scaled to [0, 1]; scales, and the noise, are
chosen from a small grid by marginal likelihood (Rasmussen and Williams, Gaussian Processes for Machine Learning,
section 5.4.1). The next point is the one with the largest expected improvement (Jones, Schonlau and Welch 1998).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_solve, cholesky
from scipy.special import ndtr

Array = NDArray[np.float64]

LENGTH_SCALES = (0.15, 0.3, 0.6, 1.2)
NOISES = (1e-4, 1e-2)


@dataclass(frozen=True)
class SearchResult:
    """What a search found: index of the best point, its cost, and the order in which points were tried."""

    best: int
    best_cost: float
    costs: dict[int, float]
    """Point -> cost, in the order of evaluation."""
    stopped_by: str
    """"converged", "evaluations", "all points" or "time"."""


@dataclass(frozen=True)
class Posterior:
    mean: Array
    deviation: Array


def _kernel(left: Array, right: Array, scales: Array) -> Array:
    difference = (left[:, None, :] - right[None, :, :]) / scales
    result: Array = np.exp(-0.5 * (difference**2).sum(axis=2))
    return result


def fit_predict(seen: Array, values: Array, points: Array) -> Posterior:
    """Posterior at `points` given `values` at `seen`, hyperparameters by marginal likelihood."""
    centre, spread = float(values.mean()), max(float(values.std()), 1e-12)
    normalised = (values - centre) / spread
    best_likelihood, best = -np.inf, None
    for *scales, noise in product(*[LENGTH_SCALES] * seen.shape[1], NOISES):
        scale_array = np.array(scales)
        factor = cholesky(_kernel(seen, seen, scale_array) + noise * np.eye(len(seen)), lower=True)
        weights = cho_solve((factor, True), normalised)
        likelihood = -0.5 * float(normalised @ weights) - float(np.log(np.diag(factor)).sum())
        if likelihood > best_likelihood:
            best_likelihood, best = likelihood, (scale_array, factor, weights)
    assert best is not None
    scale_array, factor, weights = best
    cross = _kernel(points, seen, scale_array)
    variance = 1.0 - np.einsum("ij,ji->i", cross, cho_solve((factor, True), cross.T))
    return Posterior(centre + spread * (cross @ weights), spread * np.sqrt(np.maximum(variance, 1e-12)))


def expected_improvement(posterior: Posterior, best_value: float) -> Array:
    """Expected amount by which each point beats (is below) `best_value`."""
    gap = best_value - posterior.mean
    ratio = gap / posterior.deviation
    density = np.exp(-0.5 * ratio**2) / np.sqrt(2 * np.pi)
    result: Array = gap * ndtr(ratio) + posterior.deviation * density
    return result


def minimise(
    points: Array,
    cost_of: Callable[[int], float],
    max_evaluations: int,
    seed: int = 0,
    initial: int = 5,
    tolerance: float = 0.005,
    out_of_time: Callable[[], bool] = lambda: False,
) -> SearchResult:
    """Bayesian optimisation over the rows of `points`; costs are positive and modelled by their logarithm.

    Stops when the largest expected improvement is below `tolerance` (relative), twice in a row.
    """
    generator = np.random.default_rng(seed)
    span = np.maximum(np.ptp(points, axis=0), 1e-12)
    scaled = (points - points.min(axis=0)) / span
    costs: dict[int, float] = {}

    def result(stopped_by: str) -> SearchResult:
        best = min(costs, key=lambda index: costs[index])
        return SearchResult(best, costs[best], costs, stopped_by)

    for index in _spread_out(scaled, min(initial, len(points)), generator):
        costs[index] = cost_of(index)
    unpromising = 0
    while True:
        if len(costs) == len(points):
            return result("all points")
        if len(costs) >= max_evaluations:
            return result("evaluations")
        if out_of_time():
            return result("time")
        seen = np.array(list(costs))
        logs = np.log(np.array(list(costs.values())))
        improvement = expected_improvement(fit_predict(scaled[seen], logs, scaled), float(logs.min()))
        improvement[seen] = -1.0
        chosen = int(improvement.argmax())
        unpromising = unpromising + 1 if improvement[chosen] < tolerance else 0
        if unpromising == 2:
            return result("converged")
        costs[chosen] = cost_of(chosen)


def exhaustive(points: Array, cost_of: Callable[[int], float]) -> SearchResult:
    """Every point, in order."""
    costs = {index: cost_of(index) for index in range(len(points))}
    best = min(costs, key=lambda index: costs[index])
    return SearchResult(best, costs[best], costs, "all points")


def _spread_out(scaled: Array, count: int, generator: np.random.Generator) -> list[int]:
    """Points far from one another, the first one at random (greedy farthest-point design)."""
    chosen = [int(generator.integers(len(scaled)))]
    while len(chosen) < count:
        distance = np.linalg.norm(scaled[:, None, :] - scaled[None, chosen, :], axis=2).min(axis=1)
        distance[chosen] = -1.0
        chosen.append(int(distance.argmax()))
    return chosen
