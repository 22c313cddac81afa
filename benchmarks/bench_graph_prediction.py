"""(n) The predicted duration of a step of a placed graph, against the measured one.

Five models with branches, placed automatically on two processes with one thread each. The
prediction comes from operators and links that were measured one by one, before any step.
"""

from __future__ import annotations

from benchmarks.context import Context
from benchmarks.graph_contenders import AUTOMATIC, PIECES, automatic, loaded
from benchmarks.graph_models import BRANCHED
from benchmarks.graph_pair import Pair
from benchmarks.pairs import Interleaved, Plan, Sample, interleave
from benchmarks.results import Goal, Result

PREDICTED, MEASURED = "predicted", "measured"


def run(context: Context) -> Result:
    """Measures the milliseconds of a step."""
    result = Result(
        name="graph_prediction",
        title="Predicted and measured steps of five placed models, milliseconds a step",
        unit="ms",
        higher_is_better=False,
        references=(MEASURED,),
        goals=[
            Goal(f"{model}: predicted of measured", model, PREDICTED, MEASURED,
                 at_least=0.75, at_most=1.25)
            for model in BRANCHED
        ],
    )  # fmt: skip
    for model in BRANCHED:
        _measure(context, result, model)
    result.notes += [f"{name}: {each.title}." for name, each in BRANCHED.items()]
    return result


def _measure(context: Context, result: Result, model: str) -> None:
    measured, predicted = Interleaved(), Interleaved({PREDICTED: []})
    plan = Plan(9, seconds=context.seconds / len(BRANCHED), least=5)
    if context.quick:
        plan = Plan(1, warmup=0, least=1)
    for start in range(context.starts):
        with Pair(model, PIECES) as pair:
            choice = automatic(pair.measured)
            rounds = interleave(loaded(pair, {AUTOMATIC: choice}), plan, say=context.say)
        measured.extend(rounds, start)
        predicted.samples[PREDICTED] += [
            Sample(choice.milliseconds, start=start) for _ in rounds.samples.get(AUTOMATIC, [])
        ]
        busy = ", ".join(f"{1e3 * each.busy_seconds:.1f}" for each in choice.prediction.devices)
        result.notes.append(
            f"{model}, start {start + 1}: {choice.pieces} micro-batches ({choice.algorithm}); the "
            f"tasks compute for {busy} ms, predicted."
        )
    renamed = Interleaved(
        {MEASURED: measured.samples[AUTOMATIC]} if AUTOMATIC in measured.samples else {},
        dict.fromkeys([MEASURED] * len(measured.failed), "".join(measured.failed.values())),
    )
    result.add(predicted, {PREDICTED: "information"}, condition=model)
    result.add(renamed, {MEASURED: "trireme"}, condition=model)
