"""At which addresses tasks listen on their nodes, and what may not cross a network."""

from __future__ import annotations

from collections.abc import Mapping

from trireme.agents.agent import NodeFacts
from trireme.cluster.spec import LOOPBACK
from trireme.errors import ConfigurationError
from trireme.launch.config.task_config import TaskConfig
from trireme.launch.launcher import tasks_of_job


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
                "--allow-plaintext; else keep them on one node, as by "
                f"--{task.config.launch.on}-pack-workers, or use parameter servers and workers of "
                "one process"
            )


def bracketed(address: str) -> str:
    """Returns a node's address in the form that precedes a colon and a port."""
    return f"[{address}]" if ":" in address else address
