"""What each task of a job reserves of a cluster, and on which node it best does. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Protocol

from trireme.errors import UsageError
from trireme.job_config import JobConfig

Resources = Mapping[str, float]  # amounts of what a node has, such as `CPU` and `GPU`, by name


class WorkerResources(Protocol):
    """What an engine's options say of its workers."""

    @property
    def cpus_per_worker(self) -> int: ...

    @property
    def gpus_per_worker(self) -> float: ...

    @property
    def pack_workers(self) -> bool: ...


def check_cluster(config: JobConfig, *, of: str) -> None:
    """Refuses options that contradict each other on a cluster; `of` is which one, in words."""
    if config.network.tls and config.network.allow_plaintext:
        raise UsageError("--tls and --allow-plaintext contradict each other: leave one of them out")
    if config.tasks.workers == "auto":
        raise UsageError(
            "workers is auto, which counts the GPUs of this host, and not those of "
            f"{of}: give --workers N"
        )


def resources_of(name: str, options: WorkerResources) -> dict[str, float]:
    """Returns the resources that a server or a worker reserves."""
    if _role(name) == "ps":
        return {"CPU": 1.0}
    gpus = options.gpus_per_worker
    return {"CPU": float(options.cpus_per_worker)} | ({"GPU": gpus} if gpus else {})


def choose_nodes(
    names: Iterable[str],
    options: WorkerResources,
    free: Mapping[str, Resources],
    taken: Mapping[str, str],
) -> dict[str, str]:
    """Returns the nodes on which tasks best run, so far as nodes have room for them now.

    A node that is lost shall take few tasks of a role with it, and not both copies of a parameter:
    tasks of one role are on as many nodes as possible. With `pack_workers` the workers are on
    as few as possible.
    """
    left = {node: dict(has) for node, has in free.items()}
    tasks: Counter[tuple[str, str]] = Counter((_role(n), node) for n, node in taken.items())
    chosen: dict[str, str] = {}
    for name in names:
        role, needs = _role(name), resources_of(name, options)
        sign = -1 if role == "worker" and options.pack_workers else 1
        ranks = {
            node: (sign * tasks[role, node], -has.get("CPU", 0.0), node)
            for node, has in left.items()
            if all(has.get(kind, 0.0) >= amount for kind, amount in needs.items())
        }
        if not ranks:
            continue
        node = chosen[name] = min(ranks, key=ranks.__getitem__)
        tasks[role, node] += 1
        for kind, amount in needs.items():
            left[node][kind] -= amount
    return chosen


def total(resources: Iterable[Resources]) -> dict[str, float]:
    """Returns the sum of resources."""
    amounts: Counter[str] = Counter()
    for each in resources:
        amounts.update(each)
    return dict(amounts)


def amounts(has: Resources) -> str:
    """Returns amounts in words, such as `2 cores and 1 GPUs`."""
    cores = f"{has['CPU']:g} {'core' if has['CPU'] == 1 else 'cores'}"
    return cores + (f" and {has['GPU']:g} GPUs" if "GPU" in has else "")


def wanted(names: Iterable[str], options: WorkerResources) -> str:
    """Returns what tasks ask for together, and the most that one does, in words."""
    needs = [resources_of(name, options) for name in names]
    largest = max(needs, key=lambda each: each["CPU"])
    one = "" if len(needs) == 1 else f", {amounts(largest)} of them"
    return f"{amounts(total(needs))}{one} on one node"


def _role(name: str) -> str:
    return name.partition(":")[0]
