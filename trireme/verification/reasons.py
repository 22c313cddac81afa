"""Why a job differs from one process: rules that look at what differs first.

Each rule returns a sentence, or None where it does not apply. The first that applies is the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trireme.verification.compare import Comparison, Difference
from trireme.verification.joined import Step
from trireme.verification.sketch import Sketch, distance

_EQUAL = 0.02  # how far weights may be off, and still explain a gradient
_UNMOVED = 0.5  # of the elements of a parameter that an update leaves as they were
_CONSISTENT = 0.05


@dataclass(frozen=True)
class Case:
    """What the rules look at.

    Attributes:
        first: what differs first.
        found: all that differs in that step.
        job, reference: the step in both runs.
        repeated: the reference against its own repetition.
        workers: how many workers the job has.
    """

    first: Difference
    found: tuple[Difference, ...]
    job: Step
    reference: Step
    repeated: Comparison | None = None
    workers: int = 1

    @property
    def line(self) -> str:
        return f" at {self.job.line}" if self.job.line else ""

    def differs(self, stage: str) -> bool:
        return any(each.stage == stage for each in self.found)


Rule = Callable[[Case], str | None]


def reason(case: Case) -> str:
    """Returns why the job differs, in words of the program; what to look at where no rule knows."""
    for rule in RULES:
        if (text := rule(case)) is not None:
            return text
    return _UNKNOWN[case.first.stage]


def reason_of_resume(case: Case, stop_at: int) -> str:
    """Returns why a job that was resumed differs from one that was not stopped."""
    if case.first.step <= stop_at:
        return (
            "it differs before the stop: the job is not the same as its own repetition. Seed what "
            "the program draws, and say deterministic=True"
        )
    return _AFTER_RESUME[case.first.stage]


def _not_repeatable(case: Case) -> str | None:
    if case.repeated is None or (first := case.repeated.first) is None:
        return None
    return (
        f"the program differs from its own repetition in one process, from step {first.step} on "
        f"({_what(first)}): it draws numbers without a seed, or uses kernels that are not "
        "deterministic. Seed what it draws; what differs beyond that cannot be told"
    )


def _other_order(case: Case) -> str | None:
    if case.first.stage != "examples" or case.first.name != "positions":
        return None
    return (
        f"the workers were dealt the examples {_spans(case.job)} and one process "
        f"{_spans(case.reference)}: the order of the data, a sampler, or an epoch's end depends on "
        "the number of workers"
    )


def _other_contents(case: Case) -> str | None:
    if case.first.stage != "examples":
        return None
    return (
        f"{case.first.distance:.0f} examples at the same positions have other contents: the data "
        "set draws, or each process makes data of its own. Draw in `__getitem__`, where numbers "
        "follow from the example's position, or seed the program alike in all processes"
    )


def _draws(case: Case) -> str | None:
    drew = {where for each in (*case.job.workers, *case.reference.workers) for where in each.drew}
    contents = case.first.stage == "examples" and case.first.name == "contents"
    if not drew or not (contents or case.first.stage in ("loss", "gradient")):
        return None
    if "model" in drew and not contents:
        return (
            "the model draws random numbers in its forward pass (not by dropout, which is "
            "compared with the same draws): each worker draws its own, and one process others. "
            "The runs cannot be the same number by number; draw in the data set, where numbers "
            "follow from the example, to compare them"
        )
    return (
        f"the loop draws random numbers between two steps{case.line}: each worker draws its own, "
        "and one process others. Draw them in the data set, where numbers follow from the "
        "example's position"
    )


def _whole_batch_layers(case: Case) -> str | None:
    layers = {name: kind for each in case.job.workers for name, kind in each.layers.items()}
    if not layers or len(case.job.workers) < 2:
        return None
    if case.first.stage not in ("loss", "gradient", "buffers"):
        return None
    name, kind = next(iter(layers.items()))
    return (
        f"{kind} {name or 'of the model'} normalises each worker's batch by that batch alone, and "
        "one process all of it together: use torch.nn.SyncBatchNorm.convert_sync_batchnorm under "
        "allreduce, GroupNorm or LayerNorm; or take it as it is, as with a smaller batch"
    )


def _uncounted_weights(case: Case) -> str | None:
    """The gradients agree with other weights than the numbers of examples: means over tokens."""
    if case.first.stage not in ("loss", "gradient") or len(case.job.workers) < 2:
        return None
    weights = _weights_that_explain(case)
    if weights is None:
        return None
    given = [each / sum(case.job.weights) for each in case.job.weights]
    if all(abs(a - b) < _EQUAL for a, b in zip(weights, given, strict=True)):
        return None
    shares = ", ".join(
        f"{each.task} {given_share:.3f} in place of {share:.3f}"
        for each, given_share, share in zip(case.job.workers, given, weights, strict=True)
    )
    return (
        "the loss of each worker is a mean over something else than its examples, such as tokens "
        f"that count, and workers are weighed by their examples ({shares}): say how much each "
        "counts, by weight= of the session, or optimizer.step(examples=number_of_tokens)"
    )


def _unreached(case: Case) -> str | None:
    workers = case.job.workers
    if len(workers) < 2 or case.first.stage in ("examples", "settings", "buffers"):
        return None
    for name in dict.fromkeys(name for each in workers for name in each.unreached):
        lacking = [each.task for each in workers if name in each.unreached]
        if len(lacking) < len(workers):
            return (
                f"parameter {name} has no gradient on {', '.join(lacking)} and has one on the "
                f"other workers{case.line}: which parameters a worker trains depends on its batch, "
                "or on which worker it is"
            )
    return None


def _silent_hooks(case: Case) -> str | None:
    one = {name for each in case.reference.workers for name in each.hooks}
    mine = {name for each in case.job.workers for name in each.hooks}
    silent = sorted(one - mine)
    if not silent:
        return None
    return (
        f"the {silent[0]} is called in one process, and not in the job: the strategy computes with "
        "other modules or parameters than those that have the hook"
    )


def _schedule(case: Case) -> str | None:
    if case.first.stage != "settings":
        return None
    name = case.first.name
    return (
        f"{name} is {case.first.job:.6g} in the job and {case.first.reference:.6g} in one process"
        f"{case.line}: the program sets it by steps that it counts itself, or by the number of "
        "processes. Let the job count: scheduler= of the session, or optimizer.loop_steps"
    )


def _changed_gradients(case: Case) -> str | None:
    """The gradients are computed alike, and the program changes each worker's own."""
    if case.first.stage not in ("values", "state") or not case.job.pushed:
        return None
    apart = [
        name
        for name, one in case.job.pushed.items()
        if (other := case.reference.pushed.get(name)) is not None and _apart(one, other)
    ]
    alike = [
        name
        for name in apart
        if (one := case.job.computed.get(name)) and (other := case.reference.computed.get(name))
        if not _apart(one, other)
    ]
    if not alike:
        return None
    return (
        f"the gradients are computed alike, and differ when they reach the optimizer{case.line} "
        f"({alike[0]}): the program clips or scales each worker's own gradient, by its own norm, "
        "and one process their mean. Use clip_norm= of Session or distribute, or call "
        "optimizer.synchronize() right after backward"
    )


def _lost_updates(case: Case) -> str | None:
    if case.first.stage != "values":
        return None
    workers = (*case.job.workers, *case.reference.workers)
    unmoved = {n: s for each in workers for n, s in each.unmoved.items() if s > _UNMOVED}
    if not unmoved:
        return None
    name, share = max(unmoved.items(), key=lambda each: each[1])
    return (
        f"{share:.0%} of the elements of {name} with a gradient did not move: updates are below "
        "half a unit in the last place of the parameters' dtype, so that rounding decides. Train "
        "float32 parameters and compute in bfloat16"
    )


def _buffers_only(case: Case) -> str | None:
    if case.first.stage != "buffers":
        return None
    return (
        f"only buffers differ ({case.first.name}): each worker updates its own from its own "
        "batches, and their mean is evaluated and saved. Parameters are trained alike"
    )


def _optimizer(case: Case) -> str | None:
    if case.first.stage not in ("values", "state"):
        return None
    return (
        f"the gradients that reach the optimizer agree{case.line}, and what it makes of them does "
        f"not ({case.first.name}): the job's optimizer has other settings or another state than "
        "the program's, or values are written outside of it"
    )


RULES: tuple[Rule, ...] = (
    *(_not_repeatable, _other_order, _draws, _other_contents, _silent_hooks, _uncounted_weights),
    *(_whole_batch_layers, _unreached, _schedule, _changed_gradients, _lost_updates, _buffers_only),
    _optimizer,
)

_UNKNOWN = {
    "examples": "the examples differ",
    "loss": (
        "the losses differ though the examples and the values agree: the forward pass depends on "
        "something that differs between processes, such as the size of a batch or the rank"
    ),
    "gradient": (
        "the losses agree and the gradients do not: something changes them on their way, such as a "
        "hook, or a gradient that is not the mean over the examples"
    ),
    "settings": "the settings of the optimizer differ",
    "values": "the values differ",
    "buffers": "the buffers differ",
    "state": "the optimizer's state differs",
}


_AFTER_RESUME = {
    "examples": (
        "the resumed job trains on other examples: the program deals the data itself, or draws "
        "what it trains on without a seed that follows from the position"
    ),
    "loss": (
        "the examples and the values are the same, and the loss is not: random numbers, buffers or "
        "a state of the program's own are not restored. Say deterministic=True; keep a state by "
        "optimizer.keep, or in a buffer of the model"
    ),
    "gradient": "the gradients differ, and the losses do not: a state of the program's own is lost",
    "settings": (
        "the optimizer's settings are not those of the step: the program's schedule begins anew. "
        "Give the session the scheduler, or advance it to optimizer.loop_steps"
    ),
    "values": "the gradients agree and the values do not: the optimizer's state was not restored",
    "buffers": "buffers were not restored",
    "state": "the optimizer's state was not restored",
}


def _what(difference: Difference) -> str:
    return f"{difference.stage} {difference.name}".replace("loss the loss", "the loss")


def _spans(step: Step) -> str:
    return ", ".join(f"{start} to {stop - 1}" for start, stop in step.spans) or "none"


def _apart(one: Sketch, other: Sketch) -> bool:
    return distance(one, other) > 1e-4 * max(other.norm, one.norm)


def _weights_that_explain(case: Case) -> list[float] | None:
    """Returns weights, which sum to 1, with which the workers' gradients are the reference's."""
    workers = case.job.workers
    names = [n for n in case.reference.computed if all(n in each.computed for each in workers)]
    if not names:
        return None
    target = np.array([m for n in names for m in case.reference.computed[n].marks])
    columns = np.array([[m for n in names for m in each.computed[n].marks] for each in workers])
    if workers[0].weighed:  # they are multiplied by their share of the examples already
        total = sum(case.job.weights)
        shares = [len(workers) * each / total for each in case.job.weights]
        columns = columns / np.array(shares)[:, None]
    losses = np.array([each.losses[0] if each.losses else 0.0 for each in workers])
    if case.reference.losses and all(each.losses for each in workers):
        scale = np.linalg.norm(target) / max(abs(case.reference.losses[0]), 1e-12)
        columns = np.hstack([columns, losses[:, None] * scale])
        target = np.append(target, case.reference.losses[0] * scale)
    found, *_ = np.linalg.lstsq(columns.T, target, rcond=None)
    apart = np.linalg.norm(columns.T @ found - target) / max(float(np.linalg.norm(target)), 1e-300)
    fits = apart < 1e-4 and abs(float(found.sum()) - 1) < _CONSISTENT and float(found.min()) > 0
    if not fits or not math.isfinite(float(apart)):
        return None
    return [float(each) for each in found]
