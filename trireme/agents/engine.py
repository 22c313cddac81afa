"""Starts the tasks of a job on the nodes of a cluster, and returns when all have ended.

Agents end with this launcher, and tasks end with their agents, so that nothing is left behind.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_all
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for_any
from typing import Any

import msgspec

from trireme.agents.agent import NodeFacts, TaskReport
from trireme.agents.hosts import bracketed, check_process_groups, listen_hosts
from trireme.agents.pool import NOTICE_SECONDS, Agent, Pool, first_line, inspect_nodes
from trireme.cluster.spec import LOOPBACK, is_loopback
from trireme.errors import ConfigurationError
from trireme.launch.config.secret import SECRET_VARIABLE
from trireme.launch.config.task_config import TASK_VARIABLE, TaskConfig
from trireme.launch.exit_reason import ExitReason, describe_status
from trireme.launch.launcher import (
    Event,
    Job,
    Launcher,
    StopSignalled,
    TaskEnded,
    TaskLocated,
    tasks_of_job,
)
from trireme.launch.output import Console, TaskOutputs
from trireme.launch.process_setup.resources import thread_variables, threads_of_task
from trireme.launch.process_setup.signals import requests_to_stop, signals
from trireme.launch.run_directory import RunDirectory
from trireme.version import __version__

REPORT_SECONDS = 5.0  # that an agent waits for news before it answers that there is none
ANSWER_TIMEOUT = 60.0  # after which an agent that does not answer counts as lost
SHUT_DOWN_SECONDS = 10.0
REPEAT_SECONDS = 30.0  # until it is said again which tasks wait for room
LAUNCHER = "the launcher"  # the name for what this host is, beside those of the tasks


def run_on_agents(job: Job, directory: RunDirectory, console: Console, pool: Pool) -> int:
    """Runs a job on a pool of nodes to its end, and returns its status, as `run_local` does."""
    config = job.task.config
    with TaskOutputs(directory.log, console) as outputs:
        agents = pool.start_agents([task.name for task in tasks_of_job(job.task)])
        facts = inspect_nodes(pool, agents, config.timeouts.join_timeout, console.say)
        if job.task.servers:  # the coordinator is here
            facts = {LAUNCHER: pool.inspect_here(), **facts}
        may_grow = job.task.servers > 0 and job.task.group.size == 1
        hosts = listen_hosts(facts, __version__, may_grow=may_grow)
        check_process_groups(job.task, facts)
        beyond = not all(is_loopback(f"{host}:0") for host in hosts.values())
        if job.task.servers and (
            config.network.tls or (beyond and not config.network.allow_plaintext)
        ):
            job = job.with_authority()
        if beyond and config.network.allow_plaintext:
            console.say(
                "WARNING: nothing between the hosts is encrypted (--allow-plaintext): everybody on "
                "the network between them can read and change it",
                alarm=True,
            )
        first = next(iter(facts))
        home = facts[first], hosts[first]
        tasks = {
            name: _Task(name, agent, facts[name], hosts[name]) for name, agent in agents.items()
        }
        by_node: dict[str, list[str]] = {}
        for name, found in facts.items():
            by_node.setdefault(str(found), []).append(name)
        for node, names in by_node.items():
            console.say(f"on node {node}: {', '.join(names)}")
        with (
            signals() as (reader, writer),
            contextlib.closing(
                AgentEngine(job, outputs, pool, *home, tasks, reader, writer)
            ) as engine,
        ):
            launcher = Launcher(job, directory, engine, outputs)
            launcher.run()
        return launcher.conclude()


@dataclass(slots=True)
class _Task:
    """One task, as its launcher knows it."""

    name: str
    agent: Agent | None  # None once it is lost
    facts: NodeFacts  # what the agent has found on its node
    host: str  # the address at which the task listens, if it listens
    running: bool = False  # it was started and has not ended
    attempt: int = 0  # how often it was started
    placed: bool = True  # its agent is known to be on a node
    answer_due: float = float("inf")  # when its agent must have answered


class AgentEngine:
    """The tasks of one job on a cluster. Runs in the launcher's thread; answers come by a queue."""

    def __init__(
        self,
        job: Job,
        outputs: TaskOutputs,
        pool: Pool,
        home: NodeFacts,
        own_host: str,
        tasks: Mapping[str, _Task],
        wakeup_reader: socket.socket,
        wakeup_writer: socket.socket,
    ) -> None:
        self.pids: dict[str, int] = {}
        self.nodes = {name: str(task.facts) for name, task in tasks.items()}
        self.own_host = own_host  # of the launcher's own node; without servers, the first worker's
        self._home = home
        self._job = job
        self._outputs = outputs
        self._pool = pool
        self._tasks = dict(tasks)
        self._dismissed: set[str] = set()
        self._wakeup_reader = wakeup_reader
        self._wakeup_writer = wakeup_writer
        self._events: list[Event] = []
        self._notice_due: float | None = None  # while tasks may be waiting for room
        # Where each process group meets, once its rank 0 lives; and who waits for that.
        self._process_groups: dict[int, str] = {}
        self._waiting_for_rank_0: dict[str, TaskConfig] = {}
        self._answers: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def close(self) -> None:
        """Ends every agent and task, even if this launcher itself failed."""
        tasks = self._tasks.values()
        # The end of an agent ends its task, but not the task's children.
        asked = [task.agent.call("shut_down") for task in tasks if task.agent and task.placed]
        wait_for_all(asked, SHUT_DOWN_SECONDS)
        for task in tasks:
            self._free(task)

    def host(self, name: str) -> str:
        return self._tasks[name].facts.fails_as_one

    def start(self, config: TaskConfig) -> None:
        task = self._tasks.get(config.name)
        if task is None:  # the job was made larger
            task = _Task(config.name, None, self._home, self.own_host)
            self._tasks[config.name] = task
        task.running = True
        task.attempt += 1
        self._dismissed.discard(task.name)
        # Until it is known again; what is said of the process before is not said of this one.
        self.pids.pop(task.name, None)
        task.answer_due = time.monotonic() + self._job.task.config.timeouts.join_timeout
        if task.agent is not None:
            self._send_start(task, config)
            return
        task.agent = self._pool.start_agents([task.name])[task.name]  # perhaps on another node
        task.placed = False
        if self._notice_due is None:
            self._notice_due = time.monotonic() + NOTICE_SECONDS
        self._ask(task, lambda facts: self._located(task, facts, config), "inspect_node")

    def send_signal(self, name: str, number: signal.Signals) -> None:
        task = self._tasks[name]
        if self._waiting_for_rank_0.pop(name, None) is not None:  # it was not started yet
            self._ended(task, -number, describe_status(-number))
        elif task.running and not task.placed:  # nor was this one
            self._free(task)
            self._ended(task, -number, describe_status(-number))
        elif task.running and task.agent is not None:
            task.agent.call("send_signal", number, task.attempt)

    def dismiss(self, names: Collection[str]) -> None:
        self._dismissed = {*names}
        for name in self._dismissed & self._tasks.keys():
            task = self._tasks[name]
            if not task.running:
                self._free(task)
            elif not task.placed:
                reason = ExitReason(kind="gone", summary="had not started yet")
                self._ended(task, -signal.SIGTERM, reason)

    def wait(self, seconds: float) -> list[Event]:
        if wait_for_any([self._wakeup_reader], seconds):
            self._events += map(StopSignalled, requests_to_stop(self._wakeup_reader.fileno()))
        with contextlib.suppress(queue.Empty):
            while True:
                self._answers.get_nowait()()
        now = time.monotonic()
        self._tell_of_waiting(now)
        timeout = self._job.task.config.timeouts.join_timeout
        no_room = f"no node had room for it within {timeout:.0f} s (--join-timeout)"
        for task in self._tasks.values():
            if task.running and now > task.answer_due:
                self._lose(task, "it does not answer" if task.placed else no_room)
        events, self._events = self._events, []
        return events

    def _tell_of_waiting(self, now: float) -> None:
        """Says every now and then which tasks wait until a node has room for them."""
        if self._notice_due is None or now < self._notice_due:
            return
        waiting = [task.name for task in self._tasks.values() if task.running and not task.placed]
        self._notice_due = now + REPEAT_SECONDS if waiting else None
        if not waiting:
            return
        ask = "asks" if len(waiting) == 1 else "ask"
        self._outputs.console.say(
            f"waiting for room on {self._pool.place}: {', '.join(waiting)} {ask} for "
            f"{self._pool.shortage(waiting)}; it starts as soon as there is some"
        )

    def _located(self, task: _Task, facts: NodeFacts, config: TaskConfig) -> None:
        """Starts a task on its new agent's node, if it can reach the other tasks from there."""
        problem = facts.problem
        if not problem and self.own_host == LOOPBACK and facts.host != self._home.host:
            problem = "the job began with all its tasks on one host, and this is another"
        if not problem:
            everywhere = {each.name: each.facts for each in self._tasks.values()}
            try:
                check_process_groups(self._job.task, everywhere | {task.name: facts})
            except ConfigurationError as error:
                problem = str(error)
        if problem:
            self._fail(task, f"cannot run on node {facts}: {problem}")
            return
        task.facts, task.placed = facts, True
        task.answer_due = time.monotonic() + self._job.task.config.timeouts.join_timeout
        if task.host != LOOPBACK:
            task.host = bracketed(facts.address)
        self.nodes[task.name] = str(facts)
        self._send_start(task, config)

    def _send_start(self, task: _Task, config: TaskConfig) -> None:
        """Has an agent start its task. Rank 0 of a process group starts before the other ranks."""
        group = config.group_number
        if group is not None and config.group.rank:
            if group not in self._process_groups:
                self._waiting_for_rank_0[task.name] = config
                return
            config = config.in_group(address=self._process_groups[group])
        elif group is not None:
            self._process_groups.pop(group, None)
        cores = self._pool.options.cpus_per_worker if config.role == "worker" else 1
        threads = threads_of_task(os.environ, 1, cores)
        environ = {
            variable: value
            for variable, value in os.environ.items()
            if variable.startswith("TRIREME_")
            and variable not in (TASK_VARIABLE, SECRET_VARIABLE)  # of this process alone
        }
        self._ask(
            task,
            lambda started: self._started(task, group, *started),
            "start",
            msgspec.structs.replace(config, threads=threads, host=task.facts.fails_as_one),
            environ | thread_variables(os.environ, threads),
            task.host,
            task.attempt,
        )

    def _started(self, task: _Task, group: int | None, pid: int, process_group: str) -> None:
        self.pids[task.name] = pid
        self._events.append(TaskLocated())
        self._ask_for_report(task)
        if group is not None and process_group:
            self._process_groups[group] = process_group
            for name, config in list(self._waiting_for_rank_0.items()):
                if config.group_number == group:
                    del self._waiting_for_rank_0[name]
                    self._send_start(self._tasks[name], config)

    def _ask_for_report(self, task: _Task) -> None:
        task.answer_due = time.monotonic() + ANSWER_TIMEOUT
        self._ask(task, lambda report: self._take_report(task, report), "report", REPORT_SECONDS)

    def _take_report(self, task: _Task, report: TaskReport) -> None:
        for line, error in report.lines:
            self._outputs.show(task.name, line, error)
        if (ended := report.ended) is not None:
            # By the launcher's clock, so that one clock decides which task failed first.
            at = time.time() - max(0.0, report.now - ended.reason.at)
            self._ended(task, ended.status, msgspec.structs.replace(ended.reason, at=at))
        if task.running:
            self._ask_for_report(task)

    def _ended(self, task: _Task, status: int, reason: ExitReason) -> None:
        task.running = False
        task.answer_due = float("inf")
        if task.name in self._dismissed:
            self._free(task)
        self._events.append(TaskEnded(task.name, status, reason))

    def _fail(self, task: _Task, summary: str) -> None:
        self._ended(task, 1, ExitReason(kind="error", summary=summary))

    def _lose(self, task: _Task, why: str) -> None:
        """Counts a task as killed whose agent is gone: it ends with its agent."""
        self._free(task)
        self._waiting_for_rank_0.pop(task.name, None)
        lost = f"lost with its agent on node {task.facts}" if task.placed else "never started"
        summary = f"{lost}: {why}"
        self._ended(task, -signal.SIGKILL, ExitReason(kind="gone", summary=summary))

    def _free(self, task: _Task) -> None:
        if task.agent is not None:
            task.agent.end()
            task.agent = None
        self._pool.release(task.name)

    def _ask(
        self, task: _Task, then: Callable[[Any], None], method: str, *arguments: object
    ) -> None:
        """Calls a method of a task's agent, and `then` with the answer, in this thread.

        The answer of an agent that was replaced counts no more.
        """
        agent = task.agent
        if agent is None:  # it is lost, and so the task has ended
            return

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

        def wake(future: Future[Any]) -> None:  # called by a thread of the pool's
            self._answers.put(lambda: answered(future))
            self.wake()

        agent.call(method, *arguments).add_done_callback(wake)

    def wake(self) -> None:
        # A full socket has woken the launcher already; with a closed one the engine has ended.
        with contextlib.suppress(OSError):
            self._wakeup_writer.send(b"\0")
