"""The placement of a job's tasks on a Ray cluster, and the addresses at which they listen.

Pure: `NodeFacts` describe the nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trireme.cluster.spec import LOOPBACK
from trireme.errors import ConfigurationError
from trireme.launch.config.task_config import TaskConfig
from trireme.launch.launcher import tasks_of_job
from trireme.launch.ray.agent import NodeFacts

__all__ = [
    "PlacementGroup",
    "TaskPlacement",
    "bracketed",
    "listen_hosts",
    "plan",
]


@dataclass(frozen=True, slots=True)
class PlacementGroup:
    """A placement group of Ray's: bundles that are reserved all together or not at all.

    Attributes:
        strategy: `SPREAD` over as many nodes as possible, or `PACK` into as few.
        bundles: the resources of each bundle.
    """

    strategy: str
    bundles: tuple[dict[str, float], ...]


@dataclass(frozen=True, slots=True)
class TaskPlacement:
    """The bundle that a task runs in.

    Attributes:
        group: the placement group's name.
        index: the bundle's index in the group.
        gpus: how many of the bundle's GPUs the task gets.
    """

    group: str
    index: int
    gpus: float = 0.0


def plan(task: TaskConfig) -> tuple[dict[str, PlacementGroup], dict[str, TaskPlacement]]:
    """Returns the placement groups by name, and the placement of each task by the task's name.

    The coordinator hardly computes. It shares the bundle of the first server.

    Args:
        task: what all tasks of the job have in common.
    """
    config = task.config
    gpus = config.ray_gpus_per_worker
    tasks = tasks_of_job(task)
    servers = [each for each in tasks if each.role == "ps"]
    workers = [each for each in tasks if each.role == "worker"]
    bundle = {"CPU": float(config.ray_cpus_per_worker)} | ({"GPU": gpus} if gpus else {})
    strategy = "PACK" if config.ray_pack_workers else "SPREAD"
    groups = {"workers": PlacementGroup(strategy, (bundle,) * len(workers))}
    placements = {}
    if servers:
        groups["servers"] = PlacementGroup("SPREAD", ({"CPU": 1.0},) * len(servers))
        placements["coordinator:0"] = TaskPlacement("servers", 0)
    for server in servers:
        placements[server.name] = TaskPlacement("servers", server.index)
    for number, worker in enumerate(workers):
        placements[worker.name] = TaskPlacement("workers", number, gpus)
    return groups, placements


def listen_hosts(
    facts: Mapping[str, NodeFacts], version: str, *, allow_plaintext: bool
) -> dict[str, str]:
    """Returns the address for each task to listen at, if it listens.

    It is the loopback address where all tasks are on one host, else the address of the task's
    node.

    Args:
        facts: what each task's agent has found, by the task's name.
        version: the launcher's version of Trireme.
        allow_plaintext: whether the network between the nodes is trusted.

    Raises:
        ConfigurationError: a task cannot run on its node, or the tasks would use a network that
            is not declared as trusted.
    """
    for name, found in facts.items():
        if found.problem:
            raise ConfigurationError(
                f"{name} cannot run on node {found.address} ({found.node}): {found.problem}. "
                "Every node needs the program and its directory at the same path, as on a shared "
                "file system"
            )
        if found.version != version:
            raise ConfigurationError(
                f"node {found.address} ({found.node}), where {name} is to run, has trireme "
                f"{found.version} and this launcher is {version}: install the same on every node"
            )
    if len({found.host for found in facts.values()}) == 1:
        return dict.fromkeys(facts, LOOPBACK)
    if not allow_plaintext:
        nodes = ", ".join(sorted({found.address for found in facts.values()}))
        raise ConfigurationError(
            f"the tasks of this job are on several hosts ({nodes}), and nothing between them is "
            "encrypted: everybody on that network could read and change what they send. If you "
            "trust everybody there, add --allow-plaintext; else use a cluster of one host"
        )
    return {name: bracketed(found.address) for name, found in facts.items()}


def bracketed(address: str) -> str:
    """Returns a node's address in the form that precedes a colon and a port."""
    return f"[{address}]" if ":" in address else address
