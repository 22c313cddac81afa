"""The faults: each says whom it may hit now, and hits one of them.

A fault never takes the last copy of a slot, nor the last worker. Where it names nobody it is not
made; the next one waits until the job is whole again.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from tests.chaos.copies import bound, can_do_without, live, shards_of, spare_servers
from tests.chaos.job import Job
from tests.faults.hosts import Host, Network
from tests.faults.limits import starve
from trireme.cluster.messages import ClusterStatus
from trireme.cluster.spec import task_name

MOST_SERVERS, MOST_WORKERS = 4, 4
MARGIN_SECONDS = 1.5
"""How much longer than the deadline a stopped task or a host that is cut off stays so."""
SLOW_BYTES = 1_250_000
"""Bytes a second that a slow cable carries: a hundredth of a gigabit, a few steps of the job."""
STARVING_SECONDS = 30.0


class Fault(ABC):
    """One kind of fault.

    Attributes:
        name: as in `--faults`.
        silent: whether nothing but silence tells of it, so that training may stand for a deadline.
    """

    name: ClassVar[str]
    silent: ClassVar[bool] = False

    @abstractmethod
    def targets(self, job: Job, status: ClusterStatus) -> Sequence[str]:
        """Returns whom it may hit now."""

    @abstractmethod
    def strike(self, job: Job, target: str) -> None:
        """Hits one of them; returns when the fault itself is over, whatever follows of it."""


def spare_workers(job: Job, status: ClusterStatus) -> list[str]:
    """The workers without each of which others go on."""
    workers = live(status, "worker")
    return [f"worker:{index}" for index in workers] if len(workers) > 1 else []


def spares(status: ClusterStatus) -> list[str]:
    return [f"ps:{index}" for index in spare_servers(status)]


class KillWorker(Fault):
    """SIGKILL to a worker."""

    name = "kill worker"

    def targets(self, job: Job, status: ClusterStatus) -> Sequence[str]:
        return spare_workers(job, status)

    def strike(self, job: Job, target: str) -> None:
        job.tasks.kill(target)


class StopWorker(KillWorker):
    """SIGSTOP to a worker for longer than the deadline, and SIGCONT."""

    name = "stop worker"

    def strike(self, job: Job, target: str) -> None:
        with job.tasks.stopped(target):
            time.sleep(job.deadline + MARGIN_SECONDS)


class KillServer(Fault):
    """SIGKILL to a server."""

    name = "kill server"

    def targets(self, job: Job, status: ClusterStatus) -> Sequence[str]:
        return spares(status)

    def strike(self, job: Job, target: str) -> None:
        job.tasks.kill(target)


class StarveServer(KillServer):
    """A server wants more memory than there is: the system kills it."""

    name = "starve server"

    def strike(self, job: Job, target: str) -> None:
        process = job.tasks.process(target)
        assert process is not None, f"{target} is gone"
        starve(process.pid, STARVING_SECONDS)


class StopServer(KillServer):
    """SIGSTOP to a server for longer than the deadline, and SIGCONT."""

    name = "stop server"
    silent = True

    def strike(self, job: Job, target: str) -> None:
        with job.tasks.stopped(target):
            time.sleep(job.deadline + MARGIN_SECONDS)


class CutHost(Fault):
    """A host with all its tasks is cut off for longer than the deadline, and heals."""

    name = "cut host"
    silent = True

    def targets(self, job: Job, status: ClusterStatus) -> Sequence[str]:
        if job.network is None:
            return []
        return [host.name for host in job.network.hosts if self._spare(job, host.name, status)]

    def _spare(self, job: Job, name: str, status: ClusterStatus) -> bool:
        host = next(each for each in job.network.hosts if each.name == name)  # type: ignore[union-attr]
        there = [task.split(":") for task in job.tasks_on(host)]
        servers, workers = (
            {int(index) for role, index in there if role == wanted} & set(live(status, wanted))
            for wanted in ("ps", "worker")
        )
        others = set(live(status, "worker")) - workers
        hit = bool(servers or workers) and bool(others)
        return hit and (not servers or can_do_without(status, servers))

    def strike(self, job: Job, target: str) -> None:
        assert job.network is not None
        host = next(each for each in job.network.hosts if each.name == target)
        self.disturb(job.network, host)
        try:
            time.sleep(self.seconds(job))
        finally:
            job.network.heal(host)

    def disturb(self, hosts: Network, host: Host) -> None:
        """Does to a host's cable what this fault is."""
        hosts.cut(host)

    def seconds(self, job: Job) -> float:
        """Returns how long that lasts."""
        return job.deadline + MARGIN_SECONDS


class MuteHost(CutHost):
    """What a host sends is lost, and what is sent to it arrives."""

    name = "mute host"

    def disturb(self, hosts: Network, host: Host) -> None:
        hosts.mute(host)


class DeafenHost(CutHost):
    """What is sent to a host is lost, and what it sends arrives.

    Its tasks notice first, as nobody answers them, and break off; so it takes a deadline more until
    the coordinator has given them up.
    """

    name = "deafen host"

    def disturb(self, hosts: Network, host: Host) -> None:
        hosts.deafen(host)

    def seconds(self, job: Job) -> float:
        return 2 * job.deadline + MARGIN_SECONDS


class SlowHost(CutHost):
    """A host's cable becomes slow for several deadlines: nobody may be given up for that."""

    name = "slow host"
    silent = False

    def disturb(self, hosts: Network, host: Host) -> None:
        hosts.slow(host, SLOW_BYTES)

    def seconds(self, job: Job) -> float:
        return 3 * job.deadline

    def strike(self, job: Job, target: str) -> None:
        before = incarnations(job)
        super().strike(job, target)
        assert incarnations(job) == before, "a task was given up because its network is slow"


class CutPair(Fault):
    """Two hosts whose servers need each other do not reach each other; both reach all others.

    No task is given up for that, and the job goes on after the deadline, while the cable is out.
    """

    name = "cut pair"
    silent = True

    def targets(self, job: Job, status: ClusterStatus) -> Sequence[str]:
        if job.network is None or job.size.replicas < 2 or job.size.workers < 2:
            return []
        hosts = [
            (job.host_of(f"ps:{one}"), job.host_of(f"ps:{other}")) for one, other in bound(status)
        ]
        return sorted(f"{one.name}+{other.name}" for one, other in hosts if one and other)

    def strike(self, job: Job, target: str) -> None:
        assert job.network is not None
        one, other = (self._host(job, name) for name in target.split("+"))
        before = incarnations(job)
        job.network.part(one, other)
        try:
            time.sleep(job.deadline + MARGIN_SECONDS)
            count = job.acknowledged()
            time.sleep(job.deadline)
            trains = job.acknowledged() > count
            assert trains, f"nobody trains while {target} is cut: {job.status()}"
            assert incarnations(job) == before, "a task was given up because of one link"
        finally:
            job.network.heal(one)

    def _host(self, job: Job, name: str) -> Host:
        assert job.network is not None
        return next(host for host in job.network.hosts if host.name == name)


def incarnations(job: Job) -> dict[str, int]:
    """The incarnation of each task that lives."""
    status = job.status()
    assert status is not None, "the coordinator does not answer"
    return {
        task_name(task.role, task.index): task.incarnation
        for task in status.tasks
        if task.state == "live"
    }


class AddServer(Fault):
    """One more server, by `trireme scale`."""

    name = "add server"

    def targets(self, job: Job, status: ClusterStatus) -> Sequence[str]:
        return ["one more"] if shards_of(status) and job.size.servers < MOST_SERVERS else []

    def strike(self, job: Job, target: str) -> None:
        job.scale(servers=job.size.servers + 1)


class RemoveServer(Fault):
    """One server less, by `trireme scale`."""

    name = "remove server"

    def targets(self, job: Job, status: ClusterStatus) -> Sequence[str]:
        return ["one less"] if shards_of(status) and job.size.servers > job.size.replicas else []

    def strike(self, job: Job, target: str) -> None:
        job.scale(servers=job.size.servers - 1)


class AddWorker(Fault):
    """One more worker, by `trireme scale`."""

    name = "add worker"

    def targets(self, job: Job, status: ClusterStatus) -> Sequence[str]:
        return ["one more"] if job.size.workers < MOST_WORKERS else []

    def strike(self, job: Job, target: str) -> None:
        job.scale(workers=job.size.workers + 1)


class RemoveWorker(Fault):
    """One worker less, by `trireme scale`: else there would soon be no room for another."""

    name = "remove worker"

    def targets(self, job: Job, status: ClusterStatus) -> Sequence[str]:
        return ["one less"] if job.size.workers > 2 else []

    def strike(self, job: Job, target: str) -> None:
        job.scale(workers=job.size.workers - 1)


_SHOWN: tuple[type[Fault], ...] = (
    KillServer,
    KillWorker,
    StopServer,
    StopWorker,
    CutHost,
    CutPair,
    AddServer,
    RemoveServer,
    AddWorker,
    RemoveWorker,
)
_FURTHER: tuple[type[Fault], ...] = (MuteHost, DeafenHost, SlowHost, StarveServer)
FAULTS: dict[str, Fault] = {fault.name: fault() for fault in (*_SHOWN, *_FURTHER)}
"""All faults by their names."""
SHOWN = [fault.name for fault in _SHOWN]
"""Those that are made where none are named."""


class Bag:
    """Draws faults, each kind once before any comes again, as far as they may be made.

    Args:
        faults: the kinds.
        seed: decides the order, and whom each hits.
    """

    def __init__(self, faults: Sequence[Fault], seed: int) -> None:
        self._faults = faults
        self._left: list[Fault] = []
        self._dice = random.Random(seed)

    def draw(self, job: Job, status: ClusterStatus) -> tuple[Fault, str] | None:
        """Returns a fault and whom it hits; None if none may be made now."""
        for kinds in (self._left, list(self._faults)):
            able = [(fault, there) for fault in kinds if (there := fault.targets(job, status))]
            if able:
                fault, targets = self._dice.choice(able)
                self._left = [each for each in kinds if each is not fault]
                return fault, self._dice.choice(targets)
        return None
