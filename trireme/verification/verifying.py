"""Verifies jobs: runs them and one process, compares both, and looks for the reason."""

from __future__ import annotations

import hashlib
import io
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from trireme.cli.command import number
from trireme.cli.run import prepare, start
from trireme.errors import UsageError
from trireme.job_config import JobConfig
from trireme.launch.config.task_config import TaskConfig, Trial, fresh_job
from trireme.launch.engines import ENGINES
from trireme.launch.exit_reason import INTERRUPTED
from trireme.launch.launcher import TaskEnded
from trireme.launch.local import HostEngine
from trireme.launch.output import Console
from trireme.launch.process_setup.program import program_name
from trireme.launch.process_setup.resources import thread_variables, threads_of_task
from trireme.verification.compare import Difference, compare
from trireme.verification.reasons import Case, reason, reason_of_resume
from trireme.verification.record import Record, joined
from trireme.verification.recorder import INITIAL
from trireme.verification.run import Run
from trireme.verification.verdict import Verdict

_ORIGIN = "trireme verify"


class Limits(NamedTuple):
    """How far jobs are compared."""

    steps: int
    stop_at: int  # after which a job is stopped and resumed; 0 where none is
    tolerance: float | None  # of gradients, relative; None derives it


def limits_of(steps: object, stop_at: object, tolerance: object) -> Limits:
    """Returns what the options of these names say; raises `UsageError` where one is wrong."""

    def whole(option: str, value: object, most: int) -> int:
        what = f"a whole number above 0 and below {most}"
        return int(number(option, str(value), what, lambda it: 0 < it < most and it % 1 == 0))

    last = whole("--steps", steps, 1_000_000)
    stop = 0 if stop_at is None else whole("--stop-at", stop_at, last)
    if tolerance is None:
        return Limits(last, stop, None)
    between = "a number above 0 and below 1"
    return Limits(last, stop, number("--tolerance", str(tolerance), between, lambda it: 0 < it < 1))


class Verifier:
    """Compares jobs of one program with one process. Use it as a context manager.

    Args:
        program: the program with its arguments, as after `trireme run`.
        limits: how far jobs are compared.
        environ: the environment of the processes that stand for jobs.
        say: told what is done.
    """

    def __init__(
        self,
        program: Sequence[str],
        limits: Limits,
        environ: Mapping[str, str],
        say: Callable[[str], object],
    ) -> None:
        self._program = tuple(program)
        self._limits = limits
        self._environ = environ
        self._compare = partial(compare, tolerance=limits.tolerance)
        self._say = say
        self._held = ExitStack()
        scratch = tempfile.TemporaryDirectory(prefix="trireme-verify-")
        self._scratch = self._held.enter_context(scratch)
        self._engine: HostEngine | None = None  # of the processes that stand for jobs
        self._printed: list[str] = []  # by these
        self._references: dict[tuple[object, ...], Run] = {}

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *exception: object) -> None:
        self._held.close()

    def verify(self, config: JobConfig, **inherited: int) -> Verdict:
        """Compares a job with one process, or, stopped and resumed, with itself.

        Its processes inherit descriptors, by what they are for.
        """
        task = prepare(config).inheriting(**inherited)
        if not ENGINES.load(config.launch.on).one_host:
            raise UsageError(
                f"trireme verify --on {config.launch.on}: runs are compared on this host alone"
            )
        compared = self._with_itself if self._limits.stop_at else self._with_one_process
        return compared(name_of(task.config), task)

    def _with_one_process(self, name: str, task: TaskConfig) -> Verdict:
        steps = self._limits.steps
        self._say(f"{name}: {steps} steps as a job")
        job = self._job(task, steps)
        if failed := _failed(name, job, steps):
            return failed
        every = [each for step in job.records.values() for each in step]
        batches, nature = (max(getattr(e, f) for e in every) for f in ("batches", "nature"))
        dealt = all(each.dealt for each in every if each.weight > 0)
        pair = (1, 1) if nature else (batches, 1) if dealt else (1, batches)
        again = partial(self._reference, job, task, pair)
        reference = again()
        if failed := _failed(f"{name}: as one process", reference, steps):
            return failed
        notes = sorted(job.notes() | reference.notes())
        against, found = "one process", self._compare(job.steps, reference.steps)
        if nature:
            return Verdict(name, "apart", against, nature, replace(found, found=()), notes)
        if pair[1] > 1:
            against += f" for each of {batches} loops, with their gradients joined"
        if found.first is not None:
            self._say(f"{name}: a difference; how far rounding leads, and a repetition")
            found = self._compare(job.steps, reference.steps, grown=again(perturb=1).steps)
        if (first := found.first) is None:
            return Verdict(name, "same", against, "", found, notes)
        repeated = self._compare(again(again=1).steps, reference.steps)
        why = reason(Case(first, _at(job.steps, first), _at(reference.steps, first), repeated))
        return Verdict(name, "differs", against, why, found, notes)

    def _with_itself(self, name: str, task: TaskConfig) -> Verdict:
        """Compares a job that is stopped at a step and resumed with one that is not."""
        steps, stop_at = self._limits.steps, self._limits.stop_at
        self._say(f"{name}: {steps} steps without a stop; then one at step {stop_at}")
        name = f"{name}, stopped at step {stop_at} and resumed"
        whole = self._job(task, steps)
        run_dir = whole.directory / "resumed"
        before = self._job(task, stop_at, run_dir)
        after = self._job(task, steps, run_dir)
        for run, last in ((whole, steps), (before, stop_at), (after, steps)):
            if failed := _failed(name, run, last):
                return failed
        resumed = {step: each for step, each in before.records.items() if step <= stop_at}
        resumed |= {step: each for step, each in after.records.items() if step > stop_at}
        mine, against = joined(resumed), "the job that was not stopped"
        found = self._compare(mine, whole.steps)
        if (first := found.first) is None:
            return Verdict(name, "same", against, "", found)
        case = Case(first, _at(mine, first), _at(whole.steps, first))
        return Verdict(name, "differs", against, reason_of_resume(case, stop_at), found)

    def _job(self, task: TaskConfig, steps: int, run_dir: Path | None = None) -> Run:
        """Runs the program as a job, as `trireme run` does, to a global step."""
        directory = Path(tempfile.mkdtemp(prefix="job-", dir=self._scratch))
        config = task.config.replaced(_ORIGIN, run_dir=str(run_dir or directory / "run"))
        trial = Trial(record=str(directory), most_steps=steps)
        task = msgspec.structs.replace(task, job=fresh_job(), config=config, trial=trial)
        out = io.StringIO()
        status = start(task, self._program, program_name(self._program), Console(out, out, {}))
        if status == INTERRUPTED:  # by a signal, which ends all of it
            raise KeyboardInterrupt
        return Run(directory, status, out.getvalue().splitlines())

    def _reference(
        self, job: Run, task: TaskConfig, batches: tuple[int, int], **settings: int
    ) -> Run:
        """Runs the program as one process that stands for a job, or as one for each worker.

        Jobs that begin alike have the same.

        Args:
            job: the job, with whose first values it begins.
            task: what the job's tasks have in common.
            batches: how many batches of the job make one here; how many processes there are, each
                of which has the batches of one worker.
            settings: of the recorder.
        """
        initial = job.directory / INITIAL
        key = (hashlib.sha256(initial.read_bytes()).hexdigest(), batches, *settings)
        if key in self._references:
            return self._references[key]
        self._say(f"{self._limits.steps} steps as one process")
        directory = Path(tempfile.mkdtemp(prefix="reference-", dir=self._scratch))
        engine = self._engine = self._engine or self._opened(task)
        self._printed = []
        for replica in range(batches[1]):
            config = {"strategy": "async", "run_dir": str(directory / f"run-{replica}")}
            trial = Trial(
                record=str(directory),
                most_steps=self._limits.steps,
                joined=batches[0],
                replica=replica,
                replicas=max(batches),
                settings={"initial": str(initial), **settings},
            )
            one = TaskConfig(
                job=fresh_job(),
                index=replica,
                config=JobConfig().replaced(_ORIGIN, **config),
                descriptors=task.descriptors,
                threads=threads_of_task(self._environ, 2),
                trial=trial,
            )
            engine.start(one)
        statuses: list[int] = []
        while len(statuses) < batches[1]:
            ended = (each for each in engine.wait(1.0) if isinstance(each, TaskEnded))
            statuses += [each.status for each in ended]
        run = self._references[key] = Run(directory, max(statuses, key=abs), self._printed)
        return run

    def _opened(self, job: TaskConfig) -> HostEngine:
        """Returns what starts processes, none of which outlives this one."""

        def show(name: str, line: bytes, error: bool) -> None:
            self._printed.append(line.decode("utf-8", "replace"))

        environ = {
            **self._environ,
            **thread_variables(self._environ, threads_of_task(self._environ, 2)),
        }
        engine = self._held.enter_context(HostEngine(self._program, environ, show))
        if job.config.launch.start == "auto":
            engine.fork_tasks(Console(io.StringIO(), io.StringIO(), {}))
        return engine


def name_of(config: JobConfig) -> str:
    """Returns the name of a job, such as `sync, ps=1, workers=2`."""
    tasks = config.tasks
    options = {"ps": tasks.ps, "workers": tasks.workers, "mesh": config.model.mesh}
    options |= {"replicas": tasks.replicas if tasks.replicas > 1 else 0}
    words = [f"{name}={value}" for name, value in options.items() if value]
    return ", ".join([config.training.strategy or "the program's strategy", *words])


def _failed(name: str, run: Run, steps: int) -> Verdict | None:
    """Returns the verdict on a run that has failed before a step; a program may end by itself."""
    last = max(run.records, default=0)
    if len(run.records) > 1 and (run.status == 0 or last >= steps):
        return None
    if run.status == 2 and not last:
        return Verdict(name, "refused", reason=run.cause())
    why = f"it ended with status {run.status} after step {last}: {run.cause()}"
    return Verdict(name, "failed", reason=why)


def _at(steps: Mapping[int, Record], first: Difference) -> Record:
    """Returns the step that differs; of a run that has ended before, its last."""
    return steps.get(first.step) or steps[max(steps)]
