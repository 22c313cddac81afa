"""Makes the runs that are compared: the job, and processes that stand for it."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from trireme.cli.run import start
from trireme.job_config import JobConfig
from trireme.launch.config.task_config import TaskConfig, Trial, fresh_job
from trireme.launch.exit_reason import INTERRUPTED
from trireme.launch.launcher import TaskEnded
from trireme.launch.local import HostEngine
from trireme.launch.output import Console
from trireme.launch.process_setup.program import program_name
from trireme.launch.process_setup.resources import thread_variables, threads_of_task
from trireme.verification.record import Record, joined, read_records
from trireme.verification.recorder import INITIAL

_ORIGIN = "trireme verify"
_WARNS = " | warning: "
_FAILED = ". First "  # begins the cause in the launcher's report


@dataclass(frozen=True)
class Run:
    """What a run has recorded."""

    directory: Path
    status: int  # of its processes; 0 where it has made all steps
    output: Sequence[str]  # the lines that they printed

    @cached_property
    def records(self) -> dict[int, list[Record]]:
        """By step, of each worker."""
        return read_records(self.directory)

    @cached_property
    def steps(self) -> dict[int, Record]:
        """The same, joined into those of one process."""
        return joined(self.records)

    @property
    def initial(self) -> Path:
        """The file of the values that it began with."""
        return self.directory / INITIAL

    def notes(self) -> set[str]:
        """Returns what was changed for the comparison, and what the job has warned of."""
        noted = {each for step in self.records.values() for one in step for each in one.notes}
        warned = {line.partition(_WARNS)[2] for line in self.output if _WARNS in line}
        return noted | {f"the job warns: {text}" for text in warned}

    def cause(self) -> str:
        """Returns why it has failed: as the launcher says it, or as the last traceback ends."""
        told = [line.partition(_FAILED)[2] for line in self.output if _FAILED in line]
        *_, last = "\n".join(self.output).rpartition("Traceback (most recent call last)")
        errors = [line for line in last.splitlines()[1:] if line[:1].strip()]
        return (told or errors or [*self.output[-1:], "it made no step"])[0]


class Runs:
    """Runs a program in temporary directories, again and again. Use it as a context manager.

    Args:
        program: the program with its arguments, as after `trireme run`.
    """

    def __init__(self, program: Sequence[str]) -> None:
        self._program = tuple(program)
        self._held = ExitStack()
        directory = tempfile.TemporaryDirectory(prefix="trireme-verify-")
        self._scratch = Path(self._held.enter_context(directory))
        self._lines: list[str] = []  # that processes which stand for a job have printed
        self._engine: HostEngine | None = None

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *exception: object) -> None:
        self._held.close()

    def job(self, task: TaskConfig, steps: int, run_dir: Path | None = None) -> Run:
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

    def reference(
        self, job: TaskConfig, trial: Trial, processes: int, settings: Mapping[str, int | str]
    ) -> Run:
        """Runs the program as one process that stands for a job, or as one for each worker.

        Args:
            job: what the job's tasks have in common.
            trial: what it stands for; its directory is added.
            processes: how many there are, each of which has the batches of one worker.
            settings: of the recorder.
        """
        directory = Path(tempfile.mkdtemp(prefix="reference-", dir=self._scratch))
        engine = self._engine = self._engine or self._opened(job)
        self._lines = []
        for replica in range(processes):
            config = {"strategy": "async", "run_dir": str(directory / f"run-{replica}")}
            task = TaskConfig(
                job=fresh_job(),
                index=replica,
                config=JobConfig().replaced(_ORIGIN, **config),
                descriptors=job.descriptors,
                threads=threads_of_task(os.environ, 2),
                trial=msgspec.structs.replace(
                    trial, record=str(directory), replica=replica, settings=dict(settings)
                ),
            )
            engine.start(task)
        statuses: list[int] = []
        while len(statuses) < processes:
            ended = (each for each in engine.wait(1.0) if isinstance(each, TaskEnded))
            statuses += [each.status for each in ended]
        return Run(directory, max(statuses, key=abs), self._lines)

    def _opened(self, job: TaskConfig) -> HostEngine:
        """Returns what starts processes, none of which outlives this one."""
        environ = {**os.environ, **thread_variables(os.environ, threads_of_task(os.environ, 2))}
        engine = self._held.enter_context(HostEngine(self._program, environ, self._printed))
        if job.config.launch.start == "auto":
            engine.fork_tasks(Console(io.StringIO(), io.StringIO(), {}))
        return engine

    def _printed(self, name: str, line: bytes, error: bool) -> None:
        self._lines.append(line.decode("utf-8", "replace"))
