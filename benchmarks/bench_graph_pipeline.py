"""(o) The transformer on two tasks: as a graph, and split by torch's own pipelining.

The graph is placed automatically. The pipeline is split at the layer that comes next to that
placement, and a second graph is placed by hand at the same layer. All have four micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.context import Context
from benchmarks.data import prepare
from benchmarks.graph_contenders import automatic
from benchmarks.graph_models import TRANSFORMER
from benchmarks.graph_pair import Measured, Pair
from benchmarks.pairs import Plan
from benchmarks.programs.task import NETWORKS
from benchmarks.replicas import Commands, Setup, Slice, take_turns, trireme_job
from benchmarks.results import Goal, Result
from trireme.graph.place.costs import Devices

GRAPH, SAME, PIPELINE = "graph, automatic", "graph, the pipeline's split", "torch's pipelining"
MICRO_BATCHES = 4
NETWORK = "transformer"


def run(context: Context) -> Result:
    """Measures the examples per second."""
    training = NETWORKS[NETWORK]
    result = Result(
        name="graph_pipeline",
        title="The transformer on two tasks: a graph, and torch's pipelining",
        unit="examples/s",
        higher_is_better=True,
        references=(PIPELINE,),
        goals=[
            Goal(f"{name} of torch's pipelining", training.title, name, PIPELINE, at_least=1.0)
            for name in (GRAPH, SAME)
        ],
    )
    with Pair(NETWORK, (MICRO_BATCHES,)) as pair:
        found = automatic(pair.measured)
        split, share = nearest_split(pair.measured, found.devices)
    result.notes.append(
        f"Placed automatically ({found.algorithm}), predicted {found.milliseconds:.1f} ms a step; "
        f"split at {split}, which differs in {share:.1%} of the seconds of all operators."
    )
    pieces = ["--microbatches", str(MICRO_BATCHES), "--schedule", "1f1b"]
    setups = [
        Setup(GRAPH, "trireme", 2, _job("graph", pieces)),
        Setup(SAME, "trireme", 2, _job("graph", pieces, split)),
        Setup(PIPELINE, "trireme", 2, _job("pipeline", pieces, split)),
    ]
    data, described = prepare(context, NETWORK)
    # Both workers make each step together: half of it counts for each.
    turn, plan = Slice(0.4, 2.4, training.batch // 2), Plan(7, seconds=context.seconds, least=5)
    if context.quick:
        turn, plan = Slice(0.2, 2.0, training.batch // 2), Plan(1, least=1)
    measured, went = take_turns(context, setups, data, NETWORK, turn, plan)
    result.notes += went
    result.notes.append(
        f"{training.title}: batches of {training.batch} in {MICRO_BATCHES} micro-batches, 1f1b, "
        f"{training.optimizer}; data: {described}. One thread a process."
    )
    result.add(measured, {each.name: each.kind for each in setups}, condition=training.title)
    return result


def nearest_split(measured: Measured, devices: Devices) -> tuple[str, float]:
    """Returns the layer at which a split in two is closest to a placement.

    Returns:
        The layer, and the share of the operators' seconds that are elsewhere then.
    """
    layers = [name for name, _ in TRANSFORMER.make().named_children()]
    seconds: dict[str, list[float]] = {name: [0.0, 0.0] for name in layers}
    (costs,) = measured.costs.values()
    for each in costs.operations:
        layer = measured.modules.get(each.name, "").partition(".")[0]
        if layer in seconds:
            number = measured.hardware.numbers[devices[each.name]]
            seconds[layer][number] += each.forward_seconds + each.backward_seconds
    total = sum(map(sum, seconds.values()))
    elsewhere = [_elsewhere(seconds, layers, at) for at in range(1, len(layers))]
    least = min(elsewhere)
    return layers[1 + elsewhere.index(least)], least / total


def _elsewhere(seconds: dict[str, list[float]], layers: Sequence[str], at: int) -> float:
    """Returns the seconds that a split has on another task, whichever task comes first."""
    return min(
        sum(seconds[layer][1 - first if number < at else first]
            for number, layer in enumerate(layers))
        for first in (0, 1)
    )  # fmt: skip


def _job(strategy: str, options: Sequence[str], split: str = "") -> Commands:
    program = ["--split", split] if split else []
    return trireme_job(
        strategy, servers=0, options=options, program=program, script="transformer_replica.py"
    )
