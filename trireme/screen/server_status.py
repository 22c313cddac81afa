"""What each server tells of itself: for `status` and `top`, reports, and those who scrape it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import Any

import psutil

from trireme.cluster.view import View
from trireme.ps.replication.log import ReplicationLog
from trireme.ps.server.measures import Measures, MeasuresType
from trireme.ps.shard.shard import Shard

_MOST_LAGS = 32
"""So many workers are in a status with how far they are behind, those furthest behind: a record of
each server has them, and all of a thousand are 30 kB in each of ten thousand records."""

_VERDICTS = ("applied", "stale", "duplicate", "fenced", "rejected")
_NAMES = 8


class ServerStatus(Measures):
    """Measures one server: updates, answers that wait, and the replicas that it holds."""

    def __init__(self, server: int = 0) -> None:
        self._server = server
        self._process = psutil.Process()
        self._seconds, self._times = 0.0, 0  # spent in applying, and how often
        self._before = 0.0, 0  # these two as of the last report
        self._told: dict[str, float | str] = {}
        self._lags: Mapping[int, int] = {}  # of every worker that has ever been there
        self._view = View(0, (), ())
        self._held: dict[str, list[int]] = {}  # the shards of this server, by its role
        self._took_over = ""
        self._took_over_at = self._rolled_back_at = 0.0
        self._seen: dict[ReplicationLog[Any], tuple[int, int]] = {}  # as it was counted last
        self._takeovers = self._entries = self._bytes = 0

    def applied(self, seconds: float) -> None:
        self._seconds += seconds
        self._times += 1

    def view(self, now: float, view: View, logs: Iterable[ReplicationLog[Any]] = ()) -> None:
        """Takes a view: notes what this server holds, a takeover, and a rollback."""
        self._count(logs)
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
            shards_taken = f"shard{'s' * (len(taken) > 1)} {', '.join(map(str, taken))}"
            self._took_over, self._took_over_at = f"{shards_taken} from {', '.join(lost)}", now
            self._takeovers += len(taken)

    def status(
        self, now: float, shard: Shard, logs: Iterable[ReplicationLog[Any]] = ()
    ) -> dict[str, float | str]:
        """Returns the server's status, and notes the metrics."""
        state, waits, lags = shard.state, shard.waits(now), shard.lags()
        seconds, times = self._seconds - self._before[0], self._times - self._before[1]
        self._before = self._seconds, self._times
        gauges = {"global_step": state.step, "memory_bytes": self._process.memory_info().rss}
        status: dict[str, float | str] = {
            "state": "serving" if state.loaded else "waiting for the first values",
            "applied": state.counters["applied"],
            "stale": state.counters["stale"],
            "fenced": state.counters["fenced"],
            "apply_seconds": seconds / max(times, 1),
            **gauges,
            **self._replication(now, logs),
        }
        if state.extension is not None:
            status |= state.extension.status()
        watched = state.watch.status()
        status |= watched
        if waits:
            workers, longest = sorted(wait.worker for wait in waits)[:_NAMES], waits[0].notice
            status |= {
                "waiting": ", ".join(f"worker:{worker}" for worker in workers),
                "waiting_for": ", ".join(longest.names[:_NAMES]),
                "waiting_reason": longest.reason,
                "waiting_seconds": longest.seconds,
            }
        furthest = heapq.nlargest(_MOST_LAGS, lags.items(), key=lambda each: (each[1], -each[0]))
        status |= {f"lag/worker:{worker}": lag for worker, lag in sorted(furthest)}
        self._lags = {**self._lags, **lags}
        self.numbers = {
            **gauges,
            "withheld_answers": len(waits),
            "apply_seconds/sum": self._seconds,
            "apply_seconds/count": self._times,
            "push_staleness": state.counters["staleness"],
            **{f"pushes/{verdict}": state.counters[verdict] for verdict in _VERDICTS},
            **{f"worker_lag/{worker}": lag for worker, lag in self._lags.items()},
            **{f"shards/{role}": len(held) for role, held in self._held.items()},
            "generation": self._view.generation,
            "life": self._view.life,
            "takeovers": self._takeovers,
            "log_entries": self._entries,
            "log_bytes": self._bytes,
            "log_unconfirmed_entries": float(status.get("log_unconfirmed", 0)),
            **{name: told for name, told in watched.items() if not isinstance(told, str)},
        }
        # A reported value stays until another is reported: what is over is reported as empty.
        over = {name: "" if isinstance(told, str) else 0.0 for name, told in self._told.items()}
        self._told = status
        return {name: told for name, told in over.items() if name not in status} | status

    def _count(self, logs: Iterable[ReplicationLog[Any]]) -> int:
        """Counts the entries of logs, each once; returns how many are not confirmed."""
        seen, unconfirmed = dict[ReplicationLog[Any], tuple[int, int]](), 0
        for log in logs:
            entries, nbytes = self._seen.get(log, (0, 0))
            self._entries += log.appended - entries
            self._bytes += log.appended_bytes - nbytes
            seen[log] = log.appended, log.appended_bytes
            unconfirmed += log.unconfirmed
        self._seen = seen
        return unconfirmed

    def _replication(
        self, now: float, logs: Iterable[ReplicationLog[Any]]
    ) -> dict[str, float | str]:
        """Returns what this server holds and does for others, and counts the entries of logs."""
        unconfirmed, view = self._count(logs), self._view
        if not view.shards:
            return {}
        slots = [shard.stop - shard.start for shard in view.shards]
        status: dict[str, float | str] = {
            "generation": view.generation,
            "life": view.life,
            "share": sum(slots[at] for at in self._held["primary"]) / sum(slots),
            **{f"{role}_of": ", ".join(map(str, held)) for role, held in self._held.items()},
            "log_entries": self._entries,
            "log_bytes": self._bytes,
            "log_unconfirmed": unconfirmed,
            "takeovers": self._takeovers,
        }
        if self._took_over:
            status |= {"took_over": self._took_over, "took_over_seconds": now - self._took_over_at}
        if self._rolled_back_at:
            status["rolled_back_seconds"] = now - self._rolled_back_at
        return status


SERVERS = MeasuresType(ServerStatus)
