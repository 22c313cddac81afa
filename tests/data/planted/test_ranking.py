"""The area under the curve, as a plain count of pairs gives it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numba")

from trireme.data.planted import area_under_curve
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
