"""The area under the curve, as a plain count of pairs gives it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sparse_data.ranking import AreaUnderCurve, area_under_curve

from trireme.errors import ConfigurationError


@given(st.lists(st.tuples(st.booleans(), st.integers(-3, 3)), min_size=2))
def test_it_is_the_share_of_ordered_pairs(rows: list[tuple[bool, int]]) -> None:
    ones = [score for label, score in rows if label]
    zeros = [score for label, score in rows if not label]
    if not ones or not zeros:
        return
    pairs = [(a > b) + (a == b) / 2 for a in ones for b in zeros]
    found = area_under_curve([label for label, _ in rows], [score for _, score in rows])
    assert found == pytest.approx(sum(pairs) / len(pairs))


def test_what_has_no_area() -> None:
    with pytest.raises(ConfigurationError, match="of 2 rows 2 have the label 1"):
        area_under_curve([1, 1], [0.1, 0.2])
    with pytest.raises(ConfigurationError, match=r"shape \(2,\) and scores of shape \(3,\)"):
        area_under_curve([1, 0], [0.1, 0.2, 0.3])
    with pytest.raises(ConfigurationError, match="a score is NaN"):
        area_under_curve([1, 0], [0.1, np.nan])


def test_the_metric_is_over_all_batches_since_its_reset() -> None:
    metric = AreaUnderCurve()
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(30, generator=generator)
    labels = (torch.rand(30, generator=generator) < 0.4).float()
    metric.update(-scores, labels)
    metric.reset()
    for part in range(3):
        batch = slice(10 * part, 10 * part + 10)
        metric.update(scores[batch, None], labels[batch, None])
    assert metric.compute() == area_under_curve(labels.numpy(), scores.numpy())


def test_the_metric_of_one_label_is_nan() -> None:
    metric = AreaUnderCurve()
    metric.update(torch.tensor([0.5, 0.1]), torch.tensor([1.0, 1.0]))
    assert math.isnan(metric.compute())
