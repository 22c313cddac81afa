from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from tests.ps.bench import SYNC, Bench
from trireme.cluster.view import ShardEntry, View
from trireme.ps.messages import Retire
from trireme.ps.replication.log import ReplicationLog
from trireme.ps.replication.replica import NOBODY
from trireme.ps.shard.shard import Shard
from trireme.screen.server_status import ServerStatus

Placed = tuple[int, tuple[int, ...], tuple[int, ...]]
"""The primary, the backups and the joining servers of a shard."""


class Watched:
    """A shard whose status is looked at."""

    def __init__(self) -> None:
        self.metrics = ServerStatus()
        self.bench = Bench(SYNC)

    def look(self) -> dict[str, float | str]:
        return self.metrics.status(self.bench.now, self.bench.shard)


def test_a_status_has_the_workers_that_are_furthest_behind_and_not_a_thousand() -> None:
    watched = Watched()
    watched.bench = Bench(workers=range(100))
    for worker in range(1, 100):
        watched.bench.push(worker, 1)
    watched.bench.push(40, 2)
    lags = {name: lag for name, lag in watched.look().items() if name.startswith("lag/")}
    assert len(lags) == 32 and lags["lag/worker:0"] == 2
    assert set(lags.values()) == {1, 2}


def test_a_server_tells_what_it_applied_and_who_waits() -> None:
    watched = Watched()
    bench = watched.bench
    bench.push(0, 1, 2.0)
    bench.push(1, 1, 4.0)
    watched.metrics.applied(0.25)
    bench.push(0, 2, 2.0, pulled=1)
    bench.now += 0.75
    status = watched.look()
    assert bench.value == 97.0
    assert status["state"] == "serving"
    assert (status["global_step"], status["applied"], status["stale"]) == (1, 2, 0)
    assert status["apply_seconds"] == 0.25
    assert (status["waiting"], status["waiting_for"]) == ("worker:0", "worker:1")
    assert (status["waiting_reason"], status["waiting_seconds"]) == ("round 2", 0.75)
    assert (status["lag/worker:0"], status["lag/worker:1"]) == (0, 0)
    numbers = watched.metrics.numbers
    assert (numbers["apply_seconds/count"], numbers["apply_seconds/sum"]) == (1, 0.25)
    assert numbers["pushes/applied"] == 2
    assert (numbers["global_step"], numbers["withheld_answers"]) == (1, 1)
    assert numbers["worker_lag/1"] == 0


def test_it_tells_how_it_was_at_the_end_whenever_that_is() -> None:
    watched = Watched()
    status = watched.look()
    assert status["global_step"] == 0
    assert not [name for name in status if name.startswith("waiting")], "nobody waits"
    watched.bench.push(0, 1, 2.0)
    watched.bench.push(1, 1, 4.0)
    last = watched.metrics.status(watched.bench.now, watched.bench.shard)
    assert last["global_step"] == 1


def test_a_wait_that_is_over_is_said_to_be_so() -> None:
    """The coordinator keeps a reported value until the server reports it again."""
    watched = Watched()
    bench = watched.bench
    bench.push(0, 1, 2.0)
    bench.now += 0.75
    known = dict(watched.look())
    assert known["waiting_for"] == "worker:1"
    bench.push(1, 1, 4.0)
    bench.now += 0.75
    known |= watched.look()
    assert known["global_step"] == 1
    assert (known["waiting"], known["waiting_for"], known["waiting_seconds"]) == ("", "", 0)


def view(number: int, *shards: Placed, generation: int = 1, life: int = 0) -> View:
    bounds = pairwise(range(0, 64 * len(shards) + 1, 64))
    entries = (ShardEntry(*bound, *placed) for bound, placed in zip(bounds, shards, strict=True))
    return View(number, (), (), tuple(entries), generation, life=life)


class Measured(ServerStatus):
    """The metrics of ps:1, which has a shard without workers."""

    def said(self, now: float, logs: Iterable[ReplicationLog[Any]] = ()) -> dict[str, float | str]:
        return self.status(now, Shard(0), logs)


def test_a_server_says_what_it_holds() -> None:
    measured = Measured(1)
    assert "generation" not in measured.said(0.0, ()), "before its first view"
    measured.view(0.0, view(3, (0, (1,), ()), (1, (2,), ()), (1, (), ()), (2, (), (1,))))
    status = measured.said(1.0, ())
    assert (status["primary_of"], status["backup_of"], status["joining_of"]) == ("1, 2", "0", "3")
    assert (status["share"], status["generation"], status["life"]) == (0.5, 1, 0)
    assert "took_over" not in status and "rolled_back_seconds" not in status


def test_the_part_of_a_lost_primary_is_a_takeover() -> None:
    measured = Measured(1)
    measured.view(0.0, view(1, (0, (1,), ()), (1, (2,), ()), (2, (1,), ())))
    measured.view(5.0, view(2, (1, (), ()), (1, (2,), ()), (2, (1,), ())))
    status = measured.said(7.5, ())
    assert (status["took_over"], status["took_over_seconds"]) == ("shard 0 from ps:0", 2.5)
    measured.view(9.0, view(3, (1, (), ()), (1, (), ()), (1, (), ())))
    status = measured.said(9.0, ())
    assert (status["took_over"], status["takeovers"]) == ("shard 2 from ps:2", 2)
    assert (measured.numbers["takeovers"], measured.numbers["shards/primary"]) == (2, 3)


def test_a_division_that_was_planned_is_no_takeover() -> None:
    measured = Measured(1)
    measured.view(0.0, view(1, (0, (1,), ()), (0, (1,), ())))
    measured.view(1.0, view(2, (0, (1,), ()), (1, (0,), ()), generation=2))
    assert measured.said(1.0, ())["takeovers"] == 0


def test_the_loss_of_all_copies_is_told_and_is_no_takeover() -> None:
    measured = Measured(1)
    measured.view(0.0, view(1, (0, (), ()), (1, (), ())))
    assert "rolled_back_seconds" not in measured.said(1.0, ())
    measured.view(4.0, view(2, (1, (), ()), (1, (), ()), generation=2, life=1))
    status = measured.said(6.0, ())
    assert (status["life"], status["rolled_back_seconds"], status["takeovers"]) == (1, 2.0, 0)


def test_a_server_that_joins_a_job_of_a_later_life_was_not_rolled_back() -> None:
    measured = Measured(1)
    measured.view(4.0, view(9, (1, (), ()), generation=5, life=2))
    assert "rolled_back_seconds" not in measured.said(6.0, ())


def test_entries_are_counted_over_all_logs_and_generations() -> None:
    measured = Measured(1)
    measured.view(0.0, view(1, (1, (2,), ())))
    log = ReplicationLog[object](0)
    log.members((2,), ())
    log.follow("ps:2", 2, 1, 0)
    for _ in range(3):
        list(log.append(0.0, NOBODY, Retire(), [memoryview(b"12345678")]))
    list(log.confirm("ps:2", 1))
    status = measured.said(1.0, [log])
    assert (status["log_entries"], status["log_unconfirmed"]) == (3, 2)
    assert status["log_bytes"] == log.appended_bytes >= 3 * 8
    assert measured.said(2.0, [log])["log_entries"] == 3, "each once"
    other = ReplicationLog[object](7)
    other.members((2,), ())
    other.follow("ps:2", 2, 1, 7)
    list(other.append(0.0, NOBODY, Retire(), ()))
    assert measured.said(3.0, [other])["log_entries"] == 4
    assert measured.numbers["log_entries"] == 4
    assert measured.numbers["log_unconfirmed_entries"] == 1


def test_entries_of_a_log_that_a_view_replaces_between_two_reports_are_counted() -> None:
    measured = Measured(1)
    measured.view(0.0, view(1, (1, (2,), ())))
    log = ReplicationLog[object](0)
    log.members((2,), ())
    list(log.append(0.0, NOBODY, Retire(), ()))
    measured.view(1.0, view(2, (1, (), ()), generation=2), [log])
    assert measured.said(2.0, ())["log_entries"] == 1
