"""Means over replicas, by hand."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from trireme.errors import ConfigurationError
from trireme.parallel.gradients import EqualBatchMean


@pytest.mark.parametrize(
    ("examples", "made"), [(1e-9, "a step without examples"), (3.0, "a step of 3 examples")]
)
def test_a_step_of_another_number_of_examples_is_named(examples: float, made: str) -> None:
    """A step that only takes part counts as of a number that is hardly above 0."""
    group = Mock(size=2, rank=1, count=lambda mine: lambda: mine + 4.0)
    with pytest.raises(ConfigurationError, match=f"rank 1 made {made}, and others of other"):
        EqualBatchMean(group, ()).scale_factor(examples)()
