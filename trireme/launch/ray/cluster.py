"""Reserves resources for a job on a Ray cluster, and starts an agent for each task there.

The only module that imports Ray, when it is first used: everything else works without Ray.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from trireme.cluster.spec import LOOPBACK
from trireme.errors import ConfigurationError, WaitTimeout
from trireme.launch.config.task_config import TaskConfig
from trireme.launch.launcher import Job, tasks_of_job
from trireme.launch.ray.agent import NodeFacts, TaskAgent

AGENT_CORES = 0.01
"""The share of a core that an agent formally takes. Ray would not put an actor that takes none
into the bundle."""

CONCURRENT_CALLS = 4
"""How many calls an agent answers at the same time: one waits for news, others end the task."""

NODE_DIGITS = 8
"""The digits of a node's id that are shown, enough to tell nodes apart."""

NOTICE_SECONDS = 5.0
REACH_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class PlacementGroup:
    """A placement group of Ray's: bundles that are reserved all together or not at all.

    Attributes:
        strategy: `SPREAD` over as many nodes as possible, or `PACK` into as few.
        bundles: the resources of each bundle.
    """

    strategy: str
    bundles: tuple[dict[str, float], ...]


Placement = tuple[str, int]
"""The bundle that a task runs in: its placement group's name, and its index in the group."""


def plan(task: TaskConfig) -> tuple[dict[str, PlacementGroup], dict[str, Placement]]:
    """Returns the placement groups by name, and the placement of each task by the task's name.

    The coordinator hardly computes. It shares the bundle of the first server.

    Args:
        task: what all tasks of the job have in common.
    """
    workers = (_bundle(task, "worker"),) * (task.tasks - task.servers)
    strategy = "PACK" if task.config.ray_pack_workers else "SPREAD"
    groups = {"workers": PlacementGroup(strategy, workers)}
    if task.servers:
        groups["servers"] = PlacementGroup("SPREAD", (_bundle(task, "ps"),) * task.servers)
    first_worker = 1 + task.servers
    placements = {
        each.name: ("workers", each.number - first_worker)
        if each.role == "worker"
        else ("servers", each.index)
        for each in tasks_of_job(task)
    }
    return groups, placements


def _bundle(task: TaskConfig, role: str) -> dict[str, float]:
    """Returns the resources of a task of a role."""
    config, gpus = task.config, task.config.ray_gpus_per_worker
    if role == "ps":
        return {"CPU": 1.0}
    return {"CPU": float(config.ray_cpus_per_worker)} | ({"GPU": gpus} if gpus else {})


def load_ray() -> Any:
    """Returns the package `ray`.

    Raises:
        ConfigurationError: it is not installed.
    """
    try:
        import ray
        import ray.exceptions
        import ray.util
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


@contextlib.contextmanager
def reserve_resources(job: Job, say: Callable[[str], None]) -> Iterator[Callable[[str], Agent]]:
    """Joins a Ray cluster and holds the resources of a job there while the block runs.

    Gives a function that starts an agent in the bundle of a task, by the task's name, on the node
    where that is now. A task that was added to the job gets a bundle of its own, and its agent
    starts as soon as a node has room for it.

    Args:
        job: the job, with the options of the cluster.
        say: called with a line for the user, every few seconds of waiting.

    Raises:
        ConfigurationError: there is no such cluster.
        WaitTimeout: the cluster had no room in time.
    """
    ray = load_ray()
    task = job.task
    _join(ray, task.config.ray_address)
    held: dict[str, Any] = {}
    groups, placements = plan(task)

    def reserve(name: str, group: PlacementGroup) -> None:
        held[name] = ray.util.placement_group(list(group.bundles), strategy=group.strategy)

    def start_agent(name: str) -> Agent:
        if name not in placements:
            reserve(name, PlacementGroup("PACK", (_bundle(task, name.partition(":")[0]),)))
            placements[name] = (name, 0)
        name_of_group, index = placements[name]
        group = held[name_of_group]
        options = {
            "num_cpus": AGENT_CORES,
            "num_gpus": group.bundle_specs[index].get("GPU", 0),
            "max_concurrency": CONCURRENT_CALLS,
            "max_restarts": 0,
            "scheduling_strategy": ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index
            ),
        }
        agent = ray.remote(NodeAgent).options(**options)
        return Agent(agent.remote(name, job.program, os.getcwd()))

    try:
        for name, group in groups.items():
            reserve(name, group)
        _wait_for_room(ray, list(held.values()), task, say)
        yield start_agent
    finally:
        for group in held.values():
            with contextlib.suppress(Exception):  # the cluster may be gone
                ray.util.remove_placement_group(group)
        ray.shutdown()


def inspect_nodes(agents: Mapping[str, Agent], timeout: float) -> dict[str, NodeFacts]:
    """Returns what each agent has found on its node.

    Raises:
        ConfigurationError: an agent could not start, or did not answer in time.
    """
    deadline = time.monotonic() + timeout
    asked = {name: agent.call("inspect_node") for name, agent in agents.items()}
    found = {}
    for name, future in asked.items():
        try:
            found[name] = future.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError as error:
            raise WaitTimeout(
                f"the Ray cluster started no process for {name} within {timeout:.0f} s: "
                "`ray status` shows its nodes"
            ) from error
        except load_ray().exceptions.RayError as error:
            raise ConfigurationError(
                f"{name} cannot run on the node that Ray gave it: {first_line(error)}. Every node "
                "needs trireme[ray] in the Python that Ray runs there"
            ) from error
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
        raise ConfigurationError(
            f"no Ray cluster is joined at --ray-address {address}: {first_line(error)}. "
            "`ray start --head` makes one of this host, `ray start --address HOST:PORT` adds a "
            "node to it; the launcher has to be on one of its nodes"
        ) from error


def _wait_for_room(
    ray: Any, groups: Sequence[Any], task: TaskConfig, say: Callable[[str], None]
) -> None:
    timeout = task.config.join_timeout
    begin = time.monotonic()
    noticed = begin
    for group in groups:
        while not group.wait(timeout_seconds=1):  # not longer, to handle signals
            now = time.monotonic()
            if now > begin + timeout:
                raise WaitTimeout(
                    f"the Ray cluster had no room within {timeout:.0f} s: "
                    f"{_describe_shortage(ray, task)}. "
                    "Ask for less, or add nodes with `ray start`"
                )
            if now > noticed + NOTICE_SECONDS:
                noticed = now
                say(f"waiting for room on the Ray cluster: {_describe_shortage(ray, task)}")


def _describe_shortage(ray: Any, task: TaskConfig) -> str:
    has, free = ray.cluster_resources(), ray.available_resources()
    cpus, gpus = task.config.ray_cpus_per_worker, task.config.ray_gpus_per_worker
    workers = task.tasks - task.servers
    cores = task.servers + workers * cpus
    wanted = f"{cores} cores"
    there = f"{has.get('CPU', 0):g} cores ({free.get('CPU', 0):g} free)"
    if gpus:
        wanted += f" and {workers * gpus:g} GPUs"
        there += f" and {has.get('GPU', 0):g} GPUs ({free.get('GPU', 0):g} free)"
    largest = f", {cpus} cores" + (f" and {gpus:g} GPUs" if gpus else "")
    return f"the job asks for {wanted}{largest} of them on one node; the cluster has {there}"


def listen_hosts(facts: Mapping[str, NodeFacts], version: str) -> dict[str, str]:
    """Returns the address for each task to listen at, if it listens.

    It is the loopback address where all tasks are on one host, else the address of the task's
    node.

    Args:
        facts: what each task's agent has found, by the task's name.
        version: the launcher's version of Trireme.

    Raises:
        ConfigurationError: a task cannot run on its node.
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
    if len({found.host for found in facts.values()}) == 1:
        return dict.fromkeys(facts, LOOPBACK)
    return {name: bracketed(found.address) for name, found in facts.items()}


def check_process_groups(task: TaskConfig, facts: Mapping[str, NodeFacts]) -> None:
    """Checks that no process group spans hosts over a network that is not declared as trusted.

    Servers and their clients connect by TLS. What the processes of a group say to each other goes
    by torch.distributed, which encrypts nothing.

    Args:
        task: what all tasks of the job have in common.
        facts: what each task's agent has found, by the task's name.

    Raises:
        ConfigurationError: one does.
    """
    if task.config.allow_plaintext:
        return
    hosts: dict[int, dict[str, str]] = {}
    for each in tasks_of_job(task):
        if each.group is not None:
            found = facts[each.name]
            hosts.setdefault(each.group, {})[found.host] = found.address
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
