"""Where the copies of the parameters are, for displays: on which servers, and which are missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trireme.cluster.messages import ClusterStatus, StatusValue
from trireme.cluster.placement import missing_copies
from trireme.cluster.spec import task_name
from trireme.cluster.view import ShardEntry
from trireme.monitor.numbers import number_of

RECENT_SECONDS = 60.0
"""How long a takeover, or a rollback, is told after it has happened."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the copies of the parameters are, as the coordinator knows it."""

    shards: tuple[ShardEntry, ...]
    next_shards: tuple[ShardEntry, ...] = ()
    generation: int = 1
    life: int = 0
    replicas: int = 1
    servers: int = 1

    @property
    def missing(self) -> tuple[int, ...]:
        return missing_copies(self.shards, self.servers, self.replicas)

    def share(self, shard: int) -> float:
        """Returns the share of the parameters that is in a shard."""
        entry = self.shards[shard]
        return (entry.stop - entry.start) / self.shards[-1].stop

    def __str__(self) -> str:
        shards = f"{len(self.shards)} shard{'s' * (len(self.shards) > 1)}"
        copies = f"{self.replicas} cop{'ies' if self.replicas > 1 else 'y'} of each"
        lost = f", rolled back {self.life} time{'s' * (self.life > 1)}" if self.life else ""
        moving = ", being redistributed" if self.next_shards else ""
        return f"generation {self.generation}: {shards}, {copies}{lost}{moving}"

    def lines(self) -> Iterator[str]:
        """Yields a line for each shard: its share, and the servers that hold it."""
        for number, entry in enumerate(self.shards):
            others = [
                f"{title} {', '.join(task_name('ps', server) for server in servers)}"
                for title, servers in (("backup", entry.backups), ("being filled", entry.joining))
                if servers
            ]
            holders = "; ".join([f"primary {task_name('ps', entry.primary)}", *others])
            slots = f"slots {entry.start}-{entry.stop - 1}, {self.share(number):.0%}"
            yield f"shard {number} ({slots}): {holders}"

    def shortages(self) -> Iterator[str]:
        """Yields a line for each shard that lacks copies: a loss of those left costs updates."""
        for number, lacks in enumerate(self.missing):
            if not lacks:
                continue
            entry = self.shards[number]
            held = ", ".join(task_name("ps", server) for server in entry.copies)
            filled = ", ".join(task_name("ps", server) for server in entry.joining)
            yield (
                f"shard {number} has {len(entry.copies)} of {len(entry.copies) + lacks} copies "
                f"({held})" + (f": {filled} is being filled" if filled else "")
            )


def placement_of(status: ClusterStatus) -> Placement | None:
    """Returns where the copies are; None where the job has no servers, or no view yet."""
    if not status.shards:
        return None
    return Placement(
        shards=status.shards,
        next_shards=status.next_shards,
        generation=status.generation,
        life=status.life,
        replicas=status.replicas,
        servers=status.servers,
    )


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
