from __future__ import annotations

from tests.metric_values import value
from tests.ps.bench import SYNC, Bench
from trireme.ps.server.metrics import ShardMetrics


class Watched:
    """A shard whose metrics writes down what it tells."""

    def __init__(self) -> None:
        self.told: list[dict[str, float | str]] = []
        self.metrics = ShardMetrics()
        self.metrics.report = lambda status: self.told.append(dict(status))
        self.bench = Bench(SYNC)

    def look(self) -> dict[str, float | str]:
        self.metrics.look(self.bench.now, self.bench.shard)
        return self.told[-1]


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
    metrics = watched.metrics
    assert value(metrics, "trireme_apply_seconds_count") == 1
    assert value(metrics, "trireme_pushes_total", verdict="applied") == 2
    assert value(metrics, "trireme_global_step") == 1
    assert value(metrics, "trireme_withheld_answers") == 1
    assert value(metrics, "trireme_worker_lag", worker=1) == 0


def test_it_tells_each_half_second_and_not_more_often() -> None:
    watched = Watched()
    watched.look()
    watched.bench.now += 0.4
    watched.look()
    assert len(watched.told) == 1
    watched.bench.now += 0.2
    watched.look()
    assert len(watched.told) == 2


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
    """What is reported stays, at the coordinator, until it is reported anew."""
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
