"""Sparse examples of a planted logistic regression: the same for every architecture. NumPy only."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np

BATCH = 1000
"""Examples of a step of one worker."""

NONZEROS = 40
"""Features of an example that are not 0; each is 1."""

RATE = 0.1
"""The learning rate of plain gradient descent on the mean loss."""

_BATCHES = 8


class Examples(NamedTuple):
    """A batch.

    Attributes:
        features: int64 of shape (examples, nonzeros).
        labels: 0 or 1, float32 of shape (examples,).
    """

    features: Any
    labels: Any


def batches(features: int, worker: int) -> Iterator[Examples]:
    """Yields batches of a worker without end; a few are made, and come again.

    Args:
        features: how many there are.
        worker: the worker; each has other examples.
    """
    random = np.random.default_rng((features, worker))
    made = []
    for _ in range(_BATCHES):
        chosen = random.integers(0, features, (BATCH, NONZEROS))
        planted = np.sin(chosen * 12.9898).sum(1)  # a weight for each feature
        labels = random.random(BATCH) < 1 / (1 + np.exp(-planted))
        made.append(Examples(chosen, labels.astype(np.float32)))
    return cycle(made)


def loss_and_slope(logits: Any, labels: Any) -> tuple[float, Any]:
    """Returns the mean logistic loss, and its gradient by each logit."""
    probabilities = 1 / (1 + np.exp(-logits))
    likely = np.where(labels > 0, probabilities, 1 - probabilities)
    loss = float(-np.log(np.maximum(likely, 1e-12)).mean())
    return loss, ((probabilities - labels) / labels.size).astype(np.float32)
