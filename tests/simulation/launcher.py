"""Starts the processes of a simulated job, and starts them again where they have ended."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Protocol

from tests.simulation.loop import Loop
from tests.simulation.member import Member
from tests.simulation.process import Process
from tests.simulation.server import Cluster, Server
from tests.simulation.worker import Place, Worker
from trireme.cluster.member_protocol import News
from trireme.cluster.membership import ProcessEnded
from trireme.cluster.messages import Dismissed, Message
from trireme.cluster.state import Task
from trireme.cluster.view import View

_RESTART = 0.3  # seconds until a process that was not admitted is started again
_TOLD = 0.05  # seconds until a launcher has told the coordinator that a process has ended


class Home(Place, Cluster, Protocol):
    """Where processes live."""

    loop: Loop


class Launcher:
    """All processes of servers and workers.

    Args:
        home: where they live.

    Attributes:
        servers: the processes of servers that were not killed and have not ended, by index.
        members: by worker: the membership of the process that lives.
        workers: those that train, by index.
        coming: how many processes are about to start.
        gone: the workers that have crashed and are not started again.
        finished: whether some worker got as far as the end.
    """

    def __init__(self, home: Home) -> None:
        self.servers: dict[int, Server] = {}
        self.members: dict[int, Member] = {}
        self.workers: dict[int, Worker] = {}
        self.coming = 0
        self.gone: set[int] = set()
        self.finished = False
        self._home = home
        self._by_address: dict[str, Server] = {}
        self._processes: dict[int, Process] = {}
        self._signalled: dict[int, float | None] = {}  # when another process takes its place
        self._pids = itertools.count(1)
        self._tells = home.network.rng.random() < 0.5

    # -- servers ----------------------------------------------------------------------------------

    def start_server(self, index: int) -> None:
        """Starts a process of a server."""
        if index in self.servers:
            return
        home, pid = self._home, next(self._pids)
        server = Server(home, index, f"host{index % home.schedule.hosts}", pid)
        self.servers[index] = self._by_address[server.address] = server
        server.begin()

    def kill_server(self, index: int, restart: float | None) -> None:
        """Kills a server's process; another one is started after so many seconds."""
        server = self.servers.pop(index)
        server.note("is killed")
        server.kill()
        self.tell_ended("ps", index, server.host, server.pid)
        if restart is not None:
            self._home.loop.after(restart, partial(self._restart_server, index))

    def server_ended(self, server: Server, why: str) -> None:
        """A server's process has ended by itself."""
        if self.servers.get(server.index) is server:
            del self.servers[server.index]
            if why == "refused":
                self._home.loop.after(_RESTART, partial(self._restart_server, server.index))

    def _restart_server(self, index: int) -> None:
        if self._wanted("ps", index):
            self.start_server(index)

    def server_at(self, address: str) -> Server | None:
        """Returns the process that listens at an address; None where there is none."""
        server = self._by_address.get(address)
        return server if server is not None and server.process.alive else None

    def _wanted(self, role: str, index: int) -> bool:
        state = self._home.coordinator.state
        task = state.tasks.get(f"{role}:{index}")
        return state.over is None and task is not None and not task.dismissed

    def tell_ended(self, role: str, index: int, host: str, pid: int) -> None:
        """Tells the coordinator that a process has ended, where there is somebody who does."""
        if self._tells:
            ended = ProcessEnded(f"{role}:{index}", host, pid, "it was killed")
            self._home.loop.after(_TOLD, lambda: self._home.coordinator.process_ended(ended))

    # -- workers ----------------------------------------------------------------------------------

    def start_worker(self, index: int, seconds: float) -> None:
        """Starts a process of a worker after so many seconds."""
        self.coming += 1
        self._home.loop.after(seconds, partial(self._begin, index))

    def _begin(self, index: int) -> None:
        self.coming -= 1
        if index in self.members:
            return
        home, pid, process = self._home, next(self._pids), Process(self._home.loop)
        member = Member(
            home.members_network,
            home.coordinator,
            process,
            ("worker", index),
            (f"home{index}", pid, ""),
            home.make_member,
            lambda news: self._heard(index, member, news),
        )
        self.members[index], self._processes[index] = member, process
        member.connect()

    def signal_worker(self, worker: int, restart: float | None) -> None:
        """Asks a worker's process to end; another one is started so long after it has left."""
        member = self.members.get(worker)
        if member is not None:
            self._signalled[worker] = restart
            member.signal("SIGTERM")

    def process(self, worker: int) -> Process:
        """Returns the process of a worker that lives."""
        return self._processes[worker]

    def _heard(self, index: int, member: Member, news: News) -> None:
        if self.members.get(index) is not member:
            return
        if isinstance(news, View):
            self._train(index)
            if index in self.workers:
                self.workers[index].client.viewed()
        elif isinstance(news, Dismissed):
            if index not in self.workers:
                self._dismiss(index)
        elif index in self.workers:
            self.workers[index].end("over")
            self._end_process(index, None)
        else:
            refused = member.state.failure is not None and self._wanted("worker", index)
            self._end_process(index, _RESTART if refused else None)

    def _train(self, index: int) -> None:
        """A process that is in the view, and does not train yet or any longer, begins to."""
        member = self.members[index]
        if index in self.workers or not member.takes_part:
            return
        if member.state.dismissed is not None:
            self._dismiss(index)
            return
        trains = self.workers[index] = Worker(self._home, index, member)
        self._processes[index].after(self._home.network.rng.uniform(0, 0.05), trains.task.begin)

    def _dismiss(self, index: int) -> None:
        """A process leaves: a signal asks it to, or the job was made smaller."""
        again = self._again(index, self._signalled.pop(index, None))
        member = self.members.pop(index)
        if member.state.signalled is None:
            member.leave("finished")
            return
        member.leave("interrupted")
        if again is None:
            self.gone.add(index)
        else:
            self.start_worker(index, again)

    def _again(self, index: int, restart: float | None) -> float | None:
        """Returns when another process takes a worker's place: always, where it is the last one."""
        others = self.members.keys() - {index}
        last = not any(self._wanted("worker", other) for other in others)
        return 0.5 if restart is None and last else restart

    def _end_process(self, index: int, restart: float | None) -> None:
        """A process ends; another one may be started after so many seconds."""
        self.members.pop(index).close()
        self._processes[index].kill()
        if restart is not None:
            self.start_worker(index, restart)

    def ended(self, worker: Worker, how: str, restart: float | None) -> None:
        """A worker is over; see `Place.ended`."""
        index, home = worker.index, self._home
        del self.workers[index]
        home.checker.counts[how] += 1
        if how in ("dismissed", "departed"):
            self._dismiss(index)
            return
        if how == "left":
            self.finished = True
            state = worker.member.state
            stops = home.schedule.stop_at is not None or state.interrupted is not None
            worker.member.leave("interrupted" if stops else "finished")
            del self.members[index]
            return
        home.checker.lost.add((index, worker.incarnation))
        if how == "evicted":
            self._train(index)
        elif how in ("crashed", "late"):
            again = self._again(index, restart)
            if again is None:
                self.gone.add(index)
            self._end_process(index, again)

    def lost(self, worker: int, incarnation: int) -> None:
        """The coordinator has given a worker up."""
        self._home.checker.lost.add((worker, incarnation))
        process = self.workers.get(worker)
        if process is not None and process.incarnation == incarnation:
            self._home.checker.counts["evictions"] += 1

    # -- the job's size ---------------------------------------------------------------------------

    def start_awaited(self) -> None:
        """Starts the processes that the job has room for."""
        for task in self._home.coordinator.state.tasks.values():
            if task.state == "expected" and not task.dismissed:
                self._start(task)

    def _start(self, task: Task) -> None:
        if task.role == "ps":
            self.start_server(task.index)
        elif task.index not in self.members:
            self.start_worker(task.index, 0.01)


def _ignore(message: Message) -> None:
    """Takes an answer that nobody waits for."""
