"""Graphs and hardware that cannot be."""

from __future__ import annotations

import math

import pytest

from trireme.errors import ConfigurationError
from trireme.graph.place.costs import CostGraph, Device, Hardware, Link, Operation


def test_operations_are_unique_and_after_what_they_read() -> None:
    with pytest.raises(ValueError, match="two operations are named 'x'"):
        CostGraph((Operation("x"), Operation("x")))
    with pytest.raises(ValueError, match="'x' reads 'y', which is not before it"):
        CostGraph((Operation("x", ("y",)), Operation("y")))
    with pytest.raises(ValueError, match="'x' reads 'x'"):
        CostGraph((Operation("x", ("x",)),))


def test_what_is_stored_is_not_computed() -> None:
    with pytest.raises(ValueError, match="'w' is stored, and cannot be computed"):
        CostGraph((Operation("w", (), 1.0, stored=True),))
    with pytest.raises(ValueError, match="'w' is stored, and cannot be computed"):
        CostGraph((Operation("x"), Operation("w", ("x",), stored=True)))


@pytest.mark.parametrize("cost", [-1.0, math.nan, math.inf])
def test_costs_are_finite_and_not_negative(cost: float) -> None:
    with pytest.raises(ValueError, match="a cost of 'x'"):
        CostGraph((Operation("x", (), cost),))
    with pytest.raises(ValueError, match="a segment cannot take"):
        CostGraph((), segment_seconds=cost)


def test_hardware_that_cannot_be() -> None:
    with pytest.raises(ConfigurationError, match="no devices"):
        Hardware(())
    with pytest.raises(ConfigurationError, match="two devices have one name: a, a"):
        Hardware((Device("a"), Device("a")))
    with pytest.raises(ConfigurationError, match="unknown device 'b'"):
        Hardware((Device("a"),), links={("a", "b"): Link()})
    with pytest.raises(ConfigurationError, match="a speed of 0"):
        Device("a", 0.0)
    with pytest.raises(ConfigurationError, match="limit of 0 bytes"):
        Device("a", memory_bytes=0)
    with pytest.raises(ConfigurationError, match="latency of -1"):
        Link(-1.0)
    with pytest.raises(ConfigurationError, match="bandwidth of 0"):
        Link(0.0, 0.0)
