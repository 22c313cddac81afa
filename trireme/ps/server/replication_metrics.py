"""The metrics of one server's replicas: what it holds, what its logs carry, whose part it took."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from trireme.cluster.view import View
from trireme.ps.replication.log import ReplicationLog

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

ROLES = ("primary", "backup", "joining")
"""What a server can be for a shard."""


class ReplicationMetrics:
    """Measures the replicas of one server."""

    def __init__(self, server: int) -> None:
        self._server = server
        self._view = View(0, (), ())
        self._held: dict[str, list[int]] = {role: [] for role in ROLES}
        self._took_over = ""
        self._took_over_at = self._rolled_back_at = 0.0
        self._seen: dict[ReplicationLog[Any], tuple[int, int]] = {}  # as it was counted last
        self._takeovers = self._entries = self._bytes = self._unconfirmed = 0

    def view(self, now: float, view: View) -> None:
        """Takes a view: notes what this server holds, a takeover, and a rollback."""
        before, self._view = self._view, view
        server, shards = self._server, view.shards
        self._held = {
            "primary": [at for at, shard in enumerate(shards) if shard.primary == server],
            "backup": [at for at, shard in enumerate(shards) if server in shard.backups],
            "joining": [at for at, shard in enumerate(shards) if server in shard.joining],
        }
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
            self._takeovers += len(taken)

    def status(self, now: float, logs: Iterable[ReplicationLog[Any]]) -> dict[str, float | str]:
        """Returns what this server holds and does for others, and updates the counters.

        Args:
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
            "log_entries": self._entries,
            "log_bytes": self._bytes,
            "log_unconfirmed": self._unconfirmed,
            "takeovers": self._takeovers,
        }
        if self._took_over:
            status |= {"took_over": self._took_over, "took_over_seconds": now - self._took_over_at}
        if self._rolled_back_at:
            status["rolled_back_seconds"] = now - self._rolled_back_at
        return status

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics for Prometheus."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        view, text = self._view, "Shards at this server, by its role"
        shards = GaugeMetricFamily("trireme_shards", text, labels=["role"])
        for role, held in self._held.items():
            shards.add_metric([role], len(held))
        yield shards
        text = "How the parameters are divided"
        yield GaugeMetricFamily("trireme_generation", text, view.generation)
        text = "How often all copies of a shard were lost"
        yield GaugeMetricFamily("trireme_life", text, view.life)
        text = "Shards taken over from a primary that was lost"
        yield CounterMetricFamily("trireme_takeovers_total", text, self._takeovers)
        text = "Entries that this server has sent to other replicas"
        yield CounterMetricFamily("trireme_log_entries_total", text, self._entries)
        text = "The bytes of these entries"
        yield CounterMetricFamily("trireme_log_bytes_total", text, self._bytes)
        text = "Entries that not every backup has confirmed"
        yield GaugeMetricFamily("trireme_log_unconfirmed_entries", text, self._unconfirmed)

    def _share(self) -> float:
        """Returns the share of the slots that this server is primary of."""
        slots = [shard.stop - shard.start for shard in self._view.shards]
        return sum(slots[at] for at in self._held["primary"]) / sum(slots)

    def _count(self, logs: Iterable[ReplicationLog[Any]]) -> None:
        seen, unconfirmed = dict[ReplicationLog[Any], tuple[int, int]](), 0
        for log in logs:
            entries, nbytes = self._seen.get(log, (0, 0))
            self._entries += log.appended - entries
            self._bytes += log.appended_bytes - nbytes
            seen[log] = log.appended, log.appended_bytes
            unconfirmed += log.unconfirmed
        self._seen, self._unconfirmed = seen, unconfirmed


def _named(shards: list[int]) -> str:
    """Returns a text such as `shard 0` or `shards 0, 2`."""
    return f"shard{'s' * (len(shards) > 1)} {', '.join(map(str, shards))}"
