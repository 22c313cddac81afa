"""What each task of a job reserves of a Ray cluster, and on which node it best does. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from trireme.launch.ray.options import RayOptions

Resources = Mapping[str, float]
"""Amounts of Ray's resources, such as `CPU` and `GPU`, by name."""


def resources_of(name: str, options: RayOptions) -> dict[str, float]:
    """Returns the resources that a server or a worker reserves."""
    if _role(name) == "ps":
        return {"CPU": 1.0}
    gpus = options.gpus_per_worker
    return {"CPU": float(options.cpus_per_worker)} | ({"GPU": gpus} if gpus else {})


def choose_nodes(
    names: Iterable[str],
    options: RayOptions,
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


def _role(name: str) -> str:
    return name.partition(":")[0]
