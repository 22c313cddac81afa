"""Verifies jobs: runs them and one process, compares both, and looks for the reason."""

from __future__ import annotations

import hashlib
import io
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from trireme.cli.run import prepare, start
from trireme.errors import UsageError
from trireme.job_config import JobConfig
from trireme.launch.config.task_config import TaskConfig, Trial, fresh_job
from trireme.launch.engines import ENGINES
from trireme.launch.exit_reason import INTERRUPTED
from trireme.launch.output import Console
from trireme.launch.process_setup.program import program_name
from trireme.verification.compare import compare
from trireme.verification.entry import Options
from trireme.verification.reasons import reason, reason_of_resume
from trireme.verification.record import Run, joined
from trireme.verification.recorder import INITIAL
from trireme.verification.verdict import Verdict

_ORIGIN = "trireme verify"


class _Ended(Exception):
    """A run has ended before its last step: the outcome, and why."""


@dataclass
class Verifier:
    """Compares jobs of one program with one process."""

    program: Sequence[str]  # with its arguments, as after `trireme run`
    limits: Options
    scratch: str  # a directory for what runs record
    say: Callable[[str], object] = str  # told what is done

    def __post_init__(self) -> None:
        self._compare = partial(compare, tolerance=self.limits.tolerance)
        self._references: dict[tuple[object, ...], Run] = {}

    def verify(self, config: JobConfig, **inherited: int) -> Verdict:
        """Compares a job with one process, or, stopped and resumed, with itself.

        Its processes inherit descriptors, by what they are for.
        """
        task = prepare(config).inheriting(**inherited)
        if not ENGINES.load(config.launch.on).one_host:
            raise UsageError(
                f"trireme verify --on {config.launch.on}: runs are compared on this host alone"
            )
        name, stop_at = name_of(task.config), self.limits.stop_at
        try:
            if stop_at is None:
                return self._with_one_process(name, task)
            return self._with_itself(name, task, stop_at)
        except _Ended as ended:
            return Verdict(name, *ended.args)

    def _with_one_process(self, name: str, task: TaskConfig) -> Verdict:
        job = self._run(task, f"{name}, {self.limits.steps} steps as a job", self.limits.steps)
        every = [each for step in job.records.values() for each in step]
        batches, nature = (max(getattr(e, f) for e in every) for f in ("batches", "nature"))
        dealt = any(each.positions for each in every)
        replicas = 1 if nature else batches
        loops = 1 if dealt else replicas
        again = partial(self._reference, task, job, replicas, loops)
        reference = again()
        notes, against = sorted(job.notes() | reference.notes()), "one process"
        found = self._compare(job.steps, reference.steps)
        if nature:
            return Verdict(name, "apart", nature, replace(found, first=None), against, notes)
        if loops > 1:
            against += f" for each of {loops} loops, with their gradients joined"
        if found.first is not None:
            found = self._compare(job.steps, reference.steps, grown=again("perturbed").steps)
        if (first := found.first) is None:
            return Verdict(name, "same", "", found, against, notes)
        repeated = self._compare(again("repeated").steps, reference.steps).first
        why = reason(first, job.steps, reference.steps, repeated)
        return Verdict(name, "differs", why, found, against, notes)

    def _with_itself(self, name: str, task: TaskConfig, stop_at: int) -> Verdict:
        """Compares a job that is stopped at a step and resumed with one that is not."""
        steps, against = self.limits.steps, "the job that was not stopped"
        whole = self._run(task, f"{name}, {steps} steps without a stop", steps)
        run_dir = str(whole.directory / "resumed")
        name = f"{name}, stopped at step {stop_at} and resumed"
        before = self._run(task, f"{name}: until then", stop_at, run_dir)
        after = self._run(task, f"{name}: from then on", steps, run_dir)
        records = {step: each for step, each in before.records.items() if step <= stop_at}
        records |= {step: each for step, each in after.records.items() if step > stop_at}
        found = self._compare(joined(records), whole.steps)
        if (first := found.first) is None:
            return Verdict(name, "same", "", found, against)
        return Verdict(name, "differs", reason_of_resume(first, stop_at), found, against)

    def _reference(
        self, task: TaskConfig, job: Run, replicas: int, loops: int, variant: str = ""
    ) -> Run:
        """Runs the program as one process that stands for a job, or as one for each of its loops.

        It begins with the job's values, which are off by rounding if `perturbed`; jobs that begin
        alike have the same. So many `replicas` of a batch make one step.
        """
        initial = job.directory / INITIAL
        begin = hashlib.sha256(initial.read_bytes()).hexdigest()
        if (key := (begin, replicas, loops, variant)) not in self._references:
            given = {"strategy": "async", "start": task.config.launch.start}
            config = JobConfig().replaced(_ORIGIN, **given)
            self._references[key] = self._run(
                TaskConfig(job="", workers=loops, config=config, descriptors=task.descriptors),
                f"{self.limits.steps} steps as one process{variant and f', {variant}'}",
                self.limits.steps,
                replicas=replicas,
                joined=replicas // loops,
                settings={"initial": str(initial), "variant": variant},
            )
        return self._references[key]

    def _run(self, task: TaskConfig, what: str, steps: int, run_dir: str = "", **trial: Any) -> Run:
        """Runs the program as a job, as `trireme run` does, to a global step."""
        self.say(what)
        directory = Path(tempfile.mkdtemp(dir=self.scratch))
        config = task.config.replaced(_ORIGIN, run_dir=run_dir or str(directory / "run"))
        made = Trial(record=str(directory), most_steps=steps, **trial)
        task = msgspec.structs.replace(task, job=fresh_job(), config=config, trial=made)
        out = io.StringIO()
        status = start(task, self.program, program_name(self.program), Console(out, out, {}))
        if status == INTERRUPTED:  # by a signal, which ends all of it
            raise KeyboardInterrupt
        run = Run(directory, out.getvalue().splitlines())
        last = max(run.records, default=0)
        if status == 2 and not last:
            raise _Ended("refused", run.cause())
        if len(run.records) < 2 or (status and last < steps):  # a program may end by itself
            raise _Ended("failed", f"{what}: status {status} after step {last}: {run.cause()}")
        return run


def name_of(config: JobConfig) -> str:
    """Returns the name of a job, such as `sync, ps=1, workers=2`."""
    tasks = config.tasks
    options = {"ps": tasks.ps, "workers": tasks.workers, "mesh": config.model.mesh}
    options |= {"replicas": tasks.replicas if tasks.replicas > 1 else 0}
    words = [f"{name}={value}" for name, value in options.items() if value]
    return ", ".join([config.training.strategy or "the program's strategy", *words])
