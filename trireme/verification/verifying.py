"""Verifies jobs: runs them and one process, compares both, and looks for the reason."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from trireme.cli.command import number
from trireme.errors import UsageError
from trireme.job_config import JobConfig
from trireme.launch.config.task_config import TaskConfig
from trireme.launch.engines import ENGINES
from trireme.verification.compare import Difference, compare
from trireme.verification.reasons import Case, reason, reason_of_resume
from trireme.verification.record import Record, joined
from trireme.verification.recorder import INITIAL
from trireme.verification.runs import Run, Runs
from trireme.verification.verdict import Verdict


class Limits(NamedTuple):
    """How far jobs are compared."""

    steps: int
    stop_at: int  # after which a job is stopped and resumed; 0 where none is
    tolerance: float | None  # of gradients, relative; None derives it


def limits_of(dashes: str, steps: Any, stop_at: Any, tolerance: Any) -> Limits:
    """Returns what options say, whose names begin so; raises `UsageError` where one is wrong."""

    def checked(name: str, value: Any, most: float, whole: bool = True) -> float:
        what = f"a {'whole ' * whole}number above 0 and below {most:.0f}"
        return number(
            dashes + (name.replace("_", "-") if dashes else name),
            str(value),
            what,
            lambda it: 0 < it < most and (it % 1 == 0 or not whole),
        )

    last = int(checked("steps", steps, 1e6))
    stop = 0 if stop_at is None else int(checked("stop_at", stop_at, last))
    near = None if tolerance is None else checked("tolerance", tolerance, 1, whole=False)
    return Limits(last, stop, near)


class Verifier:
    """Compares jobs of one program with one process.

    Args:
        runs: runs the program.
        limits: how far.
        say: told what is done.
    """

    def __init__(
        self, runs: Runs, limits: Limits, say: Callable[[str], object] = lambda text: None
    ) -> None:
        self._limits = limits
        self._runs = runs
        self._compare = partial(compare, tolerance=limits.tolerance)
        self._say = say
        self._references: dict[tuple[Any, ...], Run] = {}

    def verify(self, task: TaskConfig) -> Verdict:
        """Compares a job with one process, or, stopped and resumed, with itself."""
        on, name = task.config.launch.on, name_of(task.config)
        if not ENGINES.load(on).one_host:
            raise UsageError(f"trireme verify --on {on}: runs are compared on this host alone")
        if self._limits.stop_at:
            return self._with_itself(name, task, self._limits.stop_at)
        return self._with_one_process(name, task)

    def _with_one_process(self, name: str, task: TaskConfig) -> Verdict:
        self._say(f"{name}: {self._runs.steps} steps as a job")
        job = self._runs.job(task)
        if job.ended_before(self._runs.steps):
            return _failed(name, job)
        every = [each for step in job.records.values() for each in step]
        batches = max(each.batches for each in every)
        nature = max(each.nature for each in every)
        dealt = all(each.dealt for each in every if each.weight > 0)
        pair = (1, 1) if nature else (batches, 1) if dealt else (1, batches)
        again = partial(self._reference, job, task, pair)
        reference = again()
        if reference.ended_before(self._runs.steps):
            return _failed(f"{name}: as one process", reference)
        notes = sorted(job.notes() | reference.notes())
        against, found = "one process", self._compare(job.steps, reference.steps)
        if nature:
            found = replace(found, found=())
            return Verdict(name, "apart", against, nature, found, notes)
        if pair[1] > 1:
            against += f" for each of {batches} loops, with their gradients joined"
        repeated = None
        if found.first is not None:
            self._say(f"{name}: a difference; how far rounding leads, and a repetition")
            found = self._compare(job.steps, reference.steps, grown=again(perturb=1).steps)
            repeated = self._compare(again(again=1).steps, reference.steps)
        if (first := found.first) is None:
            return Verdict(name, "same", against, "", found, notes)
        why = reason(Case(first, _at(job.steps, first), _at(reference.steps, first), repeated))
        return Verdict(name, "differs", against, why, found, notes)

    def _with_itself(self, name: str, task: TaskConfig, stop_at: int) -> Verdict:
        """Compares a job that is stopped at a step and resumed with one that is not."""
        self._say(f"{name}: {self._runs.steps} steps without a stop; then one at step {stop_at}")
        name = f"{name}, stopped at step {stop_at} and resumed"
        whole = self._runs.job(task)
        run_dir = whole.directory / "resumed"
        before = self._runs.job(task, steps=stop_at, run_dir=run_dir)
        after = self._runs.job(task, run_dir=run_dir)
        for run, last in ((whole, self._runs.steps), (before, stop_at), (after, self._runs.steps)):
            if run.ended_before(last):
                return _failed(name, run)
        resumed = {step: each for step, each in before.records.items() if step <= stop_at}
        resumed |= {step: each for step, each in after.records.items() if step > stop_at}
        steps, against = joined(resumed), "the job that was not stopped"
        found = self._compare(steps, whole.steps)
        if (first := found.first) is None:
            return Verdict(name, "same", against, "", found)
        case = Case(first, _at(steps, first), _at(whole.steps, first))
        return Verdict(name, "differs", against, reason_of_resume(case, stop_at), found)

    def _reference(
        self, job: Run, task: TaskConfig, batches: tuple[int, int], **settings: int
    ) -> Run:
        """Returns the run of one process; jobs that begin alike have the same."""
        begin = hashlib.sha256((job.directory / INITIAL).read_bytes()).hexdigest()
        key = (begin, batches, *settings)
        if key not in self._references:
            self._say(f"{self._runs.steps} steps as one process")
            self._references[key] = self._runs.reference(job, task, settings, batches)
        return self._references[key]


def name_of(config: JobConfig) -> str:
    """Returns the name of a job, such as `sync, ps=1, workers=2`."""
    options: dict[str, Any] = {"ps": config.tasks.ps, "workers": config.tasks.workers}
    options |= {"replicas": config.tasks.replicas - 1 and config.tasks.replicas}
    options |= {"mesh": config.model.mesh}
    words = [f"{name}={value}" for name, value in options.items() if value]
    return ", ".join([config.training.strategy or "the program's strategy", *words])


def _failed(name: str, run: Run) -> Verdict:
    """Returns the verdict on a run that has ended before its last step."""
    last = max(run.records, default=0)
    if run.status == 2 and not last:
        return Verdict(name, "refused", reason=run.cause())
    why = f"it ended with status {run.status} after step {last}: {run.cause()}"
    return Verdict(name, "failed", reason=why)


def _at(steps: Mapping[int, Record], first: Difference) -> Record:
    """Returns the step that differs; of a run that has ended before, its last."""
    return steps.get(first.step) or steps[max(steps)]
