"""The metrics of one server's replicas: what it holds, what its logs carry, whose part it took."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trireme.cluster.view import View
from trireme.metrics import Registry
from trireme.ps.replication.log import ReplicationLog

ROLES = ("primary", "backup", "joining")
"""What a server can be for a shard."""


class ReplicationMetrics:
    """Measures the replicas of one server.

    Args:
        server: the index of the server.
        registry: holds the counters and gauges.
    """

    def __init__(self, server: int, registry: Registry) -> None:
        self._server = server
        self._view = View(0, (), ())
        self._held: dict[str, list[int]] = {role: [] for role in ROLES}
        self._took_over = ""
        self._took_over_at = self._rolled_back_at = 0.0
        self._seen: dict[ReplicationLog[Any], tuple[int, int]] = {}  # as it was counted last
        self._shards = {
            role: registry.gauge("trireme_shards", "Shards at this server, by its role", role=role)
            for role in ROLES
        }
        self._generation = registry.gauge("trireme_generation", "How the parameters are divided")
        self._life = registry.gauge("trireme_life", "How often all copies of a shard were lost")
        self._takeovers = registry.counter(
            "trireme_takeovers_total", "Shards taken over from a primary that was lost"
        )
        self._entries = registry.counter(
            "trireme_log_entries_total", "Entries that this server has sent to other replicas"
        )
        self._bytes = registry.counter("trireme_log_bytes_total", "The bytes of these entries")
        self._unconfirmed = registry.gauge(
            "trireme_log_unconfirmed_entries", "Entries that not every backup has confirmed"
        )

    def view(self, now: float, view: View) -> None:
        """Takes a view: notes what this server holds, a takeover, and a rollback.

        Args:
            now: the time, on the clock of `status`.
            view: the view.
        """
        before, self._view = self._view, view
        server, shards = self._server, view.shards
        self._held = {
            "primary": [at for at, shard in enumerate(shards) if shard.primary == server],
            "backup": [at for at, shard in enumerate(shards) if server in shard.backups],
            "joining": [at for at, shard in enumerate(shards) if server in shard.joining],
        }
        for role, gauge in self._shards.items():
            gauge.value = len(self._held[role])
        self._generation.value, self._life.value = view.generation, view.life
        if not before.number:
            return
        if view.life > before.life:
            self._rolled_back_at = now
        if (before.life, before.generation) != (view.life, view.generation):
            return
        taken = [at for at in self._held["primary"] if before.shards[at].primary != server]
        if taken:
            lost = dict.fromkeys(f"ps:{before.shards[at].primary}" for at in taken)
            self._took_over, self._took_over_at = f"{_named(taken)} from {', '.join(lost)}", now
            self._takeovers.increment(len(taken))

    def status(self, now: float, logs: Iterable[ReplicationLog[Any]]) -> dict[str, float | str]:
        """Returns what this server holds and does for others, and updates the counters.

        Args:
            now: the time.
            logs: the logs of the shards that this server is primary of.
        """
        self._count(logs)
        view = self._view
        if not view.shards:
            return {}
        status: dict[str, float | str] = {
            "generation": view.generation,
            "life": view.life,
            "share": self._share(),
            **{f"{role}_of": ", ".join(map(str, held)) for role, held in self._held.items()},
            "log_entries": self._entries.value,
            "log_bytes": self._bytes.value,
            "log_unconfirmed": self._unconfirmed.value,
            "takeovers": self._takeovers.value,
        }
        if self._took_over:
            status |= {"took_over": self._took_over, "took_over_seconds": now - self._took_over_at}
        if self._rolled_back_at:
            status["rolled_back_seconds"] = now - self._rolled_back_at
        return status

    def _share(self) -> float:
        """Returns the share of the slots that this server is primary of."""
        slots = [shard.stop - shard.start for shard in self._view.shards]
        return sum(slots[at] for at in self._held["primary"]) / sum(slots)

    def _count(self, logs: Iterable[ReplicationLog[Any]]) -> None:
        seen, unconfirmed = dict[ReplicationLog[Any], tuple[int, int]](), 0
        for log in logs:
            entries, nbytes = self._seen.get(log, (0, 0))
            self._entries.increment(log.appended - entries)
            self._bytes.increment(log.appended_bytes - nbytes)
            seen[log] = log.appended, log.appended_bytes
            unconfirmed += log.unconfirmed
        self._seen, self._unconfirmed.value = seen, unconfirmed


def _named(shards: list[int]) -> str:
    """Returns a text such as `shard 0` or `shards 0, 2`."""
    return f"shard{'s' * (len(shards) > 1)} {', '.join(map(str, shards))}"
