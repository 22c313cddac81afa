"""Why a job differs from one process: a table of rules that look at what differs first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from trireme.verification.compare import STAGES, Comparison, Difference
from trireme.verification.record import Record
from trireme.verification.sketch import distance

_EQUAL = 0.02  # how far weights may be off, and still explain a gradient
_UNMOVED = 0.5  # of the elements of a parameter that an update leaves as they were
_SUMS_TO_ONE = 0.05
_APART = 1e-4  # of the norm of gradients that are not the same


@dataclass(frozen=True)
class Case:
    """What the rules look at."""

    first: Difference
    job: Record  # the step in both runs
    reference: Record
    repeated: Comparison | None = None  # the reference against its own repetition

    def both(self) -> Iterator[Record]:
        yield from (*self.job.workers, *self.reference.workers)


def reason(case: Case) -> str:
    """Returns why the job differs, in words of the program; what to look at where no rule knows."""
    line = f" at {case.job.line}" if case.job.line else ""
    for stages, rule, sentence in _RULES:
        if case.first.stage in stages.split() and (found := rule(case)):
            return sentence.format(found=found, case=case, first=case.first, line=line)
    return "they differ"


def reason_of_resume(case: Case, stop_at: int) -> str:
    """Returns why a job that was resumed differs from one that was not stopped."""
    if case.first.step <= stop_at:
        return (
            "it differs before the stop: the job is not the same as its own repetition. Seed what "
            "the program draws, and say deterministic=True"
        )
    return _AFTER_RESUME[case.first.stage]


def _other_positions(case: Case) -> list[str]:
    if case.first.name != "positions":
        return []
    every = (case.job.spans, case.reference.spans)
    texts = [", ".join(f"{start} to {stop - 1}" for start, stop in each) for each in every]
    return [text or "none" for text in texts]


def _silent_hooks(case: Case) -> list[str]:
    one = {name for each in case.reference.workers for name in each.hooks}
    return sorted(one - {name for each in case.job.workers for name in each.hooks})


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


def _whole_batch_layers(case: Case) -> str:
    layers = {name: kind for each in case.job.workers[1:] for name, kind in each.layers.items()}
    return next((f"{kind} {name or 'of the model'}" for name, kind in layers.items()), "")


def _unreached(case: Case) -> str:
    workers = case.job.workers
    for name in [name for each in workers for name in each.unreached]:
        lacking = [each.task for each in workers if name in each.unreached]
        if len(lacking) < len(workers):
            return f"{name} has no gradient on {', '.join(lacking)}"
    return ""


def _changed_gradients(case: Case) -> list[str]:
    """The gradients are computed alike, and the program changes each worker's own."""

    def apart(kind: str, name: str) -> bool | None:
        one, other = (each.tensors.get(f"{kind}/{name}") for each in (case.job, case.reference))
        if one is None or other is None:
            return None
        return distance(one, other) > _APART * max(one.norm, other.norm)

    names = case.job.kind("pushed")
    return [n for n in names if apart("pushed", n) and apart("gradient", n) is False]


def _lost_updates(case: Case) -> str:
    unmoved = [(share, name) for each in case.both() for name, share in each.unmoved.items()]
    share, name = max(unmoved, default=(0.0, ""))
    return f"{share:.0%} of the elements of {name}" if share > _UNMOVED else ""


_Rule = tuple[str, Callable[[Case], object], str]
_RULES: tuple[_Rule, ...] = (
    (
        " ".join(STAGES),
        lambda case: case.repeated and case.repeated.first,
        "the program differs from its own repetition in one process, from step {found.step} on "
        "({found.stage}): it draws numbers without a seed, or uses kernels that are not "
        "deterministic. Seed what it draws; what differs beyond that cannot be told",
    ),
    (
        "examples",
        _other_positions,
        "the workers were dealt the examples {found[0]} and one process {found[1]}: the order of "
        "the data, a sampler, or an epoch's end depends on the number of workers",
    ),
    (
        "loss gradient",
        lambda case: any("model" in each.drew for each in case.both()),
        "the model draws random numbers in its forward pass (not by dropout, which is compared "
        "with the same draws): each worker draws its own, and one process others. The runs cannot "
        "be the same number by number; draw in the data set, where numbers follow from the "
        "example, to compare them",
    ),
    (
        "loss gradient values state",
        _silent_hooks,
        "the {found[0]} is called in one process, and not in the job: the strategy computes with "
        "other modules or parameters than those that have the hook",
    ),
    (
        "loss gradient",
        _uncounted_weights,
        "the loss of each worker is a mean over something else than its examples, such as tokens "
        "that count, and workers are weighed by their examples ({found}): say how much each "
        "counts, by weight= of the session, or optimizer.step(examples=number_of_tokens)",
    ),
    (
        "loss gradient buffers",
        _whole_batch_layers,
        "{found} normalises each worker's batch by that batch alone, and one process all of it "
        "together: use torch.nn.SyncBatchNorm.convert_sync_batchnorm under allreduce, GroupNorm "
        "or LayerNorm; or take it as it is, as with a smaller batch",
    ),
    (
        "loss gradient values state",
        _unreached,
        "parameter {found} and has one on the other workers{line}: which parameters a worker "
        "trains depends on its batch, or on which worker it is",
    ),
    (
        "examples loss gradient",
        lambda case: any("loop" in each.drew for each in case.both()),
        "the loop draws random numbers between two steps{line}: each worker draws its own, and "
        "one process others. Draw them in the data set, where numbers follow from the example's "
        "position",
    ),
    (
        "examples",
        lambda case: True,
        "{first.distance:.0f} examples at the same positions have other contents: the data set "
        "draws, or each process makes data of its own. Draw in `__getitem__`, where numbers "
        "follow from the example's position, or seed the program alike in all processes",
    ),
    (
        "loss",
        lambda case: True,
        "the losses differ though the examples and the values agree: the forward pass depends on "
        "something that differs between processes, such as the size of a batch or the rank",
    ),
    (
        "gradient",
        lambda case: True,
        "the losses agree and the gradients do not: something changes them on their way, such as "
        "a hook, or a gradient that is not the mean over the examples",
    ),
    (
        "settings",
        lambda case: True,
        "{first.name} is {first.job:.6g} in the job and {first.reference:.6g} in one process{line} "
        "(nan: it has none): the program sets it by steps that it counts itself, or by the number "
        "of processes. Let the job count: scheduler= of the session, or optimizer.loop_steps",
    ),
    (
        "values state",
        _changed_gradients,
        "the gradients are computed alike, and differ when they reach the optimizer{line} "
        "({found[0]}): the program clips or scales each worker's own gradient, by its own norm, "
        "and one process their mean. Use clip_norm= of Session or distribute, or call "
        "optimizer.synchronize() right after backward",
    ),
    (
        "values",
        _lost_updates,
        "{found} with a gradient did not move: updates are below half a unit in the last place of "
        "the parameters' dtype, so that rounding decides. Train float32 parameters and compute in "
        "bfloat16",
    ),
    (
        "values state",
        lambda case: True,
        "the gradients that reach the optimizer agree{line}, and what it makes of them does not "
        "({first.name}): the job's optimizer has other settings or another state than the "
        "program's, or values are written outside of it",
    ),
    (
        "buffers",
        lambda case: True,
        "only buffers differ ({first.name}): each worker updates its own from its own batches, "
        "and their mean is evaluated and saved. Parameters are trained alike",
    ),
    (
        "steps",
        lambda case: True,
        "the job ends after {first.job:.0f} steps and one process after {first.reference:.0f}: the "
        "loop ends by what it counts itself, or by the number of processes. Let optimizer.epochs, "
        "or max_steps=, end it",
    ),
)
"""In which stages a rule is looked at; what it finds, nothing where it does not apply; and what is
then said. The first that applies is the reason."""

_AFTER_RESUME = {
    "examples": "the resumed job trains on other examples: the program deals the data itself, or "
    "draws what it trains on without a seed that follows from the position",
    "loss": "the examples and the values are the same, and the loss is not: random numbers, "
    "buffers or a state of the program's own are not restored. Say deterministic=True; keep a "
    "state by optimizer.keep, or in a buffer of the model",
    "gradient": "the gradients differ, and the losses do not: a state of the program's own is lost",
    "settings": "the optimizer's settings are not those of the step: the program's schedule begins "
    "anew. Give the session the scheduler, or advance it to optimizer.loop_steps",
    "values": "the gradients agree and the values do not: the optimizer's state was not restored",
    "buffers": "buffers were not restored",
    "state": "the optimizer's state was not restored",
    "steps": "the resumed job ends at another step: the loop counts its steps from its own start",
}
