"""Why a job differs from one process, by what differs first and what was recorded beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trireme.verification.compare import Comparison, Difference
from trireme.verification.record import Record
from trireme.verification.sketch import distance

_EQUAL = 0.02  # how far weights may be off, and still explain a gradient
_SUMS_TO_ONE = 0.05
_APART = 1e-4  # of the norm of gradients that are not the same


@dataclass(frozen=True)
class Case:
    """What is known of a difference."""

    first: Difference
    job: Record  # the step in both runs
    reference: Record
    repeated: Comparison | None = None  # the reference against its own repetition


def reason(case: Case) -> str:
    """Returns why the job differs, in words of the program; what to look at where it is unknown."""
    if case.repeated is not None and (again := case.repeated.first) is not None:
        return (
            f"the program differs from its own repetition in one process, from step {again.step} "
            f"on ({again.stage}): it draws numbers without a seed, or its kernels are not "
            "deterministic"
        )
    looks = ((t, look(case)) for s, look, t in _REASONS if case.first.stage in s.split())
    text, found = next(((t, each) for t, each in looks if each), (_ELSE[case.first.stage], ""))
    return text.format(case.first, found, line=f" at {case.job.line}" if case.job.line else "")


def reason_of_resume(case: Case, stop_at: int) -> str:
    """Returns why a job that was resumed differs from one that was not stopped."""
    stage = case.first.stage
    if case.first.step > stop_at:
        return _RESUMED.get(stage, f"a state, such as the optimizer's, is not restored: {stage}")
    return "it differs before the stop: seed what the program draws, and say deterministic=True"


def _other_positions(case: Case) -> str:
    both = [each.positions for each in (case.job, case.reference)]
    mine, other = (f"{min(each)} to {max(each)}" if each else "none" for each in both)
    return f"{mine} and one process {other}" if case.first.name == "positions" else ""


def _draws_in(place: str) -> Callable[[Case], str]:
    return lambda case: (
        place * any(place in each.drew for each in (*case.job.workers, *case.reference.workers))
    )


def _layer_of_batch(case: Case) -> str:
    layers = (each.layers.items() for each in case.job.workers[1:])
    return next((f"{kind} {name or 'of the model'}" for e in layers for name, kind in e), "")


def _unreached(case: Case) -> str:
    workers = case.job.workers
    for name in [name for each in workers for name in each.unreached]:
        lacking = [each.task for each in workers if name in each.unreached]
        if len(lacking) < len(workers):
            return f"{name} has no gradient on {', '.join(lacking)}"
    return ""


def _changed_gradient(case: Case) -> str:
    """Returns a parameter whose gradients are computed alike, and do not arrive alike."""
    runs = (case.job, case.reference)
    for name in case.job.kind("pushed"):
        pairs = [[e.tensors.get(f"{k}/{name}") for e in runs] for k in ("gradient", "pushed")]
        near = [
            distance(one, other) <= _APART * max(one.norm, other.norm)
            for one, other in pairs
            if one is not None and other is not None
        ]
        if near == [True, False]:
            return name
    return ""


def _uncounted_weights(case: Case) -> str:
    """The gradients agree with other weights than the numbers of examples: means over tokens."""
    workers, wanted = case.job.workers, case.reference.kind("gradient")
    each = [worker.kind("gradient") for worker in workers]
    names = [name for name in wanted if all(name in one for one in each)]
    if len(workers) < 2 or not names:
        return ""
    given = np.array([one.weight for one in workers]) / (case.job.weight or 1.0)
    target = np.array([mark for name in names for mark in wanted[name].marks])
    columns = np.array([[mark for name in names for mark in one[name].marks] for one in each])
    if workers[0].weighed:  # they are multiplied by their share of the examples already
        columns = columns / (len(workers) * given)[:, None]
    found, *_ = np.linalg.lstsq(columns.T, target, rcond=None)
    near = np.linalg.norm(columns.T @ found - target) <= _APART * np.linalg.norm(target)
    fits = near and abs(found.sum() - 1) < _SUMS_TO_ONE and found.min() > 0
    if not fits or np.allclose(found, given, atol=_EQUAL, rtol=0):
        return ""
    texts = zip(workers, given, found, strict=True)
    return ", ".join(f"{one.task} {now:.3f} in place of {then:.3f}" for one, now, then in texts)


_REASONS: tuple[tuple[str, Callable[[Case], str], str], ...] = (
    (
        "examples",
        _other_positions,
        "the workers were dealt the examples {1}: their order, or an epoch's end, depends on the "
        "number of workers",
    ),
    (
        "loss gradient",
        _draws_in("model"),
        "the model draws random numbers in its forward pass, each worker its own: draw in the data "
        "set, where numbers follow from the example",
    ),
    (
        "loss gradient",
        _uncounted_weights,
        "the loss of each worker is a mean over something else than its examples, such as tokens "
        "({1}): give weight= of the session, or optimizer.step(examples=tokens)",
    ),
    (
        "loss gradient buffers",
        _layer_of_batch,
        "{1} normalises each worker's batch by that batch alone, and one process all of it: use "
        "SyncBatchNorm under allreduce, GroupNorm or LayerNorm; or take it as a smaller batch",
    ),
    (
        "loss gradient values state",
        lambda case: min({*case.reference.hooks} - {*case.job.hooks}, default=""),
        "{1} has a hook in one process, and none in the job, which trains other parameters",
    ),
    (
        "loss gradient values state",
        _unreached,
        "parameter {1} and has one on the other workers{line}: which parameters a worker trains "
        "depends on its batch, or on which worker it is",
    ),
    (
        "examples loss gradient",
        _draws_in("loop"),
        "the loop draws random numbers between two steps{line}, each worker its own: draw in the "
        "data set, where numbers follow from the example",
    ),
    (
        "values state",
        _changed_gradient,
        "the gradients are computed alike, and differ when they reach the optimizer{line} ({1}): "
        "the program clips or scales each worker's own gradient, by its own norm: use clip_norm=, "
        "or call optimizer.synchronize() right after backward",
    ),
)
"""The stages that each reason explains; what finds it, and says where; in words. The surest are
first."""

_ELSE = {
    "examples": "{0.distance:.0f} examples at the same positions have other contents: the data set "
    "draws, or each process makes data of its own: draw in `__getitem__`, or seed alike",
    "loss": "the losses differ though the examples and the values agree: the forward pass depends "
    "on something that differs between processes, such as the size of a batch or the rank",
    "gradient": "the losses agree and the gradients do not: something changes them on their way, "
    "such as a hook, or a gradient that is not the mean over the examples",
    "settings": "{0.name} is {0.job:.6g} in the job and {0.reference:.6g} in one process{line} "
    "(nan: it has none): the program sets it by steps that it counts itself, or by the number of "
    "processes: let the job count, by scheduler= of the session, or optimizer.loop_steps",
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
