from __future__ import annotations

from itertools import pairwise

from tests.metric_values import value
from trireme.cluster.view import ShardEntry, View
from trireme.ps.messages import Retire
from trireme.ps.replication.log import ReplicationLog
from trireme.ps.replication.replica import NOBODY
from trireme.ps.server.replication_metrics import ReplicationMetrics

Placed = tuple[int, tuple[int, ...], tuple[int, ...]]
"""The primary, the backups and the joining servers of a shard."""


def view(number: int, *shards: Placed, generation: int = 1, life: int = 0) -> View:
    bounds = pairwise(range(0, 64 * len(shards) + 1, 64))
    entries = (ShardEntry(*bound, *placed) for bound, placed in zip(bounds, shards, strict=True))
    return View(number, (), (), tuple(entries), generation, life=life)


def metrics() -> ReplicationMetrics:
    return ReplicationMetrics(1)


def test_a_server_says_what_it_holds() -> None:
    measured = metrics()
    assert measured.status(0.0, ()) == {}, "before its first view"
    measured.view(0.0, view(3, (0, (1,), ()), (1, (2,), ()), (1, (), ()), (2, (), (1,))))
    status = measured.status(1.0, ())
    assert (status["primary_of"], status["backup_of"], status["joining_of"]) == ("1, 2", "0", "3")
    assert (status["share"], status["generation"], status["life"]) == (0.5, 1, 0)
    assert "took_over" not in status and "rolled_back_seconds" not in status


def test_the_part_of_a_lost_primary_is_a_takeover() -> None:
    measured = metrics()
    measured.view(0.0, view(1, (0, (1,), ()), (1, (2,), ()), (2, (1,), ())))
    measured.view(5.0, view(2, (1, (), ()), (1, (2,), ()), (2, (1,), ())))
    status = measured.status(7.5, ())
    assert (status["took_over"], status["took_over_seconds"]) == ("shard 0 from ps:0", 2.5)
    measured.view(9.0, view(3, (1, (), ()), (1, (), ()), (1, (), ())))
    status = measured.status(9.0, ())
    assert (status["took_over"], status["takeovers"]) == ("shard 2 from ps:2", 2)
    assert value(measured, "trireme_takeovers_total") == 2
    assert value(measured, "trireme_shards", role="primary") == 3


def test_a_division_that_was_planned_is_no_takeover() -> None:
    measured = metrics()
    measured.view(0.0, view(1, (0, (1,), ()), (0, (1,), ())))
    measured.view(1.0, view(2, (0, (1,), ()), (1, (0,), ()), generation=2))
    assert measured.status(1.0, ())["takeovers"] == 0


def test_the_loss_of_all_copies_is_told_and_is_no_takeover() -> None:
    measured = metrics()
    measured.view(0.0, view(1, (0, (), ()), (1, (), ())))
    assert "rolled_back_seconds" not in measured.status(1.0, ())
    measured.view(4.0, view(2, (1, (), ()), (1, (), ()), generation=2, life=1))
    status = measured.status(6.0, ())
    assert (status["life"], status["rolled_back_seconds"], status["takeovers"]) == (1, 2.0, 0)


def test_a_server_that_joins_a_job_of_a_later_life_was_not_rolled_back() -> None:
    measured = metrics()
    measured.view(4.0, view(9, (1, (), ()), generation=5, life=2))
    assert "rolled_back_seconds" not in measured.status(6.0, ())


def test_entries_are_counted_over_all_logs_and_generations() -> None:
    measured = metrics()
    measured.view(0.0, view(1, (1, (2,), ())))
    log = ReplicationLog[object](0)
    log.members((2,), ())
    log.follow("ps:2", 2, 1, 0)
    for _ in range(3):
        list(log.append(0.0, NOBODY, Retire(), [memoryview(b"12345678")]))
    list(log.confirm("ps:2", 1))
    status = measured.status(1.0, [log])
    assert (status["log_entries"], status["log_unconfirmed"]) == (3, 2)
    assert status["log_bytes"] == log.appended_bytes >= 3 * 8
    assert measured.status(2.0, [log])["log_entries"] == 3, "each once"
    other = ReplicationLog[object](7)
    other.members((2,), ())
    other.follow("ps:2", 2, 1, 7)
    list(other.append(0.0, NOBODY, Retire(), ()))
    assert measured.status(3.0, [other])["log_entries"] == 4
    assert value(measured, "trireme_log_entries_total") == 4
    assert value(measured, "trireme_log_unconfirmed_entries") == 1
