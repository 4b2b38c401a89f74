"""A Gaussian process in NumPy: the expected time and its uncertainty at points that were not measured.

The covariance of two points is Matern's of order 5/2 with a length scale for each parameter (Rasmussen and
Williams, Gaussian Processes for Machine Learning, 2006, eq. 4.17), plus noise. Length scales and noise are
the most probable ones given the times; the variance of the process follows from them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[Any]

# Priors, normal in the logarithm: coordinates range from 0 to 1, and times carry little noise.
SCALE_SPREAD = 1.4  # standard deviation
NOISE, NOISE_SPREAD = math.log(2.5e-3), 2.0
LIMITS = (-4.0, 4.5)
NOISE_LIMITS = (-9.5, -0.5)
JITTER = 1e-6  # added to the diagonal, keeps matrices positive definite
STEPS = 14  # of each fit, which continues from the last one
LEAST_LIKELY = 0.05  # lowest probability of a value at any point
FIRST_STEP, STEP_LIMITS = 0.3, (0.01, 1.0)


def covariance(a: Floats, b: Floats) -> Floats:
    """Return Matern's covariance of order 5/2.

    Args:
        a: `[rows, coordinates]`, divided by the length scales.
        b: `[columns, coordinates]`, likewise.

    Returns:
        `[rows, columns]`, 1 at distance 0.
    """
    distance = a @ (-2.0 * b.T)
    distance += (a * a).sum(1)[:, None]
    distance += (b * b).sum(1)
    np.maximum(distance, 0.0, out=distance)
    distance *= 5.0
    np.sqrt(distance, out=distance)
    decay = np.exp(-distance)
    decay *= 1.0 + distance + distance * distance / 3.0
    return np.asarray(decay)


class Scales:
    """The length scales and the noise, which `fit` improves.

    Args:
        scale_of: `[coordinates]`, index of the length scale of each coordinate.
        count: Number of length scales.
    """

    def __init__(self, scale_of: NDArray[np.intp], count: int) -> None:
        self._scale_of = scale_of
        self._logs = np.append(np.zeros(count), NOISE)

    @property
    def noise(self) -> float:
        """Variance of the noise, as a multiple of the variance of the process."""
        return math.exp(self._logs[-1]) + JITTER

    def divide(self, coordinates: Floats) -> Floats:
        """Return coordinates divided by their length scales."""
        factors = np.exp(-self._logs[:-1])[self._scale_of]
        return np.asarray(coordinates * factors.astype(coordinates.dtype))

    def fit(self, coordinates: Floats, values: Floats) -> None:
        """Take `STEPS` steps of Rprop, which uses only the signs of the slope, to the most probable scales.

        Args:
            coordinates: `[points, coordinates]`, not divided.
            values: `[points]`, mean near 0.
        """
        count = len(values)
        apart = np.zeros((len(self._logs) - 1, count, count))  # squared, by length scale
        for column, scale in zip(coordinates.T.astype(float), self._scale_of, strict=True):
            apart[scale] += (column[:, None] - column) ** 2
        flat = apart.reshape(len(apart), -1)
        low, high = np.full((2, len(self._logs)), np.array(LIMITS)[:, None])
        low[-1], high[-1] = NOISE_LIMITS
        logs, best = self._logs, (math.inf, self._logs)
        step, before = np.full(len(logs), FIRST_STEP), np.zeros(len(logs))
        for _ in range(STEPS):
            cost, slope = _cost(logs, flat, values)
            if cost < best[0]:
                best = cost, logs
            turned = slope * before
            step = np.clip(step * np.where(turned > 0, 1.3, np.where(turned < 0, 0.5, 1.0)), *STEP_LIMITS)
            logs, before = np.clip(logs - np.sign(slope) * step, low, high), slope
        self._logs = best[1]


def _cost(logs: Floats, apart: Floats, values: Floats) -> tuple[float, Floats]:
    """Return the negative log probability of the scales, up to a constant, and its gradient.

    The variance of the process is set to its most probable value (Rasmussen and Williams, eq. 5.8 and 5.9).
    """
    count = len(values)
    shrink = np.exp(-2.0 * logs[:-1])
    noise = math.exp(logs[-1])
    distance = np.sqrt(5.0 * (shrink @ apart).reshape(count, count))
    decay = np.exp(-distance)
    matrix = (1.0 + distance + distance**2 / 3.0) * decay
    matrix[np.diag_indices(count)] += noise + JITTER
    inverse = np.linalg.inv(matrix)
    weights = inverse @ values
    variance = max(float(values @ weights) / count, 1e-12)
    pull = 0.5 * (inverse - np.outer(weights, weights) / variance)
    slope = np.empty(len(logs))
    slope[:-1] = apart @ (pull * (5.0 / 3.0) * (1.0 + distance) * decay).ravel() * shrink
    slope[-1] = np.trace(pull) * noise
    away = np.append(logs[:-1] / SCALE_SPREAD, (logs[-1] - NOISE) / NOISE_SPREAD)
    slope += away / np.append(np.full(len(logs) - 1, SCALE_SPREAD), NOISE_SPREAD)
    half_determinant = np.log(np.diag(np.linalg.cholesky(matrix))).sum()
    return float(0.5 * count * math.log(variance) + half_determinant + 0.5 * away @ away), slope


class Posterior:
    """The Gaussian process conditioned on points, evaluated at candidates.

    Points are added a few at a time: each extends the inverse of the covariance's Cholesky factor by a row,
    and costs one pass over the candidates. A point without a value counts as if the expected value had been
    measured there. Whether points have a value at all is a second process with the same covariance.

    Attributes:
        points: Indices of the points, in the order in which they were added.
        candidates: Indices of the candidates.
    """

    def __init__(self, scales: Scales) -> None:
        self.points: list[int] = []
        self.candidates: NDArray[np.intp] = np.zeros(0, np.intp)
        self._scales = scales
        # Coordinates divided by length scales, of the points ...
        self._at: Floats = np.zeros((0, 0), np.float32)
        self._of: Floats = np.zeros((0, 0), np.float32)  # ... and of the candidates
        self._inverse: Floats = np.zeros((0, 0))  # of the Cholesky factor of the points' covariance
        # The inverse times the covariance with the candidates.
        self._rows: Floats = np.zeros((0, 0), np.float32)
        self._weights: Floats = np.zeros((0, 2))  # of the values, and of whether there is one
        self._variance = 1.0
        self._share = 1.0  # of the points, that have a value

    def add_candidates(self, indices: NDArray[np.intp], coordinates: Floats) -> None:
        """Add candidates, `[candidates, coordinates]`."""
        divided = self._scales.divide(coordinates)
        rows = self._rows_of(divided)
        first = not len(self.candidates)
        self.candidates = np.concatenate([self.candidates, indices])
        self._of = divided if first else np.concatenate([self._of, divided])
        self._rows = rows if first else np.concatenate([self._rows, rows], axis=1)

    def add_points(self, indices: list[int], coordinates: Floats) -> None:
        """Add points, `[points, coordinates]`."""
        if not indices:
            return
        old, new = len(self.points), len(indices)
        divided = self._scales.divide(coordinates)
        own = covariance(divided.astype(float), divided.astype(float)) + self._scales.noise * np.eye(new)
        shared = np.zeros((0, new))
        if old:
            shared = covariance(self._at.astype(float), divided.astype(float))
        known = self._inverse @ shared
        corner = np.linalg.inv(np.linalg.cholesky(own - known.T @ known))
        inverse = np.zeros((old + new, old + new))
        inverse[:old, :old] = self._inverse
        inverse[old:, :old] = -corner @ known.T @ self._inverse
        inverse[old:, old:] = corner
        self._inverse = inverse
        rows = covariance(divided, self._of)
        if old:
            rows -= known.T.astype(np.float32) @ self._rows
        rows = corner.astype(np.float32) @ rows
        self._rows = np.concatenate([self._rows, rows]) if old else rows
        self._at = np.concatenate([self._at, divided]) if old else divided
        self.points += indices

    def learn(self, values: Floats, usable: Floats) -> None:
        """Set what is known of all points.

        Args:
            values: `[points]`, NaN where there is none.
            usable: `[points]`, 1 where there is a value, 0 where the point was rejected, NaN where that is
                not known yet.
        """
        self._share = float(np.nanmean(usable))
        filled = self._filled(values)
        self._weights = self._inverse @ np.stack([filled, self._filled(usable - self._share)], axis=1)
        self._variance = max(float(self._weights[:, 0] @ self._weights[:, 0]) / len(values), 1e-9)

    def _filled(self, values: Floats) -> Floats:
        """Fill in the expected value where there is none, from the inverse of the covariance."""
        unknown = np.isnan(values)
        if not unknown.any():
            return values
        precision = self._inverse[:, unknown].T @ self._inverse
        pull = precision[:, ~unknown] @ values[~unknown]
        filled = values.copy()
        filled[unknown] = -np.linalg.solve(precision[:, unknown], pull)
        return filled

    def at_candidates(self) -> tuple[Floats, Floats, Floats]:
        """Return the mean, the standard deviation and the probability of a value at every candidate."""
        return self._judged(self._rows)

    def at(self, coordinates: Floats) -> tuple[Floats, Floats, Floats]:
        """Return the same at other points, whose coordinates are `[others, coordinates]`."""
        return self._judged(self._rows_of(self._scales.divide(coordinates)))

    def _rows_of(self, divided: Floats) -> Floats:
        if not self.points:
            return np.zeros((0, len(divided)), np.float32)
        return self._inverse.astype(np.float32) @ covariance(self._at, divided)

    def _judged(self, rows: Floats) -> tuple[Floats, Floats, Floats]:
        mean, usable = self._weights.T.astype(np.float32) @ rows
        left = np.maximum(1.0 - np.einsum("ij,ij->j", rows, rows), 1e-9)
        likely = np.clip(self._share + usable.astype(float), LEAST_LIKELY, 1.0)
        return mean.astype(float), np.sqrt(self._variance * left.astype(float)), likely
