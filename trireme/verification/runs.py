"""Makes the runs that are compared: the job, and processes that stand for it."""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO

import msgspec

from trireme.cli.run import start
from trireme.job_config import JobConfig
from trireme.launch.config.task_config import (
    TASK_VARIABLE,
    TaskConfig,
    Trial,
    encode_task,
    fresh_job,
)
from trireme.launch.exit_reason import INTERRUPTED
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

    def ended_before(self, step: int) -> bool:
        """Whether it has failed before a step; a program may end earlier by itself."""
        return len(self.records) < 2 or (self.status != 0 and max(self.records) < step)

    def notes(self) -> set[str]:
        """Returns what was changed for the comparison, and what the job has warned of."""
        warned = {line.partition(_WARNS)[2] for line in self.output if _WARNS in line}
        noted = {each for step in self.records.values() for one in step for each in one.notes}
        return noted | {f"the job warns: {text}" for text in warned}

    def cause(self) -> str:
        """Returns why it has failed: as the launcher says it, or as the last traceback ends."""
        told = [line.partition(_FAILED)[2] for line in self.output if _FAILED in line]
        *_, last = "\n".join(self.output).rpartition("Traceback (most recent call last)")
        errors = [line for line in last.splitlines()[1:] if line[:1].strip()]
        return (told or errors or [*self.output[-1:], "it made no step"])[0]


class Runs:
    """Runs a program in temporary directories, again and again.

    Args:
        program: the program with its arguments, as after `trireme run`.
        steps: the global step at which every run ends.
        scratch: where the directories are.
        environ: the environment of processes that stand for a job.
    """

    def __init__(
        self, program: Sequence[str], steps: int, scratch: Path, environ: Mapping[str, str]
    ) -> None:
        self.program = tuple(program)
        self.steps = steps
        self._scratch = scratch
        self._environ = environ

    def job(self, task: TaskConfig, steps: int | None = None, run_dir: Path | None = None) -> Run:
        """Runs the program as a job, as `trireme run` does, to the last step or an earlier one."""
        directory = Path(tempfile.mkdtemp(prefix="job-", dir=self._scratch))
        config = task.config.replaced(_ORIGIN, run_dir=str(run_dir or directory / "run"))
        trial = Trial(record=str(directory), most_steps=steps or self.steps)
        task = msgspec.structs.replace(task, job=fresh_job(), config=config, trial=trial)
        out = io.StringIO()
        status = start(task, self.program, program_name(self.program), Console(out, out, {}))
        if status == INTERRUPTED:  # by a signal, which ends all of it
            raise KeyboardInterrupt
        return Run(directory, status, out.getvalue().splitlines())

    def reference(
        self, job: Run, task: TaskConfig, settings: Mapping[str, int], batches: tuple[int, int]
    ) -> Run:
        """Runs the program as one process that stands for a job, or as one for each worker.

        Args:
            job: the job, with whose first values it begins.
            task: what the job's tasks have in common.
            settings: of the recorder.
            batches: how many batches of the job make one here; how many processes there are, each
                of which has the batches of one worker.
        """
        directory = Path(tempfile.mkdtemp(prefix="reference-", dir=self._scratch))
        trial = Trial(
            record=str(directory),
            most_steps=self.steps,
            joined=batches[0],
            replicas=max(batches),
            settings={"initial": str(job.directory / INITIAL), **settings},
        )
        with (directory / "output").open("w+b") as output, ExitStack() as started:
            processes = []
            for replica in range(batches[1]):
                process = self._start(task, trial, replica, output)
                processes.append(started.enter_context(process))
                started.callback(process.kill)
            status = max([process.wait() for process in processes], key=abs)
            output.seek(0)
            return Run(directory, status, output.read().decode("utf-8", "replace").splitlines())

    def _start(
        self, job: TaskConfig, trial: Trial, replica: int, output: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        threads = threads_of_task(self._environ, 2)
        run_dir = f"{trial.record}/run-{replica}"
        task = TaskConfig(
            job=fresh_job(),
            index=replica,
            config=JobConfig().replaced(_ORIGIN, strategy="async", run_dir=run_dir),
            descriptors=job.descriptors,
            threads=threads,
            trial=msgspec.structs.replace(trial, replica=replica),
        )
        variables = thread_variables(self._environ, threads) | {TASK_VARIABLE: encode_task(task)}
        return subprocess.Popen(
            [sys.executable, *self.program],
            env={**self._environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=list(task.descriptors.values()),
        )
