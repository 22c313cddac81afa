"""Tiny programs in place of tasks, and a job made of them."""

from __future__ import annotations

import io
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from trireme.launch.config.task_config import TaskConfig
from trireme.launch.launcher import Job, Membership
from trireme.launch.local import run_local
from trireme.launch.output import Console
from trireme.launch.run_directory import JobRecord, claim, read_record
from trireme.launch.supervision_state import SupervisionLimits

PRELUDE = """
import json, os, signal, sys
def tell(tag, /, **content):
    fd = json.loads(os.environ["TRIREME_TASK"])["descriptors"]["launcher"]
    os.write(fd, json.dumps({{"type": tag, **content}}).encode() + b"\\n")
HERE = {here!r}
"""


LIMITS = SupervisionLimits(settle=0.2, stop=20.0, end=5.0, kill=5.0, echo=0.0)

Script = Callable[["FakeCoordinator"], object]
"""What happens to the members of a job; it runs on a thread of its own."""


class FakeCoordinator:
    """In place of a coordinator: keeps what it is told, and says what a script has it say."""

    address = "tcp://127.0.0.1:9"

    def __init__(
        self, script: Script | None, task: TaskConfig, on_change: Callable[[], object]
    ) -> None:
        self.task = task
        self.ended: list[tuple[str, str, int, str]] = []
        self.stops: list[str] = []
        self.closed = False
        self._members = Membership(joined=True, formed=True)
        self._on_change = on_change
        if script is not None:
            threading.Thread(target=script, args=[self], daemon=True).start()

    def say(self, members: Membership) -> None:
        self._members = members
        self._on_change()

    def membership(self) -> Membership:
        return self._members

    def process_ended(self, task: str, host: str, pid: int, reason: str) -> None:
        self.ended.append((task, host, pid, reason))

    def stop_job(self, reason: str) -> None:
        self.stops.append(reason)

    def close(self) -> None:
        self.closed = True


@dataclass
class Ran:
    """What came of a job."""

    status: int
    out: str
    err: str
    record: JobRecord
    directory: Path
    commands: list[TaskConfig] = field(default_factory=list)
    coordinators: list[FakeCoordinator] = field(default_factory=list)

    def log(self, name: str) -> str:
        return (self.directory / "logs" / f"{name}.log").read_text()


def run_programs(
    directory: Path,
    programs: Mapping[str, str],
    *,
    limits: SupervisionLimits | None = None,
    script: Script | None = None,
    later: Collection[str] = (),
    through: Sequence[str] = (),
) -> Ran:
    """Runs a job in which each task is a program of its own, by the task's name.

    Args:
        directory: the run directory.
        programs: the program of each task.
        limits: the limits of its supervision.
        script: what its coordinator says; it has one if it has servers.
        later: the tasks that the job does not begin with.
        through: what starts each task, before its command.
    """
    first = programs.keys() - later
    servers = sum(name.startswith("ps:") for name in first)
    workers = sum(name.startswith("worker:") for name in first)
    started: list[TaskConfig] = []
    coordinators: list[FakeCoordinator] = []

    def coordinate(task: TaskConfig, on_change: Callable[[], object]) -> FakeCoordinator:
        coordinators.append(FakeCoordinator(script, task, on_change))
        return coordinators[-1]

    def build(config: TaskConfig, program: Sequence[str]) -> list[str]:
        started.append(config)
        prelude = PRELUDE.format(here=str(directory))
        code = prelude + textwrap.dedent(programs[config.name])
        return [*through, sys.executable, "-S", "-c", code]

    job = Job(
        program=("program.py",),
        task=TaskConfig(job="job", workers=workers, servers=servers, secret="00"),
        limits=replace(limits or LIMITS, coordinated=servers > 0),
        coordinate=coordinate if servers else None,
    )
    out, err = io.StringIO(), io.StringIO()
    claimed = claim(directory)
    try:
        status = run_local(job, claimed, Console(out, err, {}), build)
    finally:
        claimed.release()
    record = read_record(directory)
    return Ran(status, out.getvalue(), err.getvalue(), record, directory, started, coordinators)


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has reaped yet does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Waits for something that another process does."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        os.sched_yield()
    return True
