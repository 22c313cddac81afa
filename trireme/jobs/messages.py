"""What a job's launcher tells the program that has started it: lines of JSON in a pipe."""

from __future__ import annotations

import msgspec

from trireme.launch.config.task_config import TaskConfig
from trireme.monitor.job_state import JobSnapshot


class Order(msgspec.Struct, frozen=True):
    """What the launcher is to start, the first line that it receives.

    Attributes:
        task: what all tasks of the job have in common.
        program: the program of the workers and its arguments.
        name: the name of the run directory under `runs/`, where no other is configured.
    """

    task: TaskConfig
    program: tuple[str, ...]
    name: str


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """The job begins.

    Attributes:
        run_dir: its run directory.
    """

    run_dir: str


class Line(msgspec.Struct, frozen=True, tag="line"):
    """A line that a task has printed.

    Attributes:
        task: the task's name.
        text: the line, without its line end.
        error: whether it went to standard error.
    """

    task: str
    text: str
    error: bool


class Said(msgspec.Struct, frozen=True, tag="said"):
    """A line of the launcher's own.

    Attributes:
        text: the line.
        alarm: whether it tells of something wrong.
    """

    text: str
    alarm: bool


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """How far the job is.

    Attributes:
        step: the global step.
        max_steps: the global step at which training ends; 0 if unknown.
        loss: the chief's newest loss; None if there is none yet.
        examples_per_second: of all workers together.
        missing: the tasks that the job waits for.
        tasks: the state of each task, such as `training`, by its name.
    """

    step: int = 0
    max_steps: int = 0
    loss: float | None = None
    examples_per_second: float = 0.0
    missing: tuple[str, ...] = ()
    tasks: dict[str, str] = {}

    @property
    def text(self) -> str:
        """The progress as one line."""
        if self.missing:
            return f"waiting for {', '.join(self.missing)}"
        parts = []
        if self.step or self.max_steps:
            of = f"/{self.max_steps}" if self.max_steps else ""
            parts.append(f"global step {self.step}{of}")
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4g}")
        if self.examples_per_second:
            parts.append(f"{self.examples_per_second:,.0f} examples/s")
        states = {name: s for name, s in self.tasks.items() if s and name.startswith("worker")}
        if len(set(states.values())) == 1:
            parts.append(next(iter(states.values())))
        elif states:
            parts.append(", ".join(f"{name} {state}" for name, state in states.items()))
        return "  ".join(parts)


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """The job has ended, or could not start.

    Attributes:
        status: its exit status, as of `trireme run`.
        failure: the lines of the failure report; empty unless the job failed.
        traceback: the traceback of the task that failed first; "" for none.
        error: why the job could not start; "" if it did.
        usage: whether that is an error of usage.
    """

    status: int
    failure: tuple[str, ...] = ()
    traceback: str = ""
    error: str = ""
    usage: bool = False


Report = Begun | Line | Said | Progress | Ended


def progress_of(picture: JobSnapshot) -> Progress:
    """Returns how far a job is, from a snapshot of it."""
    workers = [task for task in picture.of("worker") if "loss" in task.status]
    return Progress(
        step=picture.step,
        max_steps=picture.last_step,
        loss=workers[0].number("loss") if workers else None,
        examples_per_second=picture.pace,
        missing=tuple(picture.missing),
        tasks={task.name: task.state for task in picture.tasks},
    )
