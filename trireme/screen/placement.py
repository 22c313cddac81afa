"""Where the copies of the parameters are, for displays: on which servers, and which are missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from trireme.cluster.messages import ClusterStatus, StatusValue
from trireme.cluster.placement import missing_copies
from trireme.records.numbers import number_of

RECENT_SECONDS = 60.0  # how long a takeover, or a rollback, is told after it has happened


def summary(status: ClusterStatus) -> str:
    """Returns how the parameters are divided, in one line."""
    shards = f"{len(status.shards)} shard{'s' * (len(status.shards) > 1)}"
    copies = f"{status.replicas} cop{'ies' if status.replicas > 1 else 'y'} of each"
    lost = f", rolled back {status.life} time{'s' * (status.life > 1)}" if status.life else ""
    moving = ", being redistributed" if status.next_shards else ""
    return f"generation {status.generation}: {shards}, {copies}{lost}{moving}"


def lines(status: ClusterStatus) -> Iterator[str]:
    """Yields a line for each shard: its share, and the servers that hold it."""
    for number, entry in enumerate(status.shards):
        share = (entry.stop - entry.start) / status.shards[-1].stop
        holders = [f"primary ps:{entry.primary}"]
        holders += [f"backup {_servers(entry.backups)}"] if entry.backups else []
        holders += [f"being filled {_servers(entry.joining)}"] if entry.joining else []
        slots = f"slots {entry.start}-{entry.stop - 1}, {share:.0%}"
        yield f"shard {number} ({slots}): {'; '.join(holders)}"


def shortages(status: ClusterStatus) -> Iterator[str]:
    """Yields a line for each shard that lacks copies: a loss of those left costs updates."""
    missing = missing_copies(status.shards, status.servers, status.replicas)
    for number, (entry, lacks) in enumerate(zip(status.shards, missing, strict=True)):
        if lacks:
            filled = f": {_servers(entry.joining)} is being filled" if entry.joining else ""
            held, wanted = len(entry.copies), len(entry.copies) + lacks
            copies = f"{held} of {wanted} copies ({_servers(entry.copies)})"
            yield f"shard {number} has {copies}{filled}"


def _servers(indices: Sequence[int]) -> str:
    return ", ".join(f"ps:{index}" for index in indices)


def events(statuses: Mapping[str, Mapping[str, StatusValue]]) -> Iterator[str]:
    """Yields a line for each recent takeover, and for a recent rollback."""
    rolled = [number_of(s, "rolled_back_seconds") for s in statuses.values()]
    ago = min((seconds for seconds in rolled if seconds), default=RECENT_SECONDS)
    if ago < RECENT_SECONDS:
        yield f"all copies of a shard were lost {ago:.0f} s ago: the job went back"
    for name, status in statuses.items():
        seconds = number_of(status, "took_over_seconds")
        if status.get("took_over") and seconds < RECENT_SECONDS:
            yield f"{name} took over {status['took_over']}, {seconds:.0f} s ago"
