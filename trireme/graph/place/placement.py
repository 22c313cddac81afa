"""Places the operations of a graph on devices: the entry point of the search."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from trireme.errors import ConfigurationError, suggestion
from trireme.graph.place.cost_arrays import Ints
from trireme.graph.place.costs import Constraints, CostGraph, Devices, Hardware, Schedule
from trireme.graph.place.prediction import Prediction, device_numbers, predict
from trireme.graph.place.problem import Problem, coarsened, problem_of
from trireme.graph.place.scheduling import earliest_task_first
from trireme.graph.place.search import improved
from trireme.graph.place.simulation import Score
from trireme.graph.place.starts import (
    at_random,
    contiguous_cuts,
    every_choice,
    packed,
    round_robin,
    single_device,
)
from trireme.graph.place.tidying import tidied

Algorithm = Literal["best", "single", "round-robin", "random", "expert", "cuts", "m-etf"]
ALGORITHMS = get_args(Algorithm)
"""How to place: `best` tries all the others, improves the best of them, and takes the best."""

COARSE_NODES = 200
"""The largest number of nodes that the search works with; larger graphs are coarsened first."""

_FAST: tuple[Algorithm, ...] = ("round-robin", "m-etf")

RANDOM_CHOICES = 100
"""How many random placements `best` looks at, fewer of large graphs."""

GAIN = 0.02
"""How much smaller the risk of a placement on several devices must be than that on the best one."""


@dataclass(frozen=True)
class Placement:
    """Where each operation is, and why there."""

    devices: Devices  # the name of the device of each operation
    algorithm: str  # what found it
    reason: str  # the same in a sentence, with the next best
    prediction: Prediction  # the predicted step time, memory and traffic
    # the seconds of a step that each algorithm reaches, and None where what it found does not fit
    tried: Mapping[str, float | None]


def place(
    graph: CostGraph,
    hardware: Hardware,
    constraints: Constraints | None = None,
    *,
    micro_batches: int = 1,
    schedule: Schedule = "gpipe",
    algorithm: Algorithm = "best",
    expert: Devices | None = None,
    seed: int = 0,
    evaluations: int = 3000,
) -> Placement:
    """Chooses a device for each operation, such that a step is short and fits the memory limits.

    Equal arguments give equal placements, in every process. Of two placements the one with the
    smaller risk is better: the duration of a step and a tenth of that of its transfers, whose
    durations are less certain than those of computations. But everything stays on one device, as
    far as the constraints allow it, unless another placement makes the risk smaller by at least
    `GAIN`; and what local search has moved for less than `tidying.NOISE` is undone.
    """
    if algorithm not in ALGORITHMS:
        close = suggestion(algorithm, ALGORITHMS)
        raise ConfigurationError(
            f"unknown placement algorithm {algorithm!r}{close}: there are {', '.join(ALGORITHMS)}"
        )
    problem = problem_of(graph, hardware, constraints or Constraints(), micro_batches, schedule)
    candidates = dict[str, Ints]()
    if expert is not None:
        candidates["expert"] = _checked(graph, hardware, problem, expert)
    elif algorithm == "expert":
        raise ConfigurationError("the placement algorithm expert needs a placement: pass `expert`")
    _check_room(problem)
    if algorithm == "best":
        candidates |= _searched(problem, candidates, seed, evaluations)
    elif algorithm != "expert":
        candidates = _starts(problem, algorithm, random.Random(seed))
    scores = {name: problem.score(choice) for name, choice in candidates.items()}
    name = _preferred(scores)
    if algorithm == "best" and name not in ("expert", "exhaustive"):
        tidy = tidied(problem, candidates[name], _affordable(problem, evaluations) // 4)
        score = problem.score(tidy)
        if expert is None or score < scores["expert"]:
            candidates[name], scores[name] = tidy, score
            # Not the next best, which is as untidy: only one device is preferred to it.
            rest = {name, "expert"}.union(filter(_alone, scores))
            name = _preferred({each: scores[each] for each in scores if each in rest})
    placed = candidates[name][problem.units]
    if scores[name].excess > 0:
        raise _too_large(problem, placed)
    devices = {
        each: hardware.devices[number].name
        for each, number in zip(graph.positions, placed.tolist(), strict=True)
    }
    return Placement(
        devices,
        name,
        _reason(name, scores),
        predict(graph, hardware, devices, micro_batches, schedule),
        {each: None if score.excess else score.seconds for each, score in scores.items()},
    )


def _preferred(scores: Mapping[str, Score]) -> str:
    """Returns the name of the best placement, or of one device's if it is nearly as good.

    But `expert`, if it is there, is not replaced by anything worse.
    """
    best = min(scores, key=scores.__getitem__)
    alone = list(filter(_alone, scores))
    if not alone:
        return best
    name = min(alone, key=scores.__getitem__)
    single = scores[name]
    if "expert" in scores and scores["expert"] < single:
        return best
    near = single.excess <= scores[best].excess and scores[best].risk > (1 - GAIN) * single.risk
    return name if near else best


def _alone(name: str) -> bool:
    return name.startswith("single ") and "," not in name


def _checked(graph: CostGraph, hardware: Hardware, problem: Problem, expert: Devices) -> Ints:
    placed = device_numbers(graph, hardware, expert)
    choice = problem.nearest_choice(placed)
    wrong = np.flatnonzero(choice[problem.units] != placed)
    if len(wrong):
        name = graph.operations[wrong[0]].name
        raise ConfigurationError(
            f"the expert placement breaks the constraints: {name!r} is on {expert[name]}, where it "
            "may not be, or apart from an operation with which it must be"
        )
    return choice


def _starts(problem: Problem, algorithm: Algorithm, numbers: random.Random) -> dict[str, Ints]:
    """Returns the placements of one algorithm, or with `best` of each, by their names."""
    every = algorithm == "best"
    devices = problem.simulator.hardware.devices
    starts = dict[str, Ints]()
    if every or algorithm == "single":
        starts |= {
            f"single {device.name}": single_device(problem, number)
            for number, device in enumerate(devices)
        }
    if every or algorithm == "round-robin":
        starts["round-robin"] = round_robin(problem)
    if every or algorithm == "cuts":
        starts |= {
            f"cuts for {number}": choice
            for number, choice in enumerate(contiguous_cuts(problem), start=1)
        }
    if every or algorithm == "m-etf":
        starts["m-etf"] = earliest_task_first(problem)
    if every and np.isfinite(problem.simulator.limits).any():
        starts["packed"] = packed(problem)
    if every:
        count = _affordable(problem, 10 * RANDOM_CHOICES) // 10
        drawn = [at_random(problem, numbers) for _ in range(count)]
        starts["random"] = min(drawn, key=problem.score)
    elif algorithm == "random":
        starts["random"] = at_random(problem, numbers)
    return starts


def _searched(
    problem: Problem, given: Mapping[str, Ints], seed: int, evaluations: int
) -> dict[str, Ints]:
    """Returns what each algorithm finds, and what local search makes of the best of them."""
    every = every_choice(problem, evaluations)
    if every is not None:
        alone = _starts(problem, "single", random.Random(seed))
        return {"exhaustive": min(every, key=problem.score)} | alone
    numbers = random.Random(seed)
    coarse, runs = coarsened(problem, COARSE_NODES)
    # These are fast enough for the operations themselves.
    plain: dict[str, Ints] = {name: _starts(problem, name, numbers)[name] for name in _FAST}
    starts = _starts(coarse, "best", numbers)
    starts |= {name: coarse.nearest_choice(_fused(problem, runs, choice, coarse))
               for name, choice in (plain | dict(given)).items()}  # fmt: skip
    found = {name: _lifted(problem, coarse, runs, each) for name, each in starts.items()}
    found |= plain
    chosen = _different(coarse, starts)
    turns = _affordable(coarse, evaluations) // 2
    better = {
        name: improved(coarse, starts[name], turns // len(chosen), numbers)[0] for name in chosen
    }
    # Half of the time for all of them; the other half for those that have come furthest.
    furthest = _different(coarse, better)[:2]
    for name in furthest:
        better[name], _ = improved(coarse, better[name], turns // len(furthest), numbers)
    found |= {
        f"{name}, local search": _lifted(problem, coarse, runs, choice)
        for name, choice in better.items()
    }
    if coarse is not problem:
        everything = found | dict(given)
        name = min(everything, key=lambda each: problem.score(everything[each]))
        finest, _ = improved(
            problem, everything[name], _affordable(problem, evaluations) // 4, numbers
        )
        found[f"{name.removesuffix(', local search')}, local search on operations"] = finest
    # What is given is not replaced by what the coarse graph makes of it.
    return {name: choice for name, choice in found.items() if name not in given}


def _different(problem: Problem, choices: Mapping[str, Ints]) -> list[str]:
    """Returns the names of choices, the best first, without those that equal a better one.

    Of several of one kind, such as cuts, only the best counts, and a random one only if no other is
    better.
    """
    ranked = sorted(choices, key=lambda name: problem.score(choices[name]))
    found = list[str]()
    for name in ranked:
        kinds = {other.split()[0] for other in found}
        if name.split()[0] in kinds or (name == "random" and found):
            continue
        if all((choices[name] != choices[other]).any() for other in found):
            found.append(name)
    return found


def _affordable(problem: Problem, evaluations: int) -> int:
    """Returns how many placements to simulate: fewer for large graphs, which take longer."""
    readings = len(problem.simulator.costs.values) * problem.simulator.micro_batches
    return min(evaluations, 1_000_000 // (150 + readings))


def _fused(problem: Problem, runs: Ints, choice: Ints, coarse: Problem) -> Ints:
    """Returns where the largest part of each coarse node is."""
    votes = np.zeros((len(coarse.units), problem.simulator.devices))
    np.add.at(votes, (runs, choice[problem.units]), problem.weights + 1e-12)
    placed: Ints = votes.argmax(axis=1)
    return placed


def _lifted(problem: Problem, coarse: Problem, runs: Ints, choice: Ints) -> Ints:
    """Returns the choice for operations that a choice for coarse nodes is."""
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
        reason += (
            f"; {sum(score.excess > 0 for score in scores.values())} of {len(scores)} too large"
        )
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
    needs = ", ".join(
        f"{device.name}: {int(peak)}"
        for device, peak in zip(simulator.hardware.devices, peaks, strict=True)
    )
    return ConfigurationError(
        f"no placement was found that fits the memory limits ({_limits(problem)} bytes): the "
        f"closest needs {needs}; {_ADVICE}"
    )
