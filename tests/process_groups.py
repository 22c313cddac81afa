"""Processes that hold one model together, quickly: forked from one that has torch loaded already.

Each runs a function of a module, which makes its `Session` as any program does. Servers, where a
job has some, are threads of the test's own process.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from tests.harness import JOB, SECRET, Cluster, Ran, check_installed, check_none_is_missing, keepers
from trireme.job_config import JobConfig
from trireme.launch.config.task_config import (
    TASK_VARIABLE,
    GroupMember,
    TaskConfig,
    decode_task,
    encode_task,
)

SECONDS = 180.0

SPAWNER = multiprocessing.get_context("forkserver")
SPAWNER.set_forkserver_preload(
    [
        "pytest",
        "tests.process_groups",
        "tests.parity.loop",
        "trireme.session.session",
        "trireme.loops.distribute",
        "trireme.parallel.backends.collective",
        "trireme.parallel.backends.worker_processes",
        "trireme.parallel.assembly",
        "trireme.parallel.tensor_parallel",
        "torch._dynamo",
        "torch.export._trace",  # what captures a graph
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "trireme.advice.programs",
        "trireme.dashboards.recording",
        "trireme.graph.placed.assembly",
        "trireme.parallel.pipeline",
        "tests.frozen",
    ]
)
"""Of the processes of a test run; they have one parent, that was started when the first was."""


@cache
def preload() -> None:
    """Has the parent of all processes import what they share: no timeout of a job counts that."""
    process = SPAWNER.Process(target=int)
    process.start()
    process.join()


@dataclass(frozen=True)
class ProcessGroup:
    """How a job is spread.

    Attributes:
        workers: how many workers; without servers, times the mesh's size that many processes.
        servers: how many parameter servers.
        mesh: as on the command line.
        inside: the size of that mesh.
        strategy, schedule, microbatches, every, aggregate, staleness: as on the command line.
        compress, transport: likewise.
        run_dir: where checkpoints go; None for nowhere.
    """

    workers: int = 1
    servers: int = 0
    mesh: str = ""
    inside: int = 1
    strategy: str | None = None
    schedule: str | None = None
    microbatches: int | None = None
    every: int | None = None
    aggregate: int | None = None
    staleness: int | None = None
    compress: str = "none"
    transport: Literal["auto", "tcp"] = "tcp"
    run_dir: Path | None = None

    @property
    def processes(self) -> int:
        """How many processes hold a model together."""
        return self.inside if self.servers else self.inside * self.workers

    def tasks(self, coordinator: str) -> list[TaskConfig]:
        """What each worker process finds in its environment."""
        process_groups = self.workers if self.servers else 1
        return [
            TaskConfig(
                job=JOB,
                index=process_group if self.servers else rank,
                workers=self.workers if self.servers else self.processes,
                servers=self.servers,
                coordinator=coordinator,
                secret=SECRET.hex(),
                config=JobConfig().replaced(
                    "a test",
                    run_dir=None if self.run_dir is None else str(self.run_dir),
                    strategy=self.strategy,
                    every=self.every,
                    staleness=self.staleness,
                    aggregate=self.aggregate,
                    compress=self.compress,
                    join_timeout=60.0,
                    mesh=self.mesh,
                    schedule=self.schedule,
                    microbatches=self.microbatches,
                    transport=self.transport,
                ),
                display="none",
                group=GroupMember(
                    size=self.processes, rank=rank, local_rank=process_group * self.processes + rank
                ),
            )
            for process_group in range(process_groups)
            for rank in range(self.processes)
        ]


@dataclass
class ProcessGroupRan:
    """What came of a job.

    Attributes:
        returned: what each process returned, those of worker 0 first.
        raised: the error of each that failed, as text, by its place.
        statuses: the exit status of each.
    """

    returned: dict[int, Any] = field(default_factory=dict)
    raised: dict[int, str] = field(default_factory=dict)
    statuses: dict[int, int | None] = field(default_factory=dict)

    @property
    def values(self) -> list[Any]:
        """What each process returned.

        Raises:
            AssertionError: some failed.
        """
        assert not self.raised, "\n".join(self.raised.values())
        return [self.returned[place] for place in sorted(self.returned)]


def run_process_group(
    process_group: ProcessGroup,
    program: Callable[..., Any],
    *args: Any,
    kill: Mapping[int, str] | None = None,
) -> ProcessGroupRan:
    """Runs a program in every process of a job.

    Args:
        process_group: how many, and how.
        program: a function of a module; what it returns must be picklable.
        args: for it, picklable.
        kill: by place, the name of a file at whose appearance that process is killed.

    Raises:
        AssertionError: a process did not end in time.
    """
    check_installed(process_group.strategy, process_group.compress, process_group.processes)
    preload()
    ran: Ran[Any] = Ran()
    served = Cluster(
        process_group.workers, process_group.servers, process_group.strategy, scheme="tcp"
    )
    servers: AbstractContextManager[str] = (
        keepers(served, ran) if process_group.servers else nullcontext("")
    )
    with servers as coordinator:
        result = _run(process_group.tasks(coordinator), program, args, dict(kill or {}))
        check_none_is_missing(result.raised.values())
        return result


def _run(
    tasks: list[TaskConfig], program: Callable[..., Any], args: Any, kill: dict[int, str]
) -> ProcessGroupRan:
    ran = ProcessGroupRan()
    processes: list[BaseProcess] = []
    pipes: dict[Connection, int] = {}
    listeners = _listeners(tasks)
    for place, task in enumerate(tasks):
        ours, theirs = SPAWNER.Pipe(duplex=False)
        listener = listeners.get(task.index if task.servers else 0)
        told = encode_task(_at(task, listener))
        inherited = listener if task.group.rank == 0 and task.group.size > 1 else None
        process = SPAWNER.Process(
            target=_child, args=(theirs, told, inherited, program, args), daemon=True
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes[ours] = place
    for listener in listeners.values():
        listener.close()  # the process that inherited it has it alone
    deadline = time.monotonic() + SECONDS
    try:
        while pipes:
            for place, path in list(kill.items()):
                if Path(path).exists():
                    os.kill(processes[place].pid or 0, signal.SIGKILL)
                    del kill[place]
            late = [place for place in pipes.values()]
            assert time.monotonic() < deadline, f"processes {late} did not end in time"
            for pipe in wait(list(pipes), 0.05):
                assert isinstance(pipe, Connection)
                _take(ran, pipe, pipes.pop(pipe))
    finally:
        for process in processes:
            if pipes:
                process.kill()
            process.join(10.0)
    ran.statuses = {place: process.exitcode for place, process in enumerate(processes)}
    return ran


def _take(ran: ProcessGroupRan, pipe: Connection, place: int) -> None:
    try:
        fine, data = pickle.loads(pipe.recv_bytes())
    except EOFError:
        ran.raised[place] = f"process {place} died"
        return
    if fine:
        ran.returned[place] = data
    else:
        ran.raised[place] = data


def _listeners(tasks: list[TaskConfig]) -> dict[int, socket.socket]:
    """Returns a socket for each process group, at which its processes meet: rank 0 inherits it."""
    process_groups = {task.index if task.servers else 0 for task in tasks if task.group.size > 1}
    return {
        process_group: socket.create_server(("127.0.0.1", 0)) for process_group in process_groups
    }


def _at(task: TaskConfig, listener: socket.socket | None) -> TaskConfig:
    together = listener is not None and task.group.size > 1
    process_group = f"127.0.0.1:{listener.getsockname()[1]}" if listener and together else ""
    return task.in_group(address=process_group)


def _child(
    pipe: Connection,
    task: str,
    listener: socket.socket | None,
    program: Callable[..., Any],
    args: Any,
) -> None:
    import torch

    torch.set_num_threads(1)
    if listener is not None:
        config = decode_task(task).inheriting(process_group=listener.detach())
        task = encode_task(config)
    os.environ[TASK_VARIABLE] = task
    try:
        answer = True, program(*args)
    except BaseException:
        answer = False, traceback.format_exc()
    pipe.send_bytes(pickle.dumps(answer))
    pipe.close()
