"""Logistic regression by FTRL-proximal, written out: McMahan et al., KDD 2013, algorithm 1."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from sparse_data import SparseBatch

from trireme.tables.compiled import compiled

Floats = npt.NDArray[np.float32]
Wholes = npt.NDArray[np.int64]


class Regression:
    """The state of each feature: z, and n, the sum of squared gradients."""

    def __init__(self, features: int, *, alpha: float, beta: float = 1.0, l1: float = 0.0) -> None:
        self.z = np.zeros(features, np.float32)
        self.n = np.zeros(features, np.float32)
        self._rates = alpha, beta, l1

    def learn(self, batch: SparseBatch) -> None:
        """Learns from the rows, one after the other."""
        learn(*self._rows(batch), batch.labels.numpy(), self.z, self.n, *self._rates)

    def logits(self, batch: SparseBatch) -> npt.NDArray[np.float64]:
        return scores(*self._rows(batch), self.z, self.n, *self._rates)

    def _rows(self, batch: SparseBatch) -> tuple[Wholes, Wholes]:
        return batch.bounds.numpy(), batch.keys.numpy()


@compiled
def weight(z: float, n: float, alpha: float, beta: float, l1: float) -> float:
    if abs(z) <= l1:
        return 0.0
    return -(z - (l1 if z > 0 else -l1)) / ((beta + np.sqrt(n)) / alpha)


@compiled
def scores(
    bounds: Wholes, keys: Wholes, z: Floats, n: Floats, alpha: float, beta: float, l1: float
) -> npt.NDArray[np.float64]:
    found = np.zeros(len(bounds) - 1)
    for row in range(len(found)):
        for entry in range(bounds[row], bounds[row + 1]):
            found[row] += weight(z[keys[entry]], n[keys[entry]], alpha, beta, l1)
    return found


@compiled
def learn(
    bounds: Wholes,
    keys: Wholes,
    labels: Floats,
    z: Floats,
    n: Floats,
    alpha: float,
    beta: float,
    l1: float,
) -> None:
    for row in range(len(labels)):
        score = 0.0
        for entry in range(bounds[row], bounds[row + 1]):
            score += weight(z[keys[entry]], n[keys[entry]], alpha, beta, l1)
        gradient = 1.0 / (1.0 + np.exp(-score)) - labels[row]
        for entry in range(bounds[row], bounds[row + 1]):
            key = keys[entry]
            sigma = (np.sqrt(n[key] + gradient * gradient) - np.sqrt(n[key])) / alpha
            z[key] += gradient - sigma * weight(z[key], n[key], alpha, beta, l1)
            n[key] += gradient * gradient
