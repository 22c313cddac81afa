"""How well scores rank: the area under the curve of true against false positives."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from trireme.errors import ConfigurationError


def area_under_curve(labels: npt.ArrayLike, scores: npt.ArrayLike) -> float:
    """Returns the probability that a row of label 1 has a higher score than one of label 0.

    Rows of the same score count half.
    """
    positive, score = np.asarray(labels) > 0, np.asarray(scores, np.float64)
    if positive.shape != score.shape or score.ndim != 1:
        raise ConfigurationError(
            f"labels of shape {positive.shape} and scores of shape {score.shape}: one of each a row"
        )
    if np.isnan(score).any():
        raise ConfigurationError("a score is NaN: the model has diverged")
    ones = int(positive.sum())
    zeros = len(positive) - ones
    if not ones or not zeros:
        raise ConfigurationError(
            f"of {len(positive)} rows {ones} have the label 1: both are needed"
        )
    _, place, count = np.unique(score, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2.0)[place]
    return float((ranks[positive].sum() - ones * (ones + 1) / 2.0) / ones / zeros)


class AreaUnderCurve:
    """The area under the curve as a metric of a session: over all rows of an evaluation.

        session = trireme.Session(model, loss, optimizer, metrics={"auc": AreaUnderCurve()})

    It keeps the scores of all rows until it is computed.
    """

    def __init__(self) -> None:
        self._batches: list[tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]] = []

    def update(self, scores: torch.Tensor, labels: torch.Tensor) -> None:
        """Adds rows."""
        score = scores.detach().to("cpu", torch.float32).flatten()
        self._batches.append((score.numpy(), (labels > 0).cpu().flatten().numpy()))

    def compute(self) -> float:
        """Returns the area over all rows since `reset`; NaN where all labels are the same."""
        scores, labels = (np.concatenate(parts) for parts in zip(*self._batches, strict=True))
        if labels.all() or not labels.any():
            return math.nan
        return area_under_curve(labels, scores)

    def reset(self) -> None:
        """Forgets all rows."""
        self._batches.clear()
