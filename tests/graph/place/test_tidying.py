"""What local search moves for nothing is moved back, and what gains something stays."""

from __future__ import annotations

import random
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.reference import graphs, machines
from trireme.graph.place.costs import (
    Constraints,
    CostGraph,
    Device,
    Hardware,
    Link,
    Operation,
    Schedule,
)
from trireme.graph.place.placement import place
from trireme.graph.place.problem import problem_of
from trireme.graph.place.starts import at_random
from trireme.graph.place.tidying import tidied

TWO = Hardware((Device("a"), Device("b")), Link(20e-6, 1e9))
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


def counted(towers: int, modules: int) -> CostGraph:
    """Towers that meet at the end, of modules that also count their calls in a buffer."""
    operations: list[Operation] = []
    ends: list[str] = []
    for tower in range(towers):
        last: tuple[str, ...] = ()
        for number in range(modules):
            name = f"{tower}.{number}"
            operations += [
                Operation(f"{name}.count", output_bytes=8, stored=True, differentiable=False),
                Operation(f"{name}.conv", last, 1e-3, 2e-3, output_bytes=10**4),
                Operation(
                    f"{name}.add", (f"{name}.count",), 7e-6, output_bytes=8, differentiable=False
                ),
                Operation(f"{name}.norm", (f"{name}.conv",), 1e-4, 2e-4, output_bytes=10**4),
            ]
            last = (f"{name}.norm",)
        ends += last
    operations.append(Operation("end", tuple(ends), 1e-4, 1e-4))
    return CostGraph(tuple(operations), segment_seconds=3e-5)


def test_tiny_operations_return_to_their_modules() -> None:
    graph = counted(2, 12)
    problem = problem_of(graph, TWO, Constraints(), 1)
    good = np.array([int(each.name.startswith("1.")) for each in graph.operations])
    numbers = random.Random(0)
    scattered = good.copy()
    for at, each in enumerate(graph.operations):
        if each.name.endswith(".add") and numbers.random() < 0.5:
            scattered[at] ^= 1
            if numbers.random() < 0.5:  # with its buffer, so that nothing is transferred
                scattered[at - 2] ^= 1
    # The end may be on either device.
    assert (tidied(problem, scattered, 500) == good)[:-1].all()
    assert (tidied(problem, scattered, 0) == scattered).all()


def test_a_placement_has_no_tiny_operations_apart_from_their_modules() -> None:
    found = place(counted(2, 12), TWO)
    assert len({found.devices[f"{tower}.3.conv"] for tower in (0, 1)}) == 2
    for name, device in found.devices.items():
        if name.endswith(".add"):
            assert device == found.devices[f"{name.removesuffix('.add')}.norm"], name


@pytest.mark.parametrize(("seconds", "devices"), [(0.014, 1), (0.06, 2)])
def test_less_than_a_fiftieth_is_no_reason_for_a_second_device(
    seconds: float, devices: int
) -> None:
    # One operation beside a chain of 0.9 s: elsewhere it saves its duration.
    chain = [Operation(f"o{n}", (f"o{n - 1}",) if n else (), 0.03, 0.06) for n in range(10)]
    beside = Operation("beside", (), seconds / 3, 2 * seconds / 3)
    graph = CostGraph((*chain, beside, Operation("end", ("o9", "beside"), 1e-6, 1e-6)))
    for evaluations in (10_000, 300):  # all placements, and the search
        found = place(graph, TWO, evaluations=evaluations)
        assert len(set(found.devices.values())) == devices


@settings(max_examples=40)
@given(graphs(most=12, least=4), machines(memory=True), st.sampled_from(SCHEDULES), st.data())
def test_what_is_tidied_is_as_good_but_for_noise_and_respects_the_constraints(
    graph: CostGraph, hardware: Hardware, schedule: Schedule, data: st.DataObject
) -> None:
    names = [each.name for each in graph.operations]
    devices = st.sampled_from([device.name for device in hardware.devices])
    constraints = Constraints({names[1]: data.draw(devices)}, ((names[0], names[3]),))
    problem = problem_of(graph, hardware, constraints, 2, schedule)
    choice = at_random(problem, random.Random(data.draw(st.integers(0, 100))))
    found = tidied(problem, choice, 100)
    before, after = problem.score(choice), problem.score(found)
    assert after.excess <= before.excess
    assert after.risk <= before.risk * 1.005 + 1e-12
    assert problem.allowed[np.arange(len(found)), found].all()
