"""(m) Where to compute the operations of a model: automatically, against simple ways and by hand.

By the cost model, and as executed by two processes with one thread each. Of each placement counts
the number of micro-batches, one or four, for which it is predicted to be fastest. Each start begins
with new processes, which measure the operators anew.
"""

from __future__ import annotations

import time

from benchmarks.context import Context
from benchmarks.graph_contenders import (
    AUTOMATIC,
    EXPERT,
    PIECES,
    RANDOM,
    ROUND_ROBIN,
    SINGLE,
    Chosen,
    chosen,
    loaded,
)
from benchmarks.graph_models import BRANCHED
from benchmarks.graph_pair import Pair
from benchmarks.pairs import Interleaved, Plan, Sample, interleave
from benchmarks.placement_time import HARDWARE, branches, skips, tangle
from benchmarks.results import Entry, Goal, Kind, Result
from trireme.graph.place.placement import place

BEST = "the best of these"
LIMIT = "5 s"
KINDS: dict[str, Kind] = {
    AUTOMATIC: "trireme",
    SINGLE: "information",
    ROUND_ROBIN: "information",
    RANDOM: "information",
    EXPERT: "information",
}
NODES = 5000


def run(context: Context) -> Result:
    """Measures the milliseconds of a step."""
    large = [_large(make.__name__) for make in (skips, branches, tangle)]
    result = Result(
        name="graph_placement",
        title="Placing five models with branches on two tasks, milliseconds a step",
        unit="ms",
        higher_is_better=False,
        references=(BEST,),
        goals=[
            Goal(f"{model}: automatic of the best, {how}", f"{model}, {how}", AUTOMATIC, BEST,
                 at_most=bound)
            for how, bound in (("predicted", 1.06), ("measured", 1.15))
            for model in BRANCHED
        ]
        + [Goal(f"{name} placed", name, AUTOMATIC, LIMIT, at_most=1.0) for name in large],
    )  # fmt: skip
    for model in BRANCHED:
        _measure(context, result, model)
    for make, name in zip((skips, branches, tangle), large, strict=True):
        graph = make(NODES)
        began = time.perf_counter()
        place(graph, HARDWARE)
        took = Sample(1e3 * (time.perf_counter() - began))
        result.entries.append(Entry(name, AUTOMATIC, "trireme", (took,)))
        result.entries.append(Entry(name, LIMIT, "limit", (Sample(5e3),)))
    result.notes += [f"{name}: {each.title}." for name, each in BRANCHED.items()]
    result.notes.append(
        f"{BEST}: the contender with the smallest median, which may be {AUTOMATIC}. One thread a "
        "process; a step is forward, backward, gloo's transfers, the sum of the losses, and SGD."
    )
    return result


def _large(kind: str) -> str:
    return f"{NODES:,} operations, {kind}, on four devices"


def _measure(context: Context, result: Result, model: str) -> None:
    measured = Interleaved()
    predicted: dict[str, list[Sample]] = {name: [] for name in KINDS}
    seconds = context.seconds / len(BRANCHED)
    plan = Plan(7, seconds=seconds, least=3)
    if context.quick:
        plan = Plan(1, warmup=0, least=1)
    for start in range(context.starts):
        with Pair(model, PIECES) as pair:
            placements = chosen(pair.measured, seed=start)
            for name, each in placements.items():
                predicted[name].append(Sample(each.milliseconds, start=start))
            rounds = interleave(loaded(pair, placements), plan, say=context.say)
        measured.extend(rounds, start)
        result.notes.append(f"{model}, start {start + 1}: {_described(placements)}.")
    result.add(Interleaved(predicted), KINDS, condition=f"{model}, predicted")
    result.add(measured, KINDS, condition=f"{model}, measured")
    for condition in (f"{model}, predicted", f"{model}, measured"):
        entries = [each for each in result.entries if each.condition == condition]
        if entries:
            best = min(entries, key=lambda each: each.spread.median)
            result.entries.append(Entry(condition, BEST, "information", best.samples))


def _described(placements: dict[str, Chosen]) -> str:
    return "; ".join(
        f"{name}: {each.pieces} micro-batches, "
        f"{each.prediction.transfers} transfers ({each.algorithm})"
        for name, each in placements.items()
    )
