"""Whether a job is whole, and which servers it can do without: pure functions of its status."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from trireme.cluster.messages import ClusterStatus
from trireme.cluster.spec import task_name
from trireme.cluster.view import ShardEntry


def shards_of(status: ClusterStatus) -> tuple[ShardEntry, ...]:
    """The shards of the newest view; none where the coordinator does not say."""
    return tuple(getattr(status, "shards", ()))


def moving(status: ClusterStatus) -> bool:
    """Whether a reconfiguration is under way."""
    return bool(getattr(status, "next_shards", ()))


def live(status: ClusterStatus, role: str) -> list[int]:
    """The indices of the tasks of a role that live."""
    return [task.index for task in status.tasks if task.role == role and task.state == "live"]


def incomplete(status: ClusterStatus, servers: int, workers: int, replicas: int) -> str:
    """Returns what the job still waits for until it is whole; empty if it is.

    Args:
        status: of the job.
        servers, workers: how many are to live.
        replicas: how many copies each shard is to have.
    """
    if status.phase != "running":
        return f"the job is {status.phase}: {status.reason}"
    for role, wanted in (("ps", servers), ("worker", workers)):
        there = live(status, role)
        if len(there) != wanted:
            names = ", ".join(task_name(role, index) for index in there)
            return f"{len(there)} of {wanted} live: {names or role}"
    if moving(status):
        return "slots are moving"
    wanted = min(replicas, servers)
    for number, shard in enumerate(shards_of(status)):
        if shard.joining or len(shard.copies) < wanted:
            return f"shard {number} has {len(shard.copies)} of {wanted} copies"
    return ""


def can_do_without(status: ClusterStatus, servers: Collection[int]) -> bool:
    """Whether every shard has a copy on another live server than these."""
    shards, there = shards_of(status), set(live(status, "ps")) - set(servers)
    return bool(shards) and all(there & set(shard.copies) for shard in shards)


def spare_servers(status: ClusterStatus) -> Sequence[int]:
    """The servers without each of which no copy is the last one."""
    return [index for index in live(status, "ps") if can_do_without(status, [index])]


def bound(status: ClusterStatus) -> set[tuple[int, int]]:
    """Returns the pairs of servers that need each other: a primary, and a copy or shard 0."""
    shards = shards_of(status)
    return {
        (min(shard.primary, other), max(shard.primary, other))
        for shard in shards
        for other in (*shard.backups, shards[0].primary)
        if other != shard.primary
    }


def moved_share(before: Sequence[ShardEntry], after: Sequence[ShardEntry]) -> float:
    """Returns which share of the slots has another primary than before."""
    old, new = (
        [shard.primary for shard in shards for _ in range(shard.start, shard.stop)]
        for shards in (before, after)
    )
    return sum(a != b for a, b in zip(old, new, strict=True)) / max(len(old), 1)
