"""(i) What it costs to be seen: metrics, and all summaries, against a run that keeps nothing."""

from __future__ import annotations

from benchmarks.context import Context
from benchmarks.data import prepare
from benchmarks.pairs import Plan, interleave
from benchmarks.programs.task import NETWORKS
from benchmarks.replicas import Setup, Slice, running, trireme_job
from benchmarks.results import Goal, Result

__all__ = ["run"]

NOTHING, METRICS, ALL = "keeps nothing", "metrics", "all summaries every 100 steps"
RECORDS = {NOTHING: "nothing", METRICS: "metrics", ALL: "all"}

SECONDS = {"mlp": (0.3, 1.5), "cifar": (1.0, 11.0)}
"""How long a turn settles and counts. The CIFAR network makes about 20 steps a second here: only a
turn of many seconds holds its share of recorded steps, and those are what is measured."""

GOALS = {
    "mlp": [(METRICS, 0.98)],
    "cifar": [(METRICS, 0.995), (ALL, 0.98)],
}


def run(context: Context) -> Result:
    """Measures the steps per second of two workers together, with and without records."""
    result = Result(
        name="summaries",
        title="What it costs to be seen: one server, two asynchronous workers on one host",
        unit="worker steps/s",
        higher_is_better=True,
        references=(NOTHING,),
        goals=[
            Goal(f"{network}: {contender}", NETWORKS[network].title, contender, NOTHING,
                 at_least=bound)
            for network, goals in GOALS.items()
            for contender, bound in goals
        ],
    )  # fmt: skip
    for network in SECONDS:
        _measure(context, result, network)
    result.notes += [
        "Metrics: the chief's loss, accuracy, learning rate, step times, bytes, lag and verdicts "
        "every 100 of its steps, for TensorBoard.",
        "All summaries: the same, and `trireme.Summaries(every=100)`: distributions of parameters, "
        "gradients and activations, images, graph, what each operation cost, precision and recall.",
        "Both workers compute all the time, on as many cores: what the chief's writing thread "
        "takes is taken from them, and is in the figures.",
    ]
    return result


def _measure(context: Context, result: Result, network: str) -> None:
    setups = [
        Setup(name, "information" if name == NOTHING else "trireme", 2,
              trireme_job("async", program=["--record", records]))
        for name, records in RECORDS.items()
    ]  # fmt: skip
    data, described = prepare(context, network)
    settle, seconds = SECONDS[network]
    share = 0.8 if network == "cifar" else 0.2
    plan = Plan(40, seconds=context.seconds * share, least=4)
    turn = Slice(settle, seconds)
    if context.quick:
        turn, plan = Slice(0.2, 1.0), Plan(1, least=1)
    with running(context, setups, data, network, turn) as (contenders, failed):
        measured = interleave(contenders, plan, say=context.say)
        measured.failed.update(failed)
        result.notes += [f"{network}: {contender.progress()}" for contender in contenders]
    training = NETWORKS[network]
    result.notes.append(
        f"{training.title}: batches of {training.batch}, {training.optimizer}; data: {described}."
    )
    result.add(measured, {s.name: s.kind for s in setups}, condition=training.title)
