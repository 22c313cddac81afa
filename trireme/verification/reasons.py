"""Why a job differs from one process, by what differs first and what was recorded beside it."""

from __future__ import annotations

from collections.abc import Iterator
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
            "deterministic. Seed what it draws; what differs beyond that cannot be told"
        )
    return next(_reasons(case))


def _reasons(case: Case) -> Iterator[str]:
    """Yields what may be the reason, the surest first."""
    first, job, workers, other = case.first, case.job, case.job.workers, case.reference
    line = f" at {job.line}" if job.line else ""
    drew = {where for each in (*workers, *other.workers) for where in each.drew}
    if first.stage == "examples" and first.name == "positions":
        yield (
            f"the workers were dealt the examples {_range(job)} and one process {_range(other)}: "
            "the order of the data, or an epoch's end, depends on the number of workers"
        )
    if first.stage in ("loss", "gradient"):
        if "model" in drew:
            yield (
                "the model draws random numbers in its forward pass, and each worker draws its "
                "own: draw in the data set, where numbers follow from the example"
            )
        if shares := _uncounted_weights(case):
            yield (
                "the loss of each worker is a mean over something else than its examples, such as "
                f"tokens that count, and workers are weighed by their examples ({shares}): say how "
                "much each counts, by weight= of the session, or optimizer.step(examples=tokens)"
            )
    layers = {name: kind for each in workers[1:] for name, kind in each.layers.items()}
    if layers and first.stage in ("loss", "gradient", "buffers"):
        name, kind = next(iter(layers.items()))
        yield (
            f"{kind} {name or 'of the model'} normalises each worker's batch by that batch alone, "
            "and one process all of it: use SyncBatchNorm under allreduce, GroupNorm or LayerNorm; "
            "or take it as it is, as with a smaller batch"
        )
    if first.stage in ("loss", "gradient", "values", "state"):
        if silent := sorted({*other.hooks} - {*job.hooks}):
            yield (
                f"{silent[0]} has a hook in one process, and none in the job: the strategy trains "
                "other parameters than those that have the hook, which is not called"
            )
        for name in [name for each in workers for name in each.unreached]:
            lacking = [each.task for each in workers if name in each.unreached]
            if len(lacking) < len(workers):
                yield (
                    f"parameter {name} has no gradient on {', '.join(lacking)} and has one on the "
                    f"other workers{line}: which parameters a worker trains depends on its batch, "
                    "or on which worker it is"
                )
    if "loop" in drew and first.stage in ("examples", "loss", "gradient"):
        yield (
            f"the loop draws random numbers between two steps{line}, and each worker draws its "
            "own: draw them in the data set, where numbers follow from the example's position"
        )
    if first.stage in ("values", "state") and (changed := _changed_gradients(case)):
        yield (
            f"the gradients are computed alike, and differ when they reach the optimizer{line} "
            f"({changed[0]}): the program clips or scales each worker's own gradient, by its own "
            "norm, and one process their mean. Use clip_norm= of Session or distribute, or call "
            "optimizer.synchronize() right after backward"
        )
    yield _ELSE[first.stage].format(first, line=line)


def _range(step: Record) -> str:
    return f"{min(step.positions)} to {max(step.positions)}" if step.positions else "none"


def _uncounted_weights(case: Case) -> str:
    """The gradients agree with other weights than the numbers of examples: means over tokens."""
    workers, weights = case.job.workers, _weights_that_explain(case)
    given = [each.weight / (case.job.weight or 1.0) for each in workers]
    if all(abs(a - b) < _EQUAL for a, b in zip(weights, given, strict=False)):
        return ""
    return ", ".join(
        f"{each.task} {now:.3f} in place of {then:.3f}"
        for each, now, then in zip(workers, given, weights, strict=True)
    )


def _weights_that_explain(case: Case) -> list[float]:
    """Returns weights, which sum to 1, with which the workers' gradients are the reference's.

    None are returned where there are none.
    """
    workers, reference = case.job.workers, case.reference
    each = [worker.kind("gradient") for worker in workers]
    wanted = reference.kind("gradient")
    names = [name for name in wanted if all(name in one for one in each)]
    if len(workers) < 2 or not names:
        return []
    target = np.array([mark for name in names for mark in wanted[name].marks])
    columns = np.array([[mark for name in names for mark in one[name].marks] for one in each])
    if workers[0].weighed:  # they are multiplied by their share of the examples already
        shares = [len(workers) * one.weight / case.job.weight for one in workers]
        columns = columns / np.array(shares)[:, None]
    if reference.losses and all(one.losses for one in workers):
        scale = np.linalg.norm(target) / max(abs(reference.losses[0]), 1e-12)
        losses = np.array([one.losses[0] for one in workers])
        columns = np.hstack([columns, losses[:, None] * scale])
        target = np.append(target, reference.losses[0] * scale)
    if not (np.isfinite(columns).all() and np.isfinite(target).all()):
        return []
    found, *_ = np.linalg.lstsq(columns.T, target, rcond=None)
    near = np.linalg.norm(columns.T @ found - target) <= _APART * np.linalg.norm(target)
    fits = near and abs(found.sum() - 1) < _SUMS_TO_ONE and found.min() > 0
    return [float(one) for one in found] if fits else []


def _changed_gradients(case: Case) -> list[str]:
    """Returns the parameters whose gradients are computed alike, and do not arrive alike."""

    def alike(key: str) -> bool | None:
        one, other = (each.tensors.get(key) for each in (case.job, case.reference))
        if one is None or other is None:
            return None
        return distance(one, other) <= _APART * max(one.norm, other.norm)

    names = case.job.kind("pushed")
    return [n for n in names if alike(f"gradient/{n}") and alike(f"pushed/{n}") is False]


def reason_of_resume(case: Case, stop_at: int) -> str:
    """Returns why a job that was resumed differs from one that was not stopped."""
    if case.first.step > stop_at:
        return _RESUMED[case.first.stage]
    return "it differs before the stop: seed what the program draws, and say deterministic=True"


_ELSE = {
    "examples": "{0.distance:.0f} examples at the same positions have other contents: the data set "
    "draws, or each process makes data of its own. Draw in `__getitem__`, where numbers follow "
    "from the example's position, or seed the program alike in all processes",
    "loss": "the losses differ though the examples and the values agree: the forward pass depends "
    "on something that differs between processes, such as the size of a batch or the rank",
    "gradient": "the losses agree and the gradients do not: something changes them on their way, "
    "such as a hook, or a gradient that is not the mean over the examples",
    "settings": "{0.name} is {0.job:.6g} in the job and {0.reference:.6g} in one process{line} "
    "(nan: it has none): the program sets it by steps that it counts itself, or by the number of "
    "processes. Let the job count: scheduler= of the session, or optimizer.loop_steps",
    "values": "the gradients that reach the optimizer agree{line}, and what it makes of them does "
    "not ({0.name}): the job's optimizer has other settings or another state than the program's, "
    "or values are written outside of it",
    "buffers": "only buffers differ ({0.name}): each worker updates its own from its own batches, "
    "and their mean is evaluated and saved. Parameters are trained alike",
    "steps": "the job ends after {0.job:.0f} steps and one process after {0.reference:.0f}: the "
    "loop ends by what it counts itself, or by the number of processes. Let optimizer.epochs, or "
    "max_steps=, end it",
}
_ELSE["state"] = _ELSE["values"]

_RESUMED = {
    "examples": "the resumed job trains on other examples: the program deals the data itself, or "
    "draws what it trains on without a seed that follows from the position",
    "loss": "random numbers, or a state of the program's own, are not restored: say "
    "deterministic=True; keep a state by optimizer.keep, or in a buffer of the model",
    "gradient": "the gradients differ, and the losses do not: a state of the program's own is lost",
    "settings": "the program's schedule begins anew: give the session the scheduler, or advance it "
    "to optimizer.loop_steps",
    "values": "the gradients agree and the values do not: the optimizer's state is not restored",
    "buffers": "buffers are not restored",
    "state": "the optimizer's state is not restored",
    "steps": "the resumed job ends at another step: the loop counts its steps from its own start",
}
