"""A job that runs and is disturbed: its commands, its tasks, its notes."""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from tests.chaos.accounts import COUNTERS, Incarnation, Note
from tests.chaos.copies import incomplete, live
from tests.chaos.launch import Hosts
from tests.faults.hosts import Host, Network
from tests.faults.processes import Tasks
from tests.integration.shell import TRIREME, Ended, Shell
from trireme.cli.runs import query
from trireme.cluster.messages import ClusterStatus
from trireme.cluster.spec import task_name
from trireme.errors import TriremeError
from trireme.launch.run_directory import read_record
from trireme.session.checkpoint import CheckpointData, list_checkpoints, load

LAUNCH = (sys.executable, "-m", "tests.chaos.launch")
PROGRAM = Path(__file__).parent / "program.py"
START_SECONDS = 120.0
END_SECONDS = 150.0
WHOLE_SECONDS = 90.0
ASK_SECONDS = 2.0


@dataclass(frozen=True)
class Size:
    """How large a job is: servers, workers, and copies of each shard."""

    servers: int = 3
    workers: int = 3
    replicas: int = 1


@dataclass
class Job:
    """A job of `program.py`. Use `start`.

    Attributes:
        shell: starts commands, and knows what is left of them.
        network: the hosts; None where all tasks are on this one.
        size: what it is to have; changes as it is scaled.
        deadline: after how many silent seconds a task is lost.
    """

    shell: Shell
    network: Network | None
    size: Size
    deadline: float
    server_starts: dict[int, float] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        return self.shell.directory / "run"

    @property
    def tasks(self) -> Tasks:
        """Its processes, by name."""
        return Tasks(self.run_dir)

    def start(self, data: Path, options: Sequence[str], program: Sequence[object] = ()) -> None:
        """Starts the job, and returns when every worker trains.

        Args:
            data: the folder of MNIST's files.
            options: of `trireme run`.
            program: further options of the program.
        """
        words = [*("run", "--ps", self.size.servers, "--workers", self.size.workers)]
        if self.size.replicas > 1:
            words += ["--replicas", self.size.replicas]
        words += ["--heartbeat-timeout", self.deadline]
        words += ["--max-restarts", 1000, "--run-dir", "run", *options]
        command: Sequence[str] = TRIREME
        if self.network is not None:
            file = self.shell.directory / "hosts.json"
            hosts = Hosts(self.network.own, self.network.hosts)
            file.write_bytes(msgspec.json.encode(hosts))
            command = (*LAUNCH, str(file))
        words += [PROGRAM, "--data-dir", data.resolve(), "--notes", "out", *program]
        self._running = self.shell.start(*words, command=command)
        for index in range(self.size.workers):
            self._running.until(rf"worker:{index} \| training", START_SECONDS)
        self.wait_until_whole()

    def end(self) -> Ended:
        """Has the workers save and end, and waits for that."""
        self._running.send(15)
        return self._running.ended(END_SECONDS)

    def command(self, *words: object) -> None:
        """Runs a `trireme` command beside the job.

        Raises:
            AssertionError: it fails.
        """
        ended = self.shell.run(*words)
        assert ended.status == 0, ended.text

    def scale(self, *, servers: int | None = None, workers: int | None = None) -> None:
        """Changes the number of servers or workers by `trireme scale`."""
        size = Size(
            self.size.servers if servers is None else servers,
            self.size.workers if workers is None else workers,
            self.size.replicas,
        )
        self.command("scale", "run", "--ps", size.servers, "--workers", size.workers)
        self.size = size

    # What it is like -------------------------------------------------------------------------

    def status(self) -> ClusterStatus | None:
        """The status of the job; None where its coordinator does not answer."""
        with suppress(TriremeError, OSError):
            return query(read_record(self.run_dir), ASK_SECONDS)
        return None

    def missing(self, hit: tuple[str, int] | None = None) -> str:
        """What the job waits for until it is whole; empty if it is.

        Args:
            hit: a task, and its process id before a fault hit it: if that process is gone, another
                has to be a member.
        """
        status = self.status()
        if status is None:
            return "the coordinator does not answer"
        self._note_server_starts(status)
        if hit is not None and not self._lives(*hit):
            pids = {task_name(task.role, task.index): task.pid for task in status.tasks}
            if pids.get(hit[0], self.pid(hit[0])) == hit[1]:
                return f"no process has taken the place of {hit[0]}"
        return incomplete(status, self.size.servers, self.size.workers, self.size.replicas)

    def pid(self, name: str) -> int | None:
        """The process id of a task; None if it has none."""
        with suppress(TriremeError):
            return read_record(self.run_dir).pids.get(name)
        return None

    def _lives(self, name: str, pid: int) -> bool:
        process = self.tasks.process(name)
        return process is not None and process.pid == pid

    def wait_until_whole(self, hit: tuple[str, int] | None = None) -> float:
        """Waits until all tasks live and all copies are whole; returns when that was.

        Args:
            hit: as in `missing`.

        Raises:
            AssertionError: the job has ended, or that takes too long; says what is missing.
        """
        deadline = time.monotonic() + WHOLE_SECONDS
        while missing := self.missing(hit):
            assert self._running.process.poll() is None, f"the job has ended: {missing}"
            assert time.monotonic() < deadline, f"not whole after {WHOLE_SECONDS:.0f} s: {missing}"
            time.sleep(0.1)
        return time.monotonic()

    def wait_for_updates(self, count: int) -> None:
        """Waits until each live worker has had so many more updates acknowledged.

        Raises:
            AssertionError: that takes too long.
        """
        status = self.status()
        assert status is not None, "the coordinator does not answer"
        there = live(status, "worker")
        before, deadline = self._acknowledged(), time.monotonic() + WHOLE_SECONDS
        while any(self._acknowledged()[index] < before[index] + count for index in there):
            assert self._running.process.poll() is None, "the job has ended"
            assert time.monotonic() < deadline, f"no {count} updates in {WHOLE_SECONDS:.0f} s"
            time.sleep(0.05)

    def acknowledged(self) -> int:
        """How many updates of all workers are acknowledged."""
        return self._acknowledged().total()

    def _acknowledged(self) -> Counter[int]:
        """How many updates of each worker are acknowledged, whatever process made them."""
        found: Counter[int] = Counter()
        for file in (self.shell.directory / "out").glob("notes-*"):
            found[int(file.name.split("-")[1])] += file.read_bytes().count(b"acknowledged")
        return found

    def host_of(self, task: str) -> Host | None:
        """The host of a task; None where all are on one."""
        if self.network is None:
            return None
        name = read_record(self.run_dir).nodes.get(task)
        return next((host for host in self.network.hosts if host.name == name), None)

    def tasks_on(self, host: Host) -> list[str]:
        """The tasks on a host."""
        return [task for task, name in read_record(self.run_dir).nodes.items() if name == host.name]

    # What it leaves --------------------------------------------------------------------------

    def _note_server_starts(self, status: ClusterStatus) -> None:
        """Notes how much processor time servers had used when they were first seen as members."""
        for task in status.tasks:
            if task.role == "ps" and task.pid and task.pid not in self.server_starts:
                with suppress(psutil.Error):
                    times = psutil.Process(task.pid).cpu_times()
                    self.server_starts[task.pid] = times.user + times.system

    def notes(self) -> list[Note]:
        """All that its workers have noted, in the order of time."""
        files = (self.shell.directory / "out").glob("notes-*")
        lines = itertools.chain.from_iterable(file.read_text().splitlines() for file in files)
        return sorted((Note.read(line) for line in lines), key=lambda note: note.at)

    def saved(self) -> list[CheckpointData]:
        """Its checkpoints, the oldest first.

        Raises:
            CheckpointError: one is damaged.
            AssertionError: there is none.
        """
        paths = list_checkpoints(self.run_dir)
        assert paths, "nothing was saved"
        return [load(path) for path in paths]


def counted(data: CheckpointData) -> dict[Incarnation, tuple[float, ...]]:
    """Returns the updates of each incarnation that the values count, by each counter.

    Raises:
        AssertionError: the elements of a row differ.
    """
    tables = [data.model[name] for name in COUNTERS]
    for table in tables:
        assert bool((table == table[..., :1]).all()), "the elements of a row differ"
    columns = [table[..., 0] for table in tables]
    rows = {place for each in columns for place in map(tuple, each.nonzero().tolist())}
    return {row: tuple(float(each[row]) for each in columns) for row in sorted(rows)}
