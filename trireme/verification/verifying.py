"""Verifies jobs: runs them and one process, compares both, and looks for the reason."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from trireme.job_config import JobConfig
from trireme.launch.config.task_config import TaskConfig
from trireme.verification.compare import Comparison, Difference, compare
from trireme.verification.joined import Step
from trireme.verification.reasons import Case, reason, reason_of_resume
from trireme.verification.recorder import INITIAL
from trireme.verification.runs import RecorderSettings, Run, Runs
from trireme.verification.verdict import Exact, Verdict

_KINDS = {"gradient": "computed", "values": "values", "buffers": "buffers", "state": "state"}
_PARTS_OF_EXAMPLES = ("tensor", "pipeline", "graph")
"""The strategies under which a layer sees pieces of a batch, or parts of its inputs."""


class Verifier:
    """Compares jobs of one program with one process.

    Args:
        runs: runs the program.
        tolerance: relative, of gradients; None derives it.
        say: told what is done.
    """

    def __init__(
        self, runs: Runs, tolerance: float | None = None, say: Callable[[str], None] = print
    ) -> None:
        self._runs = runs
        self._tolerance = tolerance
        self._say = say
        self._references: dict[tuple[Any, ...], Run] = {}

    def verify(self, name: str, task: TaskConfig) -> Verdict:
        """Compares a job with one process that has the same examples."""
        settings = _settings(task.config)
        self._say(f"{name}: {self._runs.steps} steps as a job")
        job = self._runs.job(task, settings)
        begin = next((r for each in job.records.values() for r in each if r.batches), None)
        if begin is None or job.ended_before(self._runs.steps):
            return _failed(name, job)
        joined, replicas = (begin.batches, 1) if job.dealt else (1, begin.batches)
        if begin.nature:
            joined = replicas = 1
        again = partial(self._reference, job, joined, replicas, settings)
        reference = again({})
        if reference.ended_before(self._runs.steps):
            return _failed(f"{name}: as one process", reference)
        against = "one process"
        if replicas > 1:
            against = f"one process for each of {replicas} loops, with their gradients joined"
        notes = tuple(sorted({n for each in job.records.values() for r in each for n in r.notes}))
        found = self._compare(job.steps, reference.steps)
        if begin.nature:
            return Verdict(name, "apart", against, begin.nature, _unjudged(found), notes=notes)
        repeated = None
        if found.first is not None:
            self._say(f"{name}: a difference; how far rounding leads, and a repetition")
            grown = again({"perturb": 1})
            found = self._compare(job.steps, reference.steps, grown.steps)
            repeated = self._compare(again({"again": 1}).steps, reference.steps)
        if found.first is None:
            return Verdict(name, "same", against, "", found, notes=notes)
        case = _case(found, job, reference, repeated)
        exact = self._exact(found.first, task, settings, again)
        return Verdict(name, "differs", against, reason(case), found, exact, notes)

    def verify_resume(self, name: str, task: TaskConfig, stop_at: int) -> Verdict:
        """Compares a job that is stopped at a step and resumed with one that is not."""
        settings = _settings(task.config)
        self._say(f"{name}: {self._runs.steps} steps without a stop")
        whole = self._runs.job(task, settings)
        if whole.ended_before(self._runs.steps):
            return _failed(name, whole)
        self._say(f"{name}: stopped at step {stop_at}, and resumed")
        run_dir = whole.directory / "resumed"
        before = self._runs.job(task, settings, steps=stop_at, run_dir=run_dir)
        after = self._runs.job(task, settings, run_dir=run_dir)
        name = f"{name}, stopped at step {stop_at} and resumed"
        steps = {s: each for s, each in before.steps.items() if s <= stop_at}
        steps |= {s: each for s, each in after.steps.items() if s > stop_at}
        if before.ended_before(stop_at):
            return _failed(name, before)
        if after.ended_before(self._runs.steps) or max(steps) <= stop_at:
            return _failed(name, after)
        found = self._compare(steps, whole.steps)
        against = "the job that was not stopped"
        if found.first is None:
            return Verdict(name, "same", against, "", found)
        first = found.first
        case = Case(first, found.found, steps[first.step], whole.steps[first.step])
        return Verdict(name, "differs", against, reason_of_resume(case, stop_at), found)

    def _compare(
        self,
        job: Mapping[int, Step],
        reference: Mapping[int, Step],
        grown: Mapping[int, Step] | None = None,
    ) -> Comparison:
        return compare(job, reference, grown=grown, tolerance=self._tolerance)

    def _reference(
        self,
        job: Run,
        joined: int,
        replicas: int,
        settings: RecorderSettings,
        more: RecorderSettings,
    ) -> Run:
        """Returns the run of one process; jobs that begin alike have the same."""
        settings = {**settings, **more}
        begin = hashlib.sha256((job.directory / INITIAL).read_bytes()).hexdigest()
        key = (begin, joined, replicas, *sorted(settings.items()))
        if key not in self._references:
            self._say(f"{self._runs.steps} steps as one process")
            made = self._runs.reference(job, settings, joined=joined, replicas=replicas)
            self._references[key] = made
        return self._references[key]

    def _exact(
        self,
        first: Difference,
        task: TaskConfig,
        settings: RecorderSettings,
        again: Callable[[RecorderSettings], Run],
    ) -> Exact | None:
        """Runs both again, and compares the tensor that differs first as a whole."""
        if first.stage not in _KINDS:
            return None
        whole = {"whole": f"{first.step}/{_KINDS[first.stage]}/{first.name}"}
        self._say(f"looking at {first.name} of step {first.step} as a whole")
        mine = _whole(self._runs.job(task, {**settings, **whole}, steps=first.step), first)
        other = _whole(again(whole), first)
        if mine is None or other is None or mine.shape != other.shape:
            return None
        place = int((mine - other).abs().argmax())
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), mine.shape))
        return Exact(index, float(mine.reshape(-1)[place]), float(other.reshape(-1)[place]))


def _case(found: Comparison, job: Run, reference: Run, repeated: Comparison | None) -> Case:
    assert found.first is not None
    step = found.first.step
    return Case(found.first, found.found, job.steps[step], reference.steps[step], repeated)


def _unjudged(found: Comparison) -> Comparison:
    return Comparison(found.steps, (), found.curve, found.tolerance)


def _failed(name: str, run: Run) -> Verdict:
    """Returns the verdict on a run that has ended before its last step."""
    error = next((line for line in reversed(run.output) if "error: " in line), "")
    text = error.partition("error: ")[2] or "\n    ".join(run.output) or "it made no step"
    made = max(run.records, default=0)
    if run.status == 2 and error and not made:
        return Verdict(name, "refused", reason=text)
    return Verdict(
        name, "failed", reason=f"it ended with status {run.status} at step {made}: {text}"
    )


def _settings(config: JobConfig) -> RecorderSettings:
    """Returns the settings of the recorder: whether masks of dropout can follow the examples."""
    axes = config.model.mesh
    splits = config.training.strategy in _PARTS_OF_EXAMPLES or any(
        axis in axes for axis in ("tp", "pp", "graph")
    )
    return {"dropout": "off"} if splits else {}


def _whole(run: Run, first: Difference) -> torch.Tensor | None:
    """Returns a tensor of a step as a whole: of gradients, their mean over the workers."""
    records = {each.task: each for each in run.records.get(first.step, [])}
    parts: list[tuple[float, torch.Tensor]] = []
    for path in sorted(run.directory.glob("whole-*.safetensors")):
        worker = records.get(_task_of(path))
        weight = 1.0 if worker is None or worker.weighed else worker.weight
        tensor = next(iter(load_file(path).values())).to(torch.float64)
        if first.stage != "gradient":
            return tensor
        parts.append((weight, tensor))
    total = sum(weight for weight, _ in parts)
    if not total:
        return None
    return torch.stack([tensor * (weight / total) for weight, tensor in parts]).sum(0)


def _task_of(path: Path) -> str:
    return path.stem.removeprefix("whole-").replace("-", ":", 1).replace("-", "/")
