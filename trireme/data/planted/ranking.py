"""How well scores rank: the area under the curve of true against false positives."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trireme.errors import ConfigurationError


def area_under_curve(labels: npt.ArrayLike, scores: npt.ArrayLike) -> float:
    """Returns the probability that a row of label 1 has a higher score than one of label 0.

    Rows of the same score count half.

    Args:
        labels: 0 or 1, of shape (rows,); what is above 0 counts as 1.
        scores: of shape (rows,): logits, probabilities, or whatever rises with them.

    Raises:
        ConfigurationError: the shapes differ, a score is NaN, or all labels are the same.
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
