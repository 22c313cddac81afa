"""Where the tasks of a job go on a cluster: what to ask it for, and how they reach each other.

Pure: what the cluster gave comes in as `NodeFacts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trireme.errors import ConfigurationError
from trireme.launch.agent import NodeFacts
from trireme.launch.command import LOOPBACK

__all__ = ["Group", "Seat", "Wishes", "bracketed", "listen_hosts", "plan"]


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a job asks of its cluster.

    Attributes:
        servers: how many parameter servers.
        workers: how many workers.
        processes: how many processes each worker is.
        cpus: cores of each of them.
        gpus: GPUs of each of them; less than one shares it.
        pack: whether workers go to as few nodes as possible, and not to as many.
    """

    servers: int
    workers: int
    cpus: int = 1
    gpus: float = 0.0
    pack: bool = False
    processes: int = 1


@dataclass(frozen=True, slots=True)
class Group:
    """Seats that are taken all together or not at all.

    Attributes:
        strategy: `SPREAD` over as many nodes as possible, or `PACK` into as few.
        bundles: what is kept for each seat.
    """

    strategy: str
    bundles: tuple[dict[str, float], ...]


@dataclass(frozen=True, slots=True)
class Seat:
    """Where one task sits.

    Attributes:
        group: the group's name.
        index: which of its bundles.
        gpus: how many of the bundle's GPUs are the task's.
    """

    group: str
    index: int
    gpus: float = 0.0


def plan(wishes: Wishes) -> tuple[dict[str, Group], dict[str, Seat]]:
    """Returns the groups to ask for by name, and the seat of each task by the task's name.

    The coordinator, which hardly computes, shares the seat of the first server.
    """
    groups, seats = {}, {}
    if wishes.servers:
        groups["servers"] = Group("SPREAD", ({"CPU": 1.0},) * wishes.servers)
        seats["coordinator:0"] = Seat("servers", 0)
        seats |= {f"ps:{index}": Seat("servers", index) for index in range(wishes.servers)}
    bundle = {"CPU": float(wishes.cpus)} | ({"GPU": wishes.gpus} if wishes.gpus else {})
    processes = wishes.workers * wishes.processes
    groups["workers"] = Group("PACK" if wishes.pack else "SPREAD", (bundle,) * processes)
    for place in range(processes):
        index, rank = divmod(place, wishes.processes)
        name = f"worker:{index}/{rank}" if rank else f"worker:{index}"
        seats[name] = Seat("workers", place, wishes.gpus)
    return groups, seats


def listen_hosts(
    facts: Mapping[str, NodeFacts], version: str, *, allow_plaintext: bool
) -> dict[str, str]:
    """Returns the address at which each task listens, should it do so.

    Loopback where all tasks are on one host, else that of each task's node.

    Args:
        facts: what each task's agent found, by the task's name.
        version: the launcher's.
        allow_plaintext: whether the network between the nodes is trusted.

    Raises:
        ConfigurationError: a task cannot run on its node, or they could reach each other only
            over a network that nobody has said to be trusted.
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
            "encrypted: whoever is on that network could read and change what they send. Where "
            "you trust everybody there, say --allow-plaintext; else use a cluster of one host"
        )
    return {name: bracketed(found.address) for name, found in facts.items()}


def bracketed(address: str) -> str:
    """Returns a node's address as it stands before a colon and a port."""
    return f"[{address}]" if ":" in address else address
