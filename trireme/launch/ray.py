"""Starts the tasks of a job on the nodes of a Ray cluster, and stays until all have ended.

An agent of Ray's, beside each task, starts it as a process and passes on what it says. Agents end
with this launcher, and tasks with their agents: nothing is left behind, whoever dies.
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_all
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import msgspec

from trireme.launch.agent import Born, NodeFacts, Order, Report
from trireme.launch.command import LOOPBACK
from trireme.launch.console import Console
from trireme.launch.launcher import Asked, Attended, Ended, Event, Job, Launcher, Placed
from trireme.launch.log_file import LogFile
from trireme.launch.outcome import Outcome, describe_status
from trireme.launch.placement import Wishes, bracketed, listen_hosts
from trireme.launch.process import LAST_LINES
from trireme.launch.ray_cluster import (
    Agent,
    RayCluster,
    first_line,
    look_around,
    seated,
)
from trireme.launch.run_directory import RunDirectory
from trireme.launch.secret import SECRET_VARIABLE
from trireme.launch.signals import requests_to_stop, signals
from trireme.launch.task_config import TASK_VARIABLE, TaskConfig, encode_task
from trireme.launch.threads import thread_variables

__all__ = ["run_ray"]

LONGEST_SILENCE = 5.0
"""How long an agent waits for news of its task before it says that there is none."""

GIVE_UP = 60.0
"""After how long without any answer an agent is taken for lost."""

PARTING = 10.0


def run_ray(
    job: Job,
    directory: RunDirectory,
    console: Console,
    *,
    address: str,
    wishes: Wishes,
    version: str,
) -> int:
    """Runs a job to its end and returns its exit status, as `run_local` does.

    Args:
        job: what to run.
        directory: where its logs and its record go; stays claimed.
        console: where its tasks' lines go.
        address: the cluster's.
        wishes: what to ask of it.
        version: Trireme's, which every node has to have.

    Raises:
        ConfigurationError: there is no such cluster, or a task cannot run or be reached there.
        WaitTimeout: the cluster had no room in time.
    """
    patience = job.task.join_timeout
    with seated(address, wishes, patience, console.say) as cluster:
        agents = {name: cluster.hire(name) for name in cluster.names}
        facts = look_around(agents, os.getcwd(), job.program[0], patience)
        hosts = listen_hosts(facts, version, allow_plaintext=job.task.allow_plaintext)
        tasks = {
            name: _Task(
                name,
                agent,
                facts[name],
                hosts[name],
                LogFile(directory.log(name), lambda text: console.say(text, alarm=True)),
            )
            for name, agent in agents.items()
        }
        for line in _where(facts):
            console.say(line)
        with _Engine(job, console, cluster, wishes, tasks) as engine:
            launcher = Launcher(job, directory, console, engine)
            launcher.run()
        return launcher.conclude()


def _where(facts: Mapping[str, NodeFacts]) -> Iterator[str]:
    by_node: dict[str, list[str]] = {}
    for name, found in facts.items():
        by_node.setdefault(_node(found), []).append(name)
    for node, names in by_node.items():
        yield f"on node {node}: {', '.join(names)}"


def _node(facts: NodeFacts) -> str:
    return f"{facts.address} ({facts.node})"


@dataclass(slots=True)
class _Task:
    """One task as its launcher sees it.

    Attributes:
        name: the task's.
        agent: beside it on its node; None once that is lost.
        facts: of its node.
        host: where it listens, if it does.
        log: where its lines are kept.
        last_lines: the end of them.
        running: whether it was started and has not ended.
        attempt: how often it was started.
        used: how much it has done, as its agent said last.
        due: when its agent must have answered.
    """

    name: str
    agent: Agent | None
    facts: NodeFacts
    host: str
    log: LogFile
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    running: bool = False
    attempt: int = 0
    used: float = 0.0
    due: float = float("inf")


Answer = Callable[[Future[Any]], None]


class _Engine:
    """The tasks of one job on a cluster. Its thread is the launcher's; answers come by a queue."""

    def __init__(
        self,
        job: Job,
        console: Console,
        cluster: RayCluster,
        wishes: Wishes,
        tasks: Mapping[str, _Task],
    ) -> None:
        self.pids: dict[str, int] = {}
        self.nodes = {name: _node(task.facts) for name, task in tasks.items()}
        self.coordinator = ""
        self._job = job
        self._console = console
        self._cluster = cluster
        self._wishes = wishes
        self._tasks = tasks
        self._events: list[Event] = []
        self._meetings: dict[int, str] = {}  # of each gang, once its rank 0 lives
        self._early: dict[str, tuple[_Task, Agent, TaskConfig]] = {}  # who has to wait for that
        self._answers: queue.SimpleQueue[tuple[Answer, Future[Any]]] = queue.SimpleQueue()
        self._resources = contextlib.ExitStack()
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> _Engine:
        self._resources.enter_context(self._selector)
        self._signals = self._resources.enter_context(signals())
        self._bell, self._ringer = socket.socketpair()
        for end in (self._bell, self._ringer):
            self._resources.enter_context(end).setblocking(False)
        self._selector.register(self._signals, selectors.EVENT_READ)
        self._selector.register(self._bell, selectors.EVENT_READ)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leaves nothing behind, even if this launcher itself went wrong."""
        with self._resources:
            agents = [task.agent for task in self._tasks.values() if task.agent is not None]
            # An agent that ends takes its task along, but not the task's children.
            wait_for_all([agent.call("dismiss") for agent in agents], PARTING)
            for agent in agents:
                agent.end()
            for task in self._tasks.values():
                task.log.close()

    # What the launcher asks for --------------------------------------------------------------

    def start(self, config: TaskConfig) -> None:
        task = self._tasks[config.name]
        task.running = True
        task.attempt += 1
        if config.role == "coordinator":
            self.coordinator = ""
        task.due = time.monotonic() + self._job.task.join_timeout
        if task.agent is None:
            self._hire(task, config)
        else:
            self._order(task, task.agent, config)

    def terminate(self, name: str) -> None:
        self._tell(name, "terminate", signal.SIGTERM)

    def kill(self, name: str) -> None:
        self._tell(name, "kill", signal.SIGKILL)

    def used(self, name: str) -> float:
        return self._tasks[name].used

    def wait(self, seconds: float) -> list[Event]:
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._signals:
                self._events += [Asked()] * requests_to_stop(key.fd)
            else:
                with contextlib.suppress(BlockingIOError):
                    self._bell.recv(4096)
        with contextlib.suppress(queue.Empty):
            while True:
                answer, future = self._answers.get_nowait()
                answer(future)
        self._give_up_the_silent()
        events, self._events = self._events, []
        return events

    # Starting --------------------------------------------------------------------------------

    def _hire(self, task: _Task, config: TaskConfig) -> None:
        """Starts a new agent, perhaps on another node, and then the task."""
        agent = task.agent = self._cluster.hire(task.name)
        looking = agent.call("look_around", os.getcwd(), self._job.program[0])
        self._expect(task, agent, looking, lambda facts: self._moved(task, agent, facts, config))

    def _moved(self, task: _Task, agent: Agent, facts: NodeFacts, config: TaskConfig) -> None:
        """Starts a task where it is now, if it can reach the others from there."""
        problem = facts.problem
        if not problem and task.host == LOOPBACK and facts.host != task.facts.host:
            problem = "the job began with all its tasks on one host, and this is another"
        if problem:
            self._fail(task, f"cannot run on node {_node(facts)}: {problem}")
            return
        task.facts = facts
        if task.host != LOOPBACK:
            task.host = bracketed(facts.address)
        self.nodes[task.name] = _node(facts)
        self._order(task, agent, config)

    def _order(self, task: _Task, agent: Agent, config: TaskConfig) -> None:
        """Has an agent start its task; who holds a model with others, after their rank 0."""
        gang = _gang(config)
        if gang is not None and config.rank:
            if gang not in self._meetings:
                self._early[task.name] = (task, agent, config)
                return
            config = msgspec.structs.replace(config, gang=self._meetings[gang])
        elif gang is not None:
            self._meetings.pop(gang, None)
        cores = self._wishes.cpus if config.role == "worker" else 1
        threads, variables = thread_variables(os.environ, 1, cores)
        order = Order(
            task=encode_task(msgspec.structs.replace(config, threads=threads)),
            program=self._job.program,
            directory=os.getcwd(),
            environ=_own_variables(os.environ) | variables,
            host=task.host,
            attempt=task.attempt,
        )
        starting = agent.call("start", order)
        self._expect(task, agent, starting, lambda born: self._born(task, agent, gang, born))

    def _born(self, task: _Task, agent: Agent, gang: int | None, born: Born) -> None:
        self.pids[task.name] = born.pid
        self._events.append(Placed())
        self._listen(task, agent)
        if gang is not None and born.meeting:
            self._meetings[gang] = born.meeting
            for name, (early, its_agent, config) in list(self._early.items()):
                if _gang(config) == gang:
                    del self._early[name]
                    self._order(early, its_agent, config)

    # Listening -------------------------------------------------------------------------------

    def _listen(self, task: _Task, agent: Agent) -> None:
        task.due = time.monotonic() + GIVE_UP
        reporting = agent.call("report", LONGEST_SILENCE)
        self._expect(task, agent, reporting, lambda report: self._heard(task, agent, report))

    def _heard(self, task: _Task, agent: Agent, report: Report) -> None:
        self._show(task, report)
        task.used = report.used
        if report.attendance is not None:
            self._events.append(Attended(report.attendance))
        if report.address and task.name == "coordinator:0":
            self.coordinator = report.address
            self._events.append(Placed())
        if report.end is None:
            self._listen(task, agent)
            return
        # By the launcher's clock: who failed first is for one clock to say.
        at = time.time() - report.end.age
        outcome = msgspec.structs.replace(report.end.outcome, at=at)
        self._ended(task, report.end.status, outcome)

    def _show(self, task: _Task, report: Report) -> None:
        for line, error in report.lines:
            task.log.write(line.encode("utf-8", "replace"))
            task.last_lines.append(line)
            self._console.line(task.name, line, error)

    # Ends ------------------------------------------------------------------------------------

    def _ended(self, task: _Task, status: int, outcome: Outcome) -> None:
        task.running = False
        task.due = float("inf")
        self._events.append(Ended(task.name, status, outcome, tuple(task.last_lines)))

    def _fail(self, task: _Task, summary: str) -> None:
        self._ended(task, 1, Outcome(kind="error", summary=summary, at=time.time()))

    def _lose(self, task: _Task, reason: str) -> None:
        """Takes a task for dead whose agent is gone; should it live, it ends with its agent."""
        if task.agent is not None:
            task.agent.end()
            task.agent = None
        summary = f"lost with its agent on node {_node(task.facts)}: {reason}"
        outcome = Outcome(kind="signal", summary=summary, at=time.time())
        self._ended(task, -signal.SIGKILL, outcome)

    def _give_up_the_silent(self) -> None:
        now = time.monotonic()
        for task in self._tasks.values():
            if task.running and now > task.due:
                self._lose(task, "it does not answer")

    # Agents ----------------------------------------------------------------------------------

    def _tell(self, name: str, method: str, number: signal.Signals) -> None:
        task = self._tasks[name]
        if self._early.pop(name, None) is not None:  # nobody has started it
            self._ended(task, -number, describe_status(-number))
        elif task.running and task.agent is not None:
            task.agent.tell(method, task.attempt)

    def _expect(
        self, task: _Task, agent: Agent, future: Future[Any], then: Callable[[Any], None]
    ) -> None:
        """Has `then` take what an agent answers, in this thread, unless it is given up by then."""

        def answered(future: Future[Any]) -> None:
            if task.agent is not agent or not task.running:
                return
            try:
                value = future.result()
            except Exception as error:
                if agent.is_loss(error):
                    self._lose(task, first_line(error))
                else:
                    self._fail(task, f"cannot be kept on its node: {first_line(error)}")
                return
            then(value)

        future.add_done_callback(lambda future: self._ring(answered, future))

    def _ring(self, answer: Answer, future: Future[Any]) -> None:
        """Wakes the launcher: called by a thread of Ray's."""
        self._answers.put((answer, future))
        # A full bell rings already; a closed one need not.
        with contextlib.suppress(OSError):
            self._ringer.send(b"!")


def _gang(config: TaskConfig) -> int | None:
    """Returns which processes hold one model with this task; None where it holds one alone."""
    if config.role != "worker" or config.processes == 1:
        return None
    return config.index if config.servers else 0


def _own_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns what tasks on other nodes get of the launcher's environment."""
    withheld = (TASK_VARIABLE, SECRET_VARIABLE)
    ours = {name: value for name, value in environ.items() if name.startswith("TRIREME_")}
    return {name: value for name, value in ours.items() if name not in withheld}
