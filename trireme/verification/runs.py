"""Makes the runs that are compared: the job, and processes that stand for it."""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

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
from trireme.verification.joined import Step, joined
from trireme.verification.record import Record, read_records
from trireme.verification.recorder import INITIAL

_LAST_LINES = 15

RecorderSettings: TypeAlias = Mapping[str, str | int | float]


@dataclass(frozen=True)
class Run:
    """What a run has recorded.

    Attributes:
        records: by step, of each worker.
        steps: the same, joined into those of one process.
        status: the exit status; 0 where it has made all steps.
        output: the last lines that its processes printed.
        directory: where its files are.
    """

    records: dict[int, list[Record]]
    status: int
    output: list[str]
    directory: Path
    steps: dict[int, Step] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", joined(self.records))

    def ended_before(self, step: int) -> bool:
        """Whether it has failed before a step; a program may end earlier by itself."""
        return len(self.records) < 2 or (self.status != 0 and max(self.records) < step)

    @property
    def dealt(self) -> bool:
        """Whether the job has dealt the examples of every step."""
        every = [each for several in self.records.values() for each in several if each.weight > 0]
        return all(each.dealt for each in every)


class Runs:
    """Runs a program in temporary directories, again and again.

    Args:
        program: the program with its arguments, as after `trireme run`.
        steps: the global step at which every run ends.
        scratch: where the directories are.
        environ: the environment of processes that stand for a job.
        descriptors: that the program inherits, by what they are for.
    """

    def __init__(
        self,
        program: Sequence[str],
        steps: int,
        scratch: Path,
        environ: Mapping[str, str],
        descriptors: Mapping[str, int] | None = None,
    ) -> None:
        self.program = tuple(program)
        self.steps = steps
        self._scratch = scratch
        self._environ = environ
        self._descriptors = dict(descriptors or {})

    def job(
        self,
        task: TaskConfig,
        settings: RecorderSettings,
        *,
        steps: int | None = None,
        run_dir: Path | None = None,
    ) -> Run:
        """Runs the program as a job, as `trireme run` does.

        Args:
            task: what its tasks have in common.
            settings: of the recorder.
            steps: the step at which it ends; by default that of all runs.
            run_dir: its run directory; by default a new one.
        """
        directory = self._directory("job")
        config = task.config.replaced("trireme verify", run_dir=str(run_dir or directory / "run"))
        trial = Trial(
            record=str(directory), most_steps=steps or self.steps, settings=dict(settings)
        )
        task = msgspec.structs.replace(task, job=fresh_job(), config=config, trial=trial)
        out = io.StringIO()
        status = start(task, self.program, program_name(self.program), Console(out, out, {}))
        if status == INTERRUPTED:  # by Ctrl-C, which ends all of it
            raise KeyboardInterrupt
        return _run(directory, status, out.getvalue())

    def reference(
        self, first: Run, settings: RecorderSettings, *, joined: int = 1, replicas: int = 1
    ) -> Run:
        """Runs the program as one process that stands for a job, or as one for each worker.

        Args:
            first: the job, whose first values it begins with.
            settings: of the recorder.
            joined: how many batches of the job make one batch here.
            replicas: how many processes there are; each has the batches of one worker.
        """
        directory = self._directory("reference")
        given = {"initial": str(first.directory / INITIAL), **settings}
        threads = threads_of_task(self._environ, max(replicas, 2))
        started, logs = [], []
        for replica in range(replicas):
            trial = Trial(
                record=str(directory),
                most_steps=self.steps,
                joined=joined,
                replica=replica,
                replicas=max(joined, replicas),
                settings=given,
            )
            log = directory / f"output-{replica}.txt"
            logs.append(log)
            started.append(self._process(directory, trial, log, replica, threads))
        try:
            status = max([process.wait() for process in started], key=abs)
        finally:
            for process in started:
                process.kill()
        return _run(directory, status, "".join(log.read_text("utf-8", "replace") for log in logs))

    def _process(
        self, directory: Path, trial: Trial, log: Path, replica: int, threads: int
    ) -> subprocess.Popen[bytes]:
        config = JobConfig().replaced(
            "trireme verify", strategy="async", run_dir=str(directory / f"run-{replica}")
        )
        task = TaskConfig(
            job=fresh_job(), config=config, trial=trial, threads=threads, index=replica
        ).inheriting(**self._descriptors)
        variables = {**thread_variables(self._environ, threads), TASK_VARIABLE: encode_task(task)}
        with log.open("wb") as file:
            return subprocess.Popen(
                [sys.executable, *self.program],
                env={**self._environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                pass_fds=list(self._descriptors.values()),
            )

    def _directory(self, name: str) -> Path:
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._scratch))


def _run(directory: Path, status: int, output: str) -> Run:
    return Run(read_records(directory), status, output.splitlines()[-_LAST_LINES:], directory)
