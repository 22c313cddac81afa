"""Starts the agents of a job's tasks on a Ray cluster, each with what its task needs there.

The only module that imports Ray, when it is first used: everything else works without Ray.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from trireme.cluster.spec import LOOPBACK
from trireme.errors import ConfigurationError, WaitTimeout
from trireme.launch.config.task_config import TaskConfig
from trireme.launch.engines import engine_options
from trireme.launch.launcher import Job, tasks_of_job
from trireme.launch.ray.agent import NodeFacts, TaskAgent
from trireme.launch.ray.options import RayOptions
from trireme.launch.ray.reservations import choose_nodes, resources_of, total

CONCURRENT_CALLS = 4  # that an agent answers at a time: one waits for news, others end the task
NODE_DIGITS = 8  # of a node's id that are shown, enough to tell nodes apart
NOTICE_SECONDS = 5.0
REACH_TIMEOUT = 10.0


def load_ray() -> Any:
    """Returns the package `ray`."""
    try:
        import ray
        import ray._private.state
        import ray.exceptions
        import ray.util
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigurationError(
            f"--on ray needs Ray, and it cannot be imported ({error}): pip install 'ray>=2.40', "
            "here and on every node"
        ) from error
    return ray


def first_line(error: BaseException) -> str:
    """Returns an error of Ray's in one line: the last exception, which was raised on the node."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    raised = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    return (raised[-1] if raised else lines[0]) if lines else type(error).__name__


class NodeAgent(TaskAgent):
    """A `TaskAgent` that is an actor of Ray's."""

    def inspect_node(self) -> NodeFacts:
        """Returns what this node is, and whether a task can run here; see `inspect`."""
        ray = load_ray()
        node = ray.get_runtime_context().get_node_id()[:NODE_DIGITS]
        return self.inspect(node, ray.util.get_node_ip_address())


class Agent:
    """A `NodeAgent` on a node of the cluster. Every call returns at once, with a future."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def call(self, method: str, *arguments: object) -> Future[Any]:
        """Calls a method of the agent."""
        future: Future[Any] = getattr(self._actor, method).remote(*arguments).future()
        return future

    def is_loss(self, error: BaseException) -> bool:
        """Returns whether a call failed because the agent is gone."""
        return isinstance(error, load_ray().exceptions.RayActorError)

    def end(self) -> None:
        """Ends the agent at once; its task ends with it."""
        with contextlib.suppress(Exception):  # the agent or the cluster has ended already
            load_ray().kill(self._actor)


class Reservations:
    """What the tasks of a job reserve of a cluster: cores and GPUs, held by each task's agent.

    Ray gets them back as soon as the task has left the job. The coordinator is in the launcher's
    process.
    """

    def __init__(self, ray: Any, job: Job) -> None:
        self._ray = ray
        self._job = job
        self._options = engine_options(job.task.config, RayOptions)
        self._nodes: dict[str, str] = {}  # of each task, as it was asked for

    def start_agents(self, names: Sequence[str]) -> dict[str, Agent]:
        """Starts tasks' agents, on the nodes that suit best, or as soon as there is room."""
        free = self._ray._private.state.available_resources_per_node()
        self._nodes |= choose_nodes(names, self._options, free, self._nodes)
        return {name: self._start_agent(name) for name in names}

    def _start_agent(self, name: str) -> Agent:
        needs = resources_of(name, self._options)
        where: Any = "DEFAULT"
        if node := self._nodes.get(name):
            strategies = self._ray.util.scheduling_strategies
            where = strategies.NodeAffinitySchedulingStrategy(
                node, soft=True, _spill_on_unavailable=True
            )
        agent = self._ray.remote(NodeAgent).options(
            num_cpus=needs["CPU"],
            num_gpus=needs.get("GPU", 0),
            max_concurrency=CONCURRENT_CALLS,
            max_restarts=0,
            scheduling_strategy=where,
        )
        return Agent(agent.remote(name, self._job.program, os.getcwd()))

    def release(self, name: str) -> None:
        """Forgets where a task was, whose agent has ended."""
        self._nodes.pop(name, None)

    def shortage(self, names: Iterable[str]) -> str:
        """Returns what tasks ask for, and what the cluster has."""
        needs = [resources_of(name, self._options) for name in names]
        wanted, largest = total(needs), max(needs, key=lambda each: each["CPU"])
        has, free = self._ray.cluster_resources(), self._ray.available_resources()
        there = [f"{has.get('CPU', 0):g} cores ({free.get('CPU', 0):g} free)"]
        if "GPU" in wanted:
            there.append(f"{has.get('GPU', 0):g} GPUs ({free.get('GPU', 0):g} free)")
        one = "" if len(needs) == 1 else f", {_amounts(largest)} of them"
        return f"{_amounts(wanted)}{one} on one node; the cluster has {' and '.join(there)}"


def _amounts(has: Mapping[str, float]) -> str:
    cores = f"{has['CPU']:g} {'core' if has['CPU'] == 1 else 'cores'}"
    return cores + (f" and {has['GPU']:g} GPUs" if "GPU" in has else "")


@contextlib.contextmanager
def join_cluster(job: Job) -> Iterator[Reservations]:
    """Joins a Ray cluster, which ends the job's agents when the block ends."""
    ray = load_ray()
    _join(ray, engine_options(job.task.config, RayOptions).address)
    try:
        yield Reservations(ray, job)
    finally:
        ray.shutdown()


def inspect_here(job: Job) -> NodeFacts:
    """Returns what the node of this process is."""
    return NodeAgent("launcher", job.program, os.getcwd()).inspect_node()


def inspect_nodes(
    reserved: Reservations, agents: Mapping[str, Agent], timeout: float, say: Callable[[str], None]
) -> dict[str, NodeFacts]:
    """Returns what each agent has found on its node, once there is room for all."""
    began = noticed = time.monotonic()
    asked = {name: agent.call("inspect_node") for name, agent in agents.items()}
    found: dict[str, NodeFacts] = {}
    while len(found) < len(asked):
        name = next(name for name in asked if name not in found)
        with contextlib.suppress(TimeoutError):
            try:
                found[name] = asked[name].result(1.0)  # not longer, to handle signals
            except load_ray().exceptions.RayError as error:
                raise ConfigurationError(
                    f"{name} cannot run on the node that Ray gave it: {first_line(error)}. Every "
                    "node needs trireme[ray] in the Python that Ray runs there"
                ) from error
            continue
        now = time.monotonic()
        if now > began + timeout:
            raise WaitTimeout(
                f"the Ray cluster had no room within {timeout:.0f} s: the job asks for "
                f"{reserved.shortage(agents)}. Ask for less, or add nodes with `ray start`"
            )
        if now > noticed + NOTICE_SECONDS:
            noticed = now
            say(
                f"waiting for room on the Ray cluster: the job asks for {reserved.shortage(agents)}"
            )
    return found


def _join(ray: Any, address: str) -> None:
    if address.startswith("ray://"):
        raise ConfigurationError(
            f"--ray-address {address} is for Ray's client: give the address of the cluster's head "
            "as host:port, from a host that is a node of it"
        )
    try:
        if address != "auto":  # Ray itself would try for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), REACH_TIMEOUT).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, OverflowError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        reason = first_line(error).rstrip(".")
        raise ConfigurationError(
            f"no Ray cluster is joined at --ray-address {address}: {reason}. "
            "`ray start --head` makes one of this host, `ray start --address HOST:PORT` adds a "
            "node to it; the launcher has to be on one of its nodes"
        ) from error


def listen_hosts(facts: Mapping[str, NodeFacts], version: str, *, may_grow: bool) -> dict[str, str]:
    """Returns the address for each task to listen at, if it listens.

    It is the address of the task's node, so that tasks of nodes that come later reach it. It is the
    loopback address where all tasks are on one host, and stay there.
    """
    for name, found in facts.items():
        if found.problem:
            raise ConfigurationError(
                f"{name} cannot run on node {found}: {found.problem}. "
                "Every node needs the program and its directory at the same path, as on a shared "
                "file system"
            )
        if found.version != version:
            raise ConfigurationError(
                f"node {found}, where {name} is to run, has trireme {found.version} and this "
                f"launcher is {version}: install the same on every node"
            )
    if not may_grow and len({found.host for found in facts.values()}) == 1:
        return dict.fromkeys(facts, LOOPBACK)
    return {name: bracketed(found.address) for name, found in facts.items()}


def check_process_groups(task: TaskConfig, facts: Mapping[str, NodeFacts]) -> None:
    """Checks that no process group spans hosts over a network that is not declared as trusted.

    Servers and their clients connect by TLS. What the processes of a group say to each other goes
    by torch.distributed, which encrypts nothing.
    """
    if task.config.network.allow_plaintext:
        return
    hosts: dict[int, dict[str, str]] = {}
    for each in tasks_of_job(task):
        if each.group_number is not None:
            found = facts[each.name]
            hosts.setdefault(each.group_number, {})[found.host] = found.address
    for of_group in hosts.values():
        if len(of_group) > 1:
            raise ConfigurationError(
                "the processes that hold one model together are on several hosts "
                f"({', '.join(sorted(of_group.values()))}), and talk by torch.distributed, which "
                "encrypts nothing: everybody on that network could read and change what they send. "
                "If you trust everybody there, or it is encrypted itself as WireGuard does, add "
                "--allow-plaintext; else keep them on one node (--ray-pack-workers), or use "
                "parameter servers and workers of one process"
            )


def bracketed(address: str) -> str:
    """Returns a node's address in the form that precedes a colon and a port."""
    return f"[{address}]" if ":" in address else address
