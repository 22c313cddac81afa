"""What a job's launcher tells the program that has started it: lines of JSON in a pipe."""

from __future__ import annotations

import msgspec

from trireme.launch.config.task_config import TaskConfig


class Order(msgspec.Struct, frozen=True):
    """What the launcher is to start, the first line that it receives."""

    task: TaskConfig  # what all tasks of the job have in common
    program: tuple[str, ...]  # the program of the workers and its arguments
    name: str  # of the run directory under `runs/`, where no other is configured


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """The job begins, in its run directory."""

    run_dir: str


class Line(msgspec.Struct, frozen=True, tag="line"):
    """A line that a task has printed, or the launcher."""

    task: str  # its name; "" for the launcher
    text: str
    error: bool  # whether it went to standard error


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """How far the job is; see `trireme.jobs.job.JobStatus`."""

    step: int = 0
    max_steps: int = 0
    loss: float | None = None
    examples_per_second: float = 0.0
    waits_for: tuple[str, ...] = ()
    tasks: dict[str, str] = {}


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """The job has ended, or could not start."""

    status: int  # its exit status, as of `trireme run`
    failure: tuple[str, ...] = ()  # the lines of the failure report
    traceback: str = ""  # of the task that failed first
    error: str = ""  # why the job could not start
    usage: bool = False  # whether that is an error of usage


Report = Begun | Line | Progress | Ended
