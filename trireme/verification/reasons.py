"""Why a job differs from one process, by what differs first and what was recorded beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from trireme.verification.record import Record, distance
from trireme.verification.verdict import Difference

_SUMS_TO_ONE = 0.05
_APART = 1e-4  # of the norm of gradients that are not the same
_Look = Callable[[Record, Record], str]  # finds a reason in the job and the reference, and where


def reason(
    first: Difference,
    job: Mapping[int, Record],
    reference: Mapping[int, Record],
    repeated: Difference | None = None,  # the reference's own, from its repetition
) -> str:
    """Returns why a job differs, in words of the program; what to look at where it is unknown."""
    if repeated is not None and repeated.step <= first.step:
        return (
            "the program differs from its own repetition in one process, from step "
            f"{repeated.step} on ({repeated.stage}): it draws numbers without a seed, or its "
            "kernels are not deterministic"
        )
    mine, other = (steps.get(first.step) or steps[max(steps)] for steps in (job, reference))
    looks = ((_TEXTS[look], look(mine, other)) for look in _REASONS.get(first.stage, ()))
    text, found = next(((t, each) for t, each in looks if each), (_ELSE[first.stage], ""))
    return text.format(first, found, line=f" at {mine.line}" if mine.line else "")


def reason_of_resume(first: Difference, stop_at: int) -> str:
    """Returns why a job that was resumed differs from one that was not stopped."""
    if first.step > stop_at:
        other = f"a state, such as the optimizer's, is not restored: {first.stage}"
        return _RESUMED.get(first.stage, other)
    return "it differs before the stop: seed what the program draws, and say deterministic=True"


def _positions(job: Record, reference: Record) -> str:
    both = [each.positions for each in (job, reference)]
    mine, other = (f"{min(each)} to {max(each)}" if each else "none" for each in both)
    return f"{mine} and one process {other}" if both[0] != both[1] else ""


def _draws_in(place: str) -> _Look:
    return lambda job, reference: (
        place * any(place in each.drew for each in (*job.workers, *reference.workers))
    )


def _layers(job: Record, reference: Record) -> str:
    return next((layer for each in job.workers[1:] for layer in each.layers), "")


def _hooks(job: Record, reference: Record) -> str:
    return min({*reference.hooks} - {*job.hooks}, default="")


def _unreached(job: Record, reference: Record) -> str:
    for name in [name for each in job.workers for name in each.unreached]:
        lacking = [each.task for each in job.workers if name in each.unreached]
        if len(lacking) < len(job.workers):
            return f"{name} has no gradient on {', '.join(lacking)}"
    return ""


def _changed_gradient(job: Record, reference: Record) -> str:
    """Returns a parameter whose gradients are computed alike, and do not arrive alike."""

    def far(key: str) -> float:
        one, other = job.sketches.get(key), reference.sketches.get(key)
        if one is None or other is None:
            return math.nan
        return distance(one, other) - _APART * max(one.norm, other.norm)

    names = job.stage("pushed")
    return next((n for n in names if far(f"gradient/{n}") <= 0 < far(f"pushed/{n}")), "")


def _uncounted_weights(job: Record, reference: Record) -> str:
    """The gradients agree with other weights than the numbers of examples: means over tokens."""
    workers, wanted = job.workers, reference.stage("gradient")
    each = [worker.stage("gradient") for worker in workers]
    names = [name for name in wanted if all(name in one for one in each)]
    if len(workers) < 2 or not names:
        return ""
    given = np.array([one.weight for one in workers]) / (job.weight or 1.0)
    target = np.array([mark for name in names for mark in wanted[name].marks])
    columns = np.array([[mark for name in names for mark in one[name].marks] for one in each])
    if workers[0].weighed:  # they are multiplied by their share of the examples already
        columns = columns / (len(workers) * given)[:, None]
    found, *_ = np.linalg.lstsq(columns.T, target, rcond=None)
    off = [np.linalg.norm(columns.T @ each - target) for each in (found, given)]
    near, also = np.array(off) <= _APART * np.linalg.norm(target)
    if also or not near or abs(found.sum() - 1) >= _SUMS_TO_ONE or found.min() <= 0:
        return ""
    texts = zip(workers, given, found, strict=True)
    return ", ".join(f"{one.task} {now:.3f} in place of {then:.3f}" for one, now, then in texts)


_MODEL_DRAWS, _LOOP_DRAWS = map(_draws_in, ("model", "loop"))
_COMPUTED = _positions, _MODEL_DRAWS, _uncounted_weights, _layers, _hooks, _unreached, _LOOP_DRAWS
_APPLIED = _hooks, _unreached, _changed_gradient
_REASONS: dict[str, Sequence[_Look]] = {
    "examples": (_positions, _LOOP_DRAWS),
    **dict.fromkeys(("loss", "gradient"), _COMPUTED),
    **dict.fromkeys(("values", "state"), _APPLIED),
    "buffers": (_layers,),
}
"""What explains a difference, by its stage; the surest are first."""

_TEXTS: dict[_Look, str] = {
    _positions: "the workers were dealt the examples {1}: their order, or an epoch's end, depends "
    "on the number of workers",
    _MODEL_DRAWS: "the model draws random numbers in its forward pass, each worker its own: draw "
    "in the data set, where numbers follow from the example",
    _uncounted_weights: "the loss of each worker is a mean over something else than its examples, "
    "such as tokens (weights: {1}): give a session weight=, or step(examples=) their number",
    _layers: "{1} normalises each worker's batch by that batch alone, and one process all of it: "
    "use SyncBatchNorm on GPUs under allreduce, GroupNorm, or --microbatches 1 in a pipeline",
    _hooks: "{1} has a hook in one process, and none in the job, which trains other parameters",
    _unreached: "parameter {1} and has one on the other workers{line}: which parameters a worker "
    "trains depends on its batch, or on which worker it is",
    _LOOP_DRAWS: "the loop draws random numbers between two steps{line}, each worker its own: draw "
    "in the data set, where numbers follow from the example",
    _changed_gradient: "the gradients are computed alike, and differ when they reach the "
    "optimizer{line} ({1}): the program clips or scales each worker's own gradient, by its own "
    "norm: use clip_norm=, or, without servers, optimizer.synchronize() right after backward",
}
_ELSE = {
    "examples": "examples at the same positions have other contents: the data set draws, or each "
    "process makes data of its own: draw in `__getitem__`, or seed alike",
    "loss": "the losses differ though the examples and the values agree: the forward pass depends "
    "on something that differs between processes, such as the size of a batch or the rank",
    "gradient": "the losses agree and the gradients do not: something changes them on their way, "
    "such as a hook or a buffer of each worker, or they are no means over the examples",
    "settings": "{0.name} is {0.job:.6g} in the job and {0.reference:.6g} in one process{line} "
    "(nan: it has none): the program sets it by steps that it counts itself, by its loss, or by "
    "the number of processes: let the job count, by scheduler= of the session, or loop_steps",
    "values": "the gradients that reach the optimizer agree{line}, and what it makes of them does "
    "not ({0.name}): it has other settings or another state, or values are written outside of it",
    "buffers": "only buffers differ ({0.name}): each worker updates its own from its own batches, "
    "and their mean is evaluated and saved",
    "steps": "the job ends after {0.job:.0f} steps and one process after {0.reference:.0f}: the "
    "loop ends by what it counts itself: let optimizer.epochs, or max_steps=, end it",
}
_ELSE["state"] = _ELSE["values"]

_RESUMED = {
    "examples": "the program deals the data itself, or draws what it trains on without a seed",
    "loss": "random numbers, or a state of the program's own, are not restored: say "
    "deterministic=True; keep a state by optimizer.keep, or in a buffer of the model",
    "settings": "the program's schedule begins anew: give the session the scheduler, or advance it "
    "to optimizer.loop_steps",
    "steps": "the loop counts its steps from its own start",
}
"""What a program does wrong whose job is resumed, by what differs first."""
