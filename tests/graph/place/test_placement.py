"""Placements: good, within the limits, as the constraints say, and the same every time."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.cost_models import MODELS
from tests.graph.reference import graphs, machines
from trireme.errors import ConfigurationError
from trireme.graph.place.costs import (
    Constraints,
    CostGraph,
    Device,
    Hardware,
    Ints,
    Link,
    Operation,
)
from trireme.graph.place.placement import ALGORITHMS, GAIN, Algorithm, place
from trireme.graph.place.prediction import predict
from trireme.graph.place.problem import Problem, coarsened, problem_of
from trireme.graph.place.starts import round_robin

NAMES = ["a", "b", "c", "d"]
FOUR = Hardware(tuple(map(Device, NAMES)), Link(20e-6, 1e9))


def at_random(problem: Problem, numbers: random.Random) -> Ints:
    able = [np.flatnonzero(row).tolist() for row in problem.allowed]
    return np.array([numbers.choice(devices) for devices in able], dtype=np.intp)


@pytest.mark.slow(but=("inception-4", "lstm-1", "two-tower-4"))
@pytest.mark.thorough
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_placed_at_least_as_well_as_by_hand(name: str, micro_batches: int) -> None:
    model = MODELS[name]()
    problem = problem_of(model.graph, FOUR, model.constraints, micro_batches)
    numbers = random.Random(99)
    others = [problem.nearest_choice(np.zeros(len(problem.units), dtype=np.intp))]
    others.append(round_robin(problem))
    others += [at_random(problem, numbers) for _ in range(200)]
    seconds = [problem.score(choice).seconds for choice in others]
    expert = model.expert_on(NAMES)
    seconds.append(predict(model.graph, FOUR, expert, micro_batches).step_seconds)
    found = place(
        model.graph, FOUR, model.constraints, micro_batches=micro_batches, evaluations=1500
    )
    assert found.prediction.step_seconds <= 1.06 * min(seconds)


@settings(max_examples=15)
@given(graphs(most=6), machines(), st.integers(1, 2))
def test_a_small_graph_gets_the_optimum(
    graph: CostGraph, hardware: Hardware, micro_batches: int
) -> None:
    problem = problem_of(graph, hardware, Constraints(), micro_batches)
    every = product(range(len(hardware.devices)), repeat=len(graph.operations))
    best = min(problem.score(np.array(each)) for each in every).risk
    found = place(graph, hardware, micro_batches=micro_batches)
    placed = [hardware.numbers[found.devices[name]] for name in graph.positions]
    score = problem.score(np.array(placed))
    assert score.seconds == pytest.approx(found.prediction.step_seconds)
    assert best <= score.risk + 1e-9
    # One device, unless that costs a fiftieth.
    assert score.risk * (1 - GAIN) <= best + 1e-9


@settings(max_examples=25)
@given(graphs(most=14, least=4), machines(memory=True), st.data())
def test_limits_and_constraints_hold(
    graph: CostGraph, hardware: Hardware, data: st.DataObject
) -> None:
    names = [each.name for each in graph.operations]
    devices = [device.name for device in hardware.devices]
    pinned = {names[0]: data.draw(st.sampled_from(devices))}
    together = (tuple(data.draw(st.lists(st.sampled_from(names[1:3]), min_size=1, unique=True))),)
    banned = data.draw(st.lists(st.sampled_from(devices), max_size=len(devices) - 1, unique=True))
    constraints = Constraints(pinned, together, {names[3]: tuple(banned)})
    for algorithm in ALGORITHMS:
        try:
            found = place(graph, hardware, constraints, algorithm=algorithm, evaluations=60)
        except ConfigurationError as error:
            assert "bytes" in str(error)
            continue
        assert found.devices[names[0]] == pinned[names[0]]
        assert len({found.devices[name] for name in together[0]}) == 1
        assert found.devices[names[3]] not in banned
        for device, does in zip(hardware.devices, found.prediction.devices, strict=True):
            assert device.memory_bytes is None or does.peak_bytes <= device.memory_bytes
        assert found.tried[found.algorithm] == found.prediction.step_seconds


def row(count: int, size: int = 100) -> CostGraph:
    return CostGraph(
        tuple(
            Operation(f"o{each}", (f"o{each - 1}",) if each else (), 1e-3, 2e-3, size, 0, 1)
            for each in range(count)
        )
    )


def test_what_does_not_fit_one_device_is_divided() -> None:
    devices = tuple(Device(name, memory_bytes=1010) for name in NAMES)
    found = place(row(40), Hardware(devices, FOUR.link), evaluations=300)
    assert all(device.peak_bytes <= 1010 for device in found.prediction.devices)
    assert sorted(found.devices.values()) == [name for name in NAMES for _ in range(10)]


def test_what_fits_nowhere_is_refused_with_the_bytes() -> None:
    small = Hardware((Device("a", memory_bytes=150), Device("b", memory_bytes=120)))
    with pytest.raises(ConfigurationError, match=r"limits \(a: 150, b: 120 bytes\): the closest"):
        place(row(3), small)
    with pytest.raises(ConfigurationError, match="the closest needs a: "):
        place(row(2), small, Constraints(together=(("o0", "o1"),)))
    # Two of the three are too many for either, and all fit the sum of the limits.
    tight = Hardware((Device("a", memory_bytes=150), Device("b", memory_bytes=152)))
    with pytest.raises(ConfigurationError, match="the closest needs a: "):
        place(row(3), tight)


def test_constraints_that_leave_nothing_are_refused() -> None:
    apart = Constraints({"o0": "a", "o1": "b"}, (("o0", "o1"),))
    with pytest.raises(ConfigurationError, match="leave no device for 'o0', 'o1'"):
        place(row(2), FOUR, apart)


def test_algorithms_are_chosen_by_name() -> None:
    robin = place(row(5), FOUR, algorithm="round-robin").devices
    assert list(robin.values()) == ["a", "b", "c", "d", "a"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_equal_arguments_give_equal_placements(algorithm: Algorithm) -> None:
    graph = MODELS["inception"]().graph
    one, other = (place(graph, FOUR, algorithm=algorithm, evaluations=60) for _ in range(2))
    assert one == other


def test_two_branches_go_to_two_devices_and_a_chain_stays_together() -> None:
    found = place(MODELS["two-tower"]().graph, FOUR)
    towers = [
        {device for name, device in found.devices.items() if name.startswith(tower)}
        for tower in ("user", "item")
    ]
    assert [len(each) for each in towers] == [1, 1]
    assert towers[0] != towers[1]


@pytest.mark.parametrize(("seconds", "devices"), [(0.014, 1), (0.06, 2)])
def test_less_than_a_fiftieth_is_no_reason_for_a_second_device(
    seconds: float, devices: int
) -> None:
    # One operation beside a chain of 0.9 s: elsewhere it saves its duration.
    chain = [Operation(f"o{n}", (f"o{n - 1}",) if n else (), 0.03, 0.06) for n in range(10)]
    beside = Operation("beside", (), seconds / 3, 2 * seconds / 3)
    graph = CostGraph((*chain, beside, Operation("end", ("o9", "beside"), 1e-6, 1e-6)))
    found = place(graph, Hardware((Device("a"), Device("b")), Link(20e-6, 1e9)))
    assert len(set(found.devices.values())) == devices


@settings(max_examples=25)
@given(graphs(most=40, least=5), st.integers(1, 10))
def test_coarsening_keeps_costs_and_order(graph: CostGraph, target: int) -> None:
    problem = problem_of(graph, FOUR, Constraints(together=(("o0", "o4"),)), 1)
    coarse, runs = coarsened(problem, target)
    costs, fused = problem.simulator.costs, coarse.simulator.costs
    assert fused.forward.sum() == pytest.approx(costs.forward.sum())
    assert fused.resident.sum() == costs.resident.sum()
    assert (fused.makers[fused.values] < fused.readers).all()
    assert (np.diff(fused.makers) >= 0).all()
    assert coarse.units[runs[0]] == coarse.units[runs[4]]
    # A placement has the same memory and traffic on the coarse graph as on all operations.
    choice = at_random(coarse, random.Random(0))
    placed = choice[coarse.units]
    one, other = coarse.simulator.parts(placed), problem.simulator.parts(placed[runs])
    sent, expected = (
        sorted(zip(each.senders, each.receivers, each.sizes, strict=True))
        for each in (one.transfers, other.transfers)
    )
    assert sent == expected
    assert (coarse.simulator.peak_bytes(one) == problem.simulator.peak_bytes(other)).all()
