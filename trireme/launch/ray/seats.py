"""Seats: what each task of a job holds of a Ray cluster, and on which node it best does.

Pure. The agent of each task holds its seat, so that Ray gets it back as soon as the task has left
the job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from trireme.launch.ray.options import RayOptions

Resources = Mapping[str, float]
"""Amounts of Ray's resources, such as `CPU` and `GPU`, by name."""


def seat_of(name: str, options: RayOptions) -> dict[str, float]:
    """Returns what a server or a worker holds."""
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
        role, seat = _role(name), seat_of(name, options)
        sign = -1 if role == "worker" and options.pack_workers else 1
        ranks = {
            node: (sign * tasks[role, node], -has.get("CPU", 0.0), node)
            for node, has in left.items()
            if all(has.get(kind, 0.0) >= amount for kind, amount in seat.items())
        }
        if not ranks:
            continue
        node = chosen[name] = min(ranks, key=ranks.__getitem__)
        tasks[role, node] += 1
        for kind, amount in seat.items():
            left[node][kind] -= amount
    return chosen


def total(seats: Iterable[Resources]) -> dict[str, float]:
    """Returns the sum of seats."""
    amounts: Counter[str] = Counter()
    for seat in seats:
        amounts.update(seat)
    return dict(amounts)


def _role(name: str) -> str:
    return name.partition(":")[0]
