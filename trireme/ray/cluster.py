"""Starts the agents of a job's tasks on a Ray cluster, each with what its task needs there.

The only module that imports Ray, when it is first used: everything else works without Ray.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from trireme.agents.agent import NodeFacts, TaskAgent
from trireme.agents.engine import run_on_agents
from trireme.agents.pool import first_line
from trireme.agents.resources import choose_nodes, resources_of, wanted
from trireme.errors import ConfigurationError
from trireme.launch.engines import engine_options
from trireme.launch.launcher import Job
from trireme.launch.output import Console
from trireme.launch.run_directory import RunDirectory
from trireme.ray.options import RayOptions

CONCURRENT_CALLS = 4  # that an agent answers at a time: one waits for news, others end the task
NODE_DIGITS = 8  # of a node's id that are shown, enough to tell nodes apart
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


class NodeAgent(TaskAgent):
    """A `TaskAgent` that is an actor of Ray's."""

    def inspect_node(self) -> NodeFacts:
        """Returns what this node is, and whether a task can run here; see `inspect`."""
        ray = load_ray()
        node = ray.get_runtime_context().get_node_id()[:NODE_DIGITS]
        return self.inspect(node, ray.util.get_node_ip_address())


class RayAgent:
    """A `NodeAgent` on a node of the cluster."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def call(self, method: str, *arguments: object) -> Future[Any]:
        future: Future[Any] = getattr(self._actor, method).remote(*arguments).future()
        return future

    def is_loss(self, error: BaseException) -> bool:
        return isinstance(error, load_ray().exceptions.RayActorError)

    def end(self) -> None:
        with contextlib.suppress(Exception):  # the agent or the cluster has ended already
            load_ray().kill(self._actor)


class RayPool:
    """A Ray cluster, of which each task's agent holds the cores and GPUs of the task.

    Ray gets them back as soon as the task has left the job. The coordinator is in the launcher's
    process.
    """

    place = "the Ray cluster"
    more_room = "add nodes with `ray start`"
    needs = "trireme[ray] in the Python that Ray runs there"

    def __init__(self, ray: Any, job: Job) -> None:
        self._ray = ray
        self._job = job
        self.options = engine_options(job.task.config, RayOptions)
        self._nodes: dict[str, str] = {}  # of each task, as it was asked for

    def start_agents(self, names: Sequence[str]) -> dict[str, RayAgent]:
        free = self._ray._private.state.available_resources_per_node()
        self._nodes |= choose_nodes(names, self.options, free, self._nodes)
        return {name: self._start_agent(name) for name in names}

    def _start_agent(self, name: str) -> RayAgent:
        needs = resources_of(name, self.options)
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
        return RayAgent(agent.remote(name, self._job.program, os.getcwd()))

    def inspect_here(self) -> NodeFacts:
        return NodeAgent("launcher", self._job.program, os.getcwd()).inspect_node()

    def release(self, name: str) -> None:
        self._nodes.pop(name, None)

    def shortage(self, names: Iterable[str]) -> str:
        has, free = self._ray.cluster_resources(), self._ray.available_resources()
        there = [f"{has.get('CPU', 0):g} cores ({free.get('CPU', 0):g} free)"]
        if self.options.gpus_per_worker:
            there.append(f"{has.get('GPU', 0):g} GPUs ({free.get('GPU', 0):g} free)")
        return f"{wanted(names, self.options)}; the cluster has {' and '.join(there)}"


def run_ray(job: Job, directory: RunDirectory, console: Console) -> int:
    """Runs a job to its end and returns its exit status, as `run_local` does."""
    with join_cluster(job) as pool:
        return run_on_agents(job, directory, console, pool)


@contextlib.contextmanager
def join_cluster(job: Job) -> Iterator[RayPool]:
    """Joins a Ray cluster, which ends the job's agents when the block ends."""
    ray = load_ray()
    _join(ray, engine_options(job.task.config, RayOptions).address)
    try:
        yield RayPool(ray, job)
    finally:
        ray.shutdown()


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
