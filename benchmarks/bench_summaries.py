"""(i) What it costs to be seen: metrics, and all summaries, against a run that keeps nothing."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.context import Context
from benchmarks.data import prepare
from benchmarks.pairs import Interleaved, Plan, Sample
from benchmarks.programs.task import NETWORKS
from benchmarks.replicas import Setup, Slice, take_turns, trireme_job
from benchmarks.results import Goal, Result

NOTHING, METRICS, ALL = "keeps nothing", "metrics every 10 steps", "all summaries every 10 steps"
RECORDS = {NOTHING: "nothing", METRICS: "metrics", ALL: "all"}

SECONDS = {"mlp": (0.3, 1.5), "cifar": (0.8, 2.4)}
"""How long a turn settles and counts."""

GOALS = {"mlp": [(METRICS, 0.833)], "cifar": [(METRICS, 0.952), (ALL, 0.833)]}
"""Ten times the time that is asked of records every 100 steps, which is 2 %; 0.5 % and 2 %."""

BY_PROCESSOR = "{}, by processor time"


def run(context: Context) -> Result:
    """Measures the steps per second of two workers together, with and without records."""
    result = Result(
        name="summaries",
        title="What it costs to be seen: one server, two asynchronous workers on one host",
        unit="worker steps/s",
        higher_is_better=True,
        references=(NOTHING,),
        goals=[
            _goal(network, way, contender, bound)
            for network, goals in GOALS.items()
            for way in ("{}", BY_PROCESSOR)
            for contender, bound in goals
        ],
    )
    for network in SECONDS:
        _measure(context, result, network)
    result.notes += [
        "Records are made ten times as often as they would be, every 10 steps and not every 100: "
        "what they cost stands out from what else the machine does. The bounds are ten times as "
        "wide. Records every 100 steps cost a tenth of (1 / ratio - 1) of a step's time.",
        "By processor time: worker steps for each second of all the job's processes together. Both "
        "workers compute all the time, on as many cores: what the chief's writing thread takes is "
        "taken from them. Other work on the machine disturbs this figure less than the other.",
        f"{METRICS}: the chief's loss, accuracy, learning rate, step times, bytes, lag, verdicts, "
        "for TensorBoard, and its line on the terminal.",
        f"{ALL}: the same, and `trireme.Summaries(every=10)`: distributions of parameters, "
        "gradients and activations, images, graph.",
    ]
    return result


def _goal(network: str, way: str, contender: str, bound: float) -> Goal:
    text, condition = way.format(f"{network}: {contender}"), way.format(NETWORKS[network].title)
    return Goal(text, condition, contender, NOTHING, at_least=bound)


def _measure(context: Context, result: Result, network: str) -> None:
    setups = [
        Setup(name, "information" if name == NOTHING else "trireme", 2,
              trireme_job("async", program=["--record", records]))
        for name, records in RECORDS.items()
    ]  # fmt: skip
    data, described = prepare(context, network)
    settle, seconds = SECONDS[network]
    share = 0.8 if network == "cifar" else 0.2
    plan = Plan(40, seconds=context.seconds * share, least=3)
    turn = Slice(settle, seconds)
    if context.quick:
        turn, plan = Slice(0.2, 4.0), Plan(1, least=1)
    measured, went = take_turns(context, setups, data, network, turn, plan)
    result.notes += [f"{network}: {line}" for line in went]
    training = NETWORKS[network]
    result.notes.append(
        f"{training.title}: batches of {training.batch}, {training.optimizer}; data: {described}."
    )
    kinds = {s.name: s.kind for s in setups}
    result.add(measured, kinds, condition=training.title)
    by_processor = {name: [_by_processor(s) for s in of] for name, of in measured.samples.items()}
    condition = BY_PROCESSOR.format(training.title)
    result.add(Interleaved(by_processor), kinds, condition=condition)


def _by_processor(sample: Sample) -> Sample:
    return replace(sample, value=sample.work / sample.cpu_seconds)
