"""Places the operations of a graph on devices: the entry point of the search."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from trireme.errors import ConfigurationError
from trireme.graph.place.costs import Constraints, CostGraph, Devices, Hardware, Ints, Schedule
from trireme.graph.place.prediction import Prediction, predict
from trireme.graph.place.problem import Problem, coarsened, problem_of
from trireme.graph.place.search import improved
from trireme.graph.place.simulation import Score
from trireme.graph.place.starts import (
    at_random,
    contiguous_cuts,
    earliest_task_first,
    every_choice,
    packed,
    round_robin,
    single_device,
)
from trireme.graph.place.tidying import tidied

Algorithm = Literal["best", "single", "round-robin", "random", "cuts", "m-etf"]
ALGORITHMS = get_args(Algorithm)
"""How to place: `best` tries all the others, improves the best of them, and takes the best."""

COARSE_NODES = 200
"""The largest number of nodes that the search works with; larger graphs are coarsened first."""

GAIN = 0.02
"""How much smaller the risk of a placement on several devices must be than that on the best one."""


@dataclass(frozen=True)
class Placement:
    """Where each operation is, and why there."""

    devices: Devices
    algorithm: str  # what found it
    reason: str  # the same in a sentence, with the next best
    prediction: Prediction
    tried: Mapping[str, float | None]  # the seconds that each reaches; None if it does not fit


def place(
    graph: CostGraph,
    hardware: Hardware,
    constraints: Constraints | None = None,
    *,
    micro_batches: int = 1,
    schedule: Schedule = "gpipe",
    algorithm: Algorithm = "best",
    seed: int = 0,
    evaluations: int = 3000,
) -> Placement:
    """Chooses a device for each operation, such that a step is short and fits the memory limits.

    Equal arguments give equal placements, in every process. Of two placements the one with the
    smaller risk is better: the duration of a step and a tenth of that of its transfers, whose
    durations are less certain than those of computations. But everything stays on one device, as
    far as the constraints allow it, unless another placement makes the risk smaller by at least
    `GAIN`; and what local search has moved for less than `tidying.NOISE` is undone. The local
    search looks at `evaluations` placements, fewer of large graphs; with at most as many in all it
    looks at each, and finds the optimum.

    Raises:
        ConfigurationError: no placement that was found fits, or impossible constraints.
    """
    problem = problem_of(graph, hardware, constraints or Constraints(), micro_batches, schedule)
    _check_room(problem)
    numbers = random.Random(seed)
    if algorithm == "best":
        candidates = _searched(problem, numbers, evaluations)
    else:
        candidates = _starts(problem, algorithm, numbers)
    scores = {name: problem.score(choice) for name, choice in candidates.items()}
    name = _preferred(scores)
    if algorithm == "best" and name != "exhaustive":
        turns = _affordable(problem, evaluations) // 4
        candidates[name] = tidied(problem, candidates[name], turns)
        scores[name] = problem.score(candidates[name])
        # Not the next best, which is as untidy: only one device is preferred to it.
        name = _preferred({each: scores[each] for each in scores if each == name or _alone(each)})
    placed = candidates[name][problem.units]
    if scores[name].excess > 0:
        raise _too_large(problem, placed)
    names = [hardware.devices[number].name for number in placed.tolist()]
    devices = dict(zip(graph.positions, names, strict=True))
    return Placement(
        devices,
        name,
        _reason(name, scores),
        predict(graph, hardware, devices, micro_batches, schedule),
        {each: None if score.excess else score.seconds for each, score in scores.items()},
    )


def _preferred(scores: Mapping[str, Score]) -> str:
    """Returns the name of the best placement, or of one device's if it is nearly as good."""
    best = min(scores, key=scores.__getitem__)
    name = min(filter(_alone, scores), key=scores.__getitem__, default=best)
    single = scores[name]
    near = single.excess <= scores[best].excess and scores[best].risk > (1 - GAIN) * single.risk
    return name if near else best


def _alone(name: str) -> bool:
    return name.startswith("single ") and "," not in name


def _starts(problem: Problem, algorithm: str, numbers: random.Random) -> dict[str, Ints]:
    match algorithm:
        case "single":
            devices = enumerate(problem.simulator.hardware.devices)
            return {f"single {each.name}": single_device(problem, at) for at, each in devices}
        case "cuts":
            cuts = enumerate(contiguous_cuts(problem), start=1)
            return {f"cuts for {number}": choice for number, choice in cuts}
        case "round-robin":
            return {algorithm: round_robin(problem)}
        case "m-etf":
            return {algorithm: earliest_task_first(problem)}
    return {algorithm: at_random(problem, numbers)}


def _searched(problem: Problem, numbers: random.Random, evaluations: int) -> dict[str, Ints]:
    """Returns what each algorithm finds, and what local search makes of the best of them."""
    if (every := every_choice(problem, evaluations)) is not None:
        best = {"exhaustive": min(every, key=problem.score)}
        return best | _starts(problem, "single", numbers)
    coarse, runs = coarsened(problem, COARSE_NODES)
    starts = _starts(coarse, "single", numbers) | _starts(coarse, "cuts", numbers)
    if np.isfinite(problem.simulator.limits).any():
        starts["packed"] = packed(coarse)
    # These are fast enough for the operations themselves.
    plain = _starts(problem, "round-robin", numbers) | _starts(problem, "m-etf", numbers)
    for name, choice in plain.items():
        starts[name] = _fused(problem, runs, choice, coarse)
    found = {name: _lifted(problem, coarse, runs, each) for name, each in starts.items()} | plain
    chosen = _different(coarse, starts)
    turns = _affordable(coarse, evaluations) // 2
    better = {
        name: improved(coarse, starts[name], turns // len(chosen), numbers) for name in chosen
    }
    # Half of the time for all of them; the other half for those that have come furthest.
    furthest = _different(coarse, better)[:2]
    for name in furthest:
        better[name] = improved(coarse, better[name], turns // len(furthest), numbers)
    for name, choice in better.items():
        found[f"{name}, local search"] = _lifted(problem, coarse, runs, choice)
    if coarse is not problem:
        name = min(found, key=lambda each: problem.score(found[each]))
        turns = _affordable(problem, evaluations) // 4
        finest = improved(problem, found[name], turns, numbers)
        found[f"{name.removesuffix(', local search')}, local search on operations"] = finest
    return found


def _different(problem: Problem, choices: Mapping[str, Ints]) -> list[str]:
    """Returns the names of choices, the best first: of one kind, such as cuts, only the best."""
    found = list[str]()
    for name in sorted(choices, key=lambda each: problem.score(choices[each])):
        alike = any(name.split()[0] == other.split()[0] for other in found)
        if not alike and all((choices[name] != choices[other]).any() for other in found):
            found.append(name)
    return found


def _affordable(problem: Problem, evaluations: int) -> int:
    """Returns how many placements to simulate: fewer for large graphs, which take longer."""
    readings = len(problem.simulator.costs.values) * problem.simulator.micro_batches
    return min(evaluations, 1_000_000 // (150 + readings))


def _fused(problem: Problem, runs: Ints, choice: Ints, coarse: Problem) -> Ints:
    """Returns the choice for coarse nodes: where the largest part of each is."""
    votes = np.zeros((len(coarse.units), problem.simulator.devices))
    np.add.at(votes, (runs, choice[problem.units]), problem.weights + 1e-12)
    return coarse.nearest_choice(votes.argmax(axis=1))


def _lifted(problem: Problem, coarse: Problem, runs: Ints, choice: Ints) -> Ints:
    return problem.nearest_choice(choice[coarse.units][runs])


def _reason(name: str, scores: Mapping[str, Score]) -> str:
    best = scores[name]
    others = [(score.seconds, other) for other, score in scores.items() if not score.excess]
    longer = [each for each in others if each[0] > best.seconds]
    reason = f"{name}: {1e3 * best.seconds:.4g} ms a step"
    if longer:
        seconds, other = min(longer)
        reason += f"; next {other}: {1e3 * seconds:.4g} ms"
    if len(scores) > 1:
        too_large = sum(score.excess > 0 for score in scores.values())
        reason += f"; {too_large} of {len(scores)} too large"
    return reason


def _check_room(problem: Problem) -> None:
    """Refuses what cannot fit, whatever the placement."""
    limits, sizes = problem.simulator.limits, problem.unit_bytes
    total = problem.simulator.held.sum()
    if total > limits.sum():
        raise ConfigurationError(
            f"the graph needs at least {int(total)} bytes and the devices have "
            f"{int(limits.sum())} ({_limits(problem)}): {_ADVICE}"
        )
    most = np.where(problem.allowed, limits, 0.0).max(axis=1, initial=0.0)
    large = np.flatnonzero(sizes > most)
    if len(large):
        raise ConfigurationError(
            f"operations that must be on one device need {int(sizes[large[0]])} bytes, and the "
            f"largest device where they may be has {int(most[large[0]])} ({_limits(problem)}): "
            f"{_ADVICE}"
        )


_ADVICE = "use more devices, smaller batches or more micro-batches, or loosen the constraints"


def _limits(problem: Problem) -> str:
    return ", ".join(
        f"{device.name}: {'no limit' if device.memory_bytes is None else device.memory_bytes}"
        for device in problem.simulator.hardware.devices
    )


def _too_large(problem: Problem, placed: Ints) -> ConfigurationError:
    simulator = problem.simulator
    peaks = simulator.peak_bytes(simulator.parts(placed))
    devices = zip(simulator.hardware.devices, peaks, strict=True)
    needs = ", ".join(f"{device.name}: {int(peak)}" for device, peak in devices)
    return ConfigurationError(
        f"no placement was found that fits the memory limits ({_limits(problem)} bytes): the "
        f"closest needs {needs}; {_ADVICE}"
    )
