"""Places the operations of a graph on devices: the entry point of the search."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

import numpy as np

from trireme.errors import ConfigurationError
from trireme.graph.place.costs import Constraints, CostGraph, Devices, Hardware, Ints
from trireme.graph.place.prediction import Prediction, predict
from trireme.graph.place.problem import Problem, coarsened, problem_of
from trireme.graph.place.search import improved
from trireme.graph.place.simulation import Score
from trireme.graph.place.starts import contiguous_cuts, round_robin

Algorithm = Literal["best", "single", "round-robin", "cuts"]
ALGORITHMS = get_args(Algorithm)
"""How to place: `best` tries `single` and `cuts`, then all placements or a search from the best."""

COARSE_NODES = 200
"""The largest number of nodes that the search works with; larger graphs are coarsened first."""

GAIN = 0.02
"""How much smaller the risk of a placement on several devices must be than that on the best one."""

_STARTS = 3  # how many of the simple placements local search begins with


@dataclass(frozen=True)
class Placement:
    """Where each operation is, and why there."""

    devices: Devices
    algorithm: str  # what found it
    prediction: Prediction
    tried: Mapping[str, float | None]  # the seconds that each reaches; None if it does not fit


def place(
    graph: CostGraph,
    hardware: Hardware,
    constraints: Constraints | None = None,
    *,
    micro_batches: int = 1,
    algorithm: Algorithm = "best",
    seed: int = 0,
    evaluations: int = 3000,
) -> Placement:
    """Chooses a device for each operation, such that a step is short and fits the memory limits.

    Equal arguments give equal placements, in every process. Of two placements the one with the
    smaller risk is better: the duration of a step and a tenth of that of its transfers, whose
    durations are less certain than those of computations. But everything stays on one device, as
    far as the constraints allow it, unless another placement makes the risk smaller by `GAIN`.
    The search looks at `evaluations` placements at most.

    Raises:
        ConfigurationError: no placement that was found fits, or impossible constraints.
    """
    problem = problem_of(graph, hardware, constraints or Constraints(), micro_batches)
    if algorithm == "best":
        candidates = _searched(problem, random.Random(seed), evaluations)
    else:
        candidates = _starts(problem, algorithm)
    scores = {name: problem.score(choice) for name, choice in candidates.items()}
    name = _preferred(scores)
    placed = candidates[name][problem.units]
    if scores[name].excess > 0:
        raise _too_large(problem, placed)
    names = [hardware.devices[number].name for number in placed.tolist()]
    devices = dict(zip(graph.positions, names, strict=True))
    return Placement(
        devices,
        name,
        predict(graph, hardware, devices, micro_batches),
        {each: None if score.excess else score.seconds for each, score in scores.items()},
    )


def _preferred(scores: Mapping[str, Score]) -> str:
    """Returns the name of the best placement, or of one device's if it is nearly as good."""
    best = min(scores, key=scores.__getitem__)
    alone = (each for each in scores if each.startswith("single ") and "," not in each)
    name = min(alone, key=scores.__getitem__, default=best)
    single = scores[name]
    near = single.excess <= scores[best].excess and scores[best].risk > (1 - GAIN) * single.risk
    return name if near else best


def _starts(problem: Problem, algorithm: str) -> dict[str, Ints]:
    match algorithm:
        case "single":
            devices = enumerate(problem.simulator.hardware.devices)
            return {
                f"single {each.name}": problem.nearest_choice(np.full(len(problem.units), number))
                for number, each in devices
            }
        case "cuts":
            cuts = enumerate(contiguous_cuts(problem), start=1)
            return {f"cuts for {number}": choice for number, choice in cuts}
    return {algorithm: round_robin(problem)}


def _searched(problem: Problem, numbers: random.Random, evaluations: int) -> dict[str, Ints]:
    """Returns what each algorithm finds, and the best of all where there are few enough.

    Else local search improves the best of those.
    """
    coarse, runs = coarsened(problem, COARSE_NODES)
    starts = _starts(coarse, "single") | _starts(coarse, "cuts")
    able = [np.flatnonzero(row) for row in coarse.allowed]
    if math.prod(map(len, able)) <= evaluations:
        every = (np.array(each, dtype=np.intp) for each in product(*able))
        better = {"every placement": min(every, key=coarse.score)}
    else:
        better = _improved(coarse, starts, numbers, evaluations)
    return {
        name: problem.nearest_choice(choice[coarse.units][runs])
        for name, choice in (starts | better).items()
    }


def _improved(
    coarse: Problem, starts: Mapping[str, Ints], numbers: random.Random, evaluations: int
) -> dict[str, Ints]:
    # A simulation of a large graph takes longer.
    readings = len(coarse.simulator.costs.values) * coarse.simulator.micro_batches
    turns = min(evaluations, 1_000_000 // (150 + readings)) // 2
    ranked = sorted(starts, key=lambda each: coarse.score(starts[each]))
    kinds = {name.split()[0]: name for name in reversed(ranked)}  # the best one of each
    chosen = sorted(kinds.values(), key=ranked.index)[:_STARTS]
    better = {
        f"{name}, local search": improved(coarse, starts[name], turns // len(chosen), numbers)
        for name in chosen
    }
    # Half of the time for all of them; the other half for the one that has come furthest.
    best = min(better, key=lambda each: coarse.score(better[each]))
    better[best] = improved(coarse, better[best], turns, numbers)
    return better


def _too_large(problem: Problem, placed: Ints) -> ConfigurationError:
    simulator = problem.simulator
    peaks = simulator.peak_bytes(simulator.parts(placed))
    devices = simulator.hardware.devices
    needs = ", ".join(f"{at.name}: {int(peak)}" for at, peak in zip(devices, peaks, strict=True))
    limits = ", ".join(f"{at.name}: {at.memory_bytes or 'no limit'}" for at in devices)
    return ConfigurationError(
        f"no placement was found that fits the memory limits ({limits} bytes): the closest needs "
        f"{needs}; use more devices, smaller batches or more micro-batches, or loosen the "
        "constraints"
    )
