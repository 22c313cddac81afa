"""Synchronous rounds in a shard, alone and beside others."""

from __future__ import annotations

import pytest

from tests.ps.bench import SYNC, Bench, applied, payload_of, sent, snapshot_of, told
from trireme.ps.leader.decisions import Apply, Decided, Held, Members, PushId
from trireme.ps.messages import (
    Done,
    Duplicate,
    FencedVerdict,
    GroupSpec,
    PushReply,
    Stale,
    WorkerProgress,
)
from trireme.ps.rule import Average, Rule

A, B = (0, 1, 1), (1, 1, 1)


def close(*pushes: PushId) -> Decided:
    return Decided(0, (Apply(1, pushes),), 1)


def fenced(number: int, reason: str, *, step: int = 0) -> PushReply:
    return PushReply(FencedVerdict(number, reason), step, 0, False)


# Rounds at a single server ---------------------------------------------------------------------


def test_a_round_is_the_mean_of_one_update_of_each() -> None:
    bench = Bench(SYNC)
    assert bench.push(0, 1, 2.0) == []
    out = bench.push(1, 1, 4.0)
    assert told(out) == [("push 0.1", applied(1)), ("push 1.1", applied(1))]
    assert payload_of(out, "push 0.1") == [97.0]
    assert bench.counters == {"applied": 2.0, "rounds": 1.0}


def test_a_round_is_weighted() -> None:
    bench = Bench(SYNC)
    bench.push(0, 1, 2.0, weight=3.0)
    bench.push(1, 1, 6.0, weight=1.0)
    assert bench.value == 97.0


def test_a_round_in_which_nothing_weighs_is_a_step() -> None:
    bench = Bench(SYNC)
    bench.push(0, 1, 2.0, weight=0.0)
    assert told(bench.push(1, 1, 4.0, weight=0.0))[0] == ("push 0.1", applied(1))
    assert bench.value == 100.0


def test_a_repeat_in_an_open_round_only_changes_its_way() -> None:
    bench = Bench(SYNC)
    bench.push(0, 1, 2.0)
    assert bench.push(0, 1, 2.0, route="again") == []
    assert told(bench.push(1, 1, 4.0))[0] == ("again", applied(1))
    assert bench.value == 97.0


def test_the_hyper_parameters_of_a_round_are_the_first_workers() -> None:
    bench = Bench(SYNC)
    bench.push(1, 1, 1.0, hyper=(GroupSpec({"lr": 50.0}),))
    bench.push(0, 1, 1.0, hyper=(GroupSpec({"lr": 10.0}),))
    assert bench.value == 90.0
    assert bench.counters["disagreements"] == 1
    bench.push(0, 2, 1.0)
    bench.push(1, 2, 1.0)
    assert bench.value == 80.0
    assert bench.counters["disagreements"] == 1, "it was settled in the round before"


def test_who_says_nothing_of_hyper_parameters_goes_by_those_of_the_optimizer() -> None:
    bench = Bench(SYNC)
    bench.push(0, 1, 1.0, hyper=(GroupSpec({"lr": 10.0}),))
    bench.push(1, 1, 1.0)
    assert bench.value == 90.0
    assert bench.counters["disagreements"] == 1


def test_who_has_no_examples_says_nothing_of_hyper_parameters() -> None:
    bench = Bench(SYNC)
    bench.push(0, 1, 0.0, weight=0.0)
    bench.push(1, 1, 1.0, hyper=(GroupSpec({"lr": 10.0}),))
    assert bench.value == 90.0
    assert "disagreements" not in bench.counters


def test_what_comes_after_enough_updates_is_stale() -> None:
    bench = Bench(Rule(aggregate=1, staleness=0))
    assert told(bench.push(0, 1, 2.0)) == [("push 0.1", applied(1))]
    late = bench.push(1, 1, 50.0, pulled=0)
    assert told(late) == [("push 1.1", PushReply(Stale(1), 1, 1, False))]
    assert payload_of(late, "push 1.1") == [98.0]
    assert told(bench.push(1, 1, 50.0, pulled=0)) == [
        ("push 1.1", PushReply(Duplicate(Stale(1)), 1, 0, False))
    ]
    assert bench.table[1] == WorkerProgress(1, 1, 1, 0, 1)


def test_a_lost_worker_leaves_the_round_to_the_others() -> None:
    bench = Bench(SYNC, workers=(0, 1, 2))
    bench.push(0, 1, 2.0)
    bench.push(1, 1, 4.0)
    assert told(bench.view(0, 1)) == [("push 0.1", applied(1)), ("push 1.1", applied(1))]
    assert bench.value == 97.0


def test_the_update_of_a_lost_worker_is_not_in_the_round() -> None:
    bench = Bench(SYNC, workers=(0, 1, 2))
    bench.push(0, 1, 2.0)
    bench.push(2, 1, 50.0)
    assert told(bench.view(0, 1)) == [("push 2.1", fenced(2, "worker:2 is not in view 2"))]
    bench.push(1, 1, 4.0)
    assert bench.value == 97.0


def test_a_worker_that_was_started_anew_takes_its_own_place() -> None:
    bench = Bench(SYNC)
    bench.push(1, 1, 50.0)
    bench.view(0, (1, 2))
    bench.push(0, 1, 2.0)
    assert told(bench.push(1, 1, 4.0, incarnation=2, route="new"))[1] == ("new", applied(1))
    assert bench.value == 97.0


def test_who_has_retired_is_not_waited_for() -> None:
    bench = Bench(SYNC)
    bench.push(0, 1, 2.0)
    assert told(bench.retire(1)) == [("retire 1", Done()), ("push 0.1", applied(1))]


def test_a_large_mean_is_clipped_and_a_small_one_is_not() -> None:
    bench = Bench(Rule(aggregate=0, staleness=0, clip_norm=4.0))
    bench.push(0, 1, 3.0)
    bench.push(1, 1, 5.0)  # 16 elements of 4: a norm of 16
    assert bench.value == pytest.approx(99.0, rel=1e-6)
    before = bench.value
    bench.push(0, 2, 0.5)
    bench.push(1, 2, 0.5)
    assert bench.value == before - 0.5


def test_the_moving_average_is_kept() -> None:
    bench = Bench(Rule(aggregate=1, average=Average(0.5, warm_up=False)))
    bench.push(0, 1, 4.0)
    message, numbers = snapshot_of(bench.snapshot())
    assert [spec.key for spec in message.tensors] == ["values", "average"]
    assert numbers == [96.0, 98.0]


# Rounds over several servers -------------------------------------------------------------------


def test_server_0_waits_until_the_others_hold_the_updates() -> None:
    bench = Bench(SYNC, servers=2)
    bench.push(0)
    assert bench.push(1) == []
    out = bench.hear(1, Held(0, (A, B)))
    decided = Decided(0, (Members(0, ((0, 1), (1, 1))), Apply(1, (A, B))), 1)
    assert told(out) == [("ps:1", decided), ("push 0.1", applied(1)), ("push 1.1", applied(1))]


def test_another_server_does_what_server_0_decides() -> None:
    bench = Bench(Rule(aggregate=1, staleness=0), server=1, servers=2)
    assert sent(bench.push(0)) == [(0, Held(0, (A,)))]
    assert sent(bench.push(1)) == [(0, Held(0, (A, B)))]
    out = bench.hear(0, close(B))
    assert told(out) == [("push 1.1", applied(1)), ("push 0.1", PushReply(Stale(1), 1, 1, False))]
    assert bench.hear(0, close(B)) == []


def test_a_round_of_updates_that_are_not_here_is_not_believed() -> None:
    bench = Bench(SYNC, server=1, servers=2)
    bench.push(0, 1, 2.0)
    assert bench.hear(0, close(A, B)) == []
    assert sent(bench.push(1, 1, 4.0)) == [(0, Held(0, (A, B)))]
    assert bench.shard.state.step == 0
    assert bench.hear(0, close(A, B)) != []


def test_an_update_that_server_0_counts_on_outlives_its_worker() -> None:
    bench = Bench(SYNC, server=1, servers=2)
    bench.push(0, 1, 2.0)
    bench.push(1, 1, 4.0)
    # The worker hears at once that it is out; its memory is its own again.
    assert told(bench.view(0))[0] == ("push 1.1", fenced(2, "worker:1 is not in view 2"))
    out = bench.hear(0, close(A, B))
    assert told(out) == [("push 0.1", applied(1))]
    assert bench.value == 97.0
    assert bench.table[1] == WorkerProgress(1, 1, 1, 1, 0)


def test_an_update_that_was_measured_is_applied_as_it_was_though_its_worker_is_out() -> None:
    """What was measured is the gradient itself, in the memory of the worker."""
    rule = Rule(aggregate=0, staleness=0, clip_norm=1000.0)
    bench = Bench(rule, workers=(0,), server=1, servers=2)
    ((_, held),) = sent(bench.push(0, 1, 2.0))
    assert isinstance(held, Held) and held.measured == (A,)
    (pending,) = bench.shard.execution.follower.held.values()
    bench.view(1)
    pending.gradients.vectors[0].fill_(50.0)  # the worker's memory is its own again
    bench.hear(0, close(A))
    assert bench.value == 98.0


def test_an_update_that_was_kept_and_not_counted_on_is_forgotten() -> None:
    bench = Bench(SYNC, server=1, servers=2)
    bench.push(0, 1, 2.0)
    bench.push(1, 1, 4.0)
    bench.view(0)
    out = bench.hear(0, close(A))
    assert told(out) == [("push 0.1", applied(1))]
    assert bench.value == 98.0
    assert bench.table[1] == WorkerProgress(1, 1, 0, 0, 0)


def test_norms_are_gathered_at_server_0() -> None:
    rule = Rule(aggregate=0, staleness=0, clip_norm=5.0)
    bench = Bench(rule, servers=2, workers=(0,))
    bench.push(0, 1, 1.0)  # this server holds no element, or all of them
    square = float(sum(part.length for part in bench.layout.parts(0)))
    other = 100.0 - square
    ((_, decided), (_, answer)) = told(bench.hear(1, Held(0, (A,), (), (A,), other)))
    assert isinstance(decided, Decided)
    _, decision = decided.decisions
    assert isinstance(decision, Apply)
    assert decision.scale == pytest.approx(0.5, rel=1e-6)
    assert answer == applied(1)


# Who waits for whom ------------------------------------------------------------------------------


def test_who_waits_in_a_round_and_for_whom_is_told() -> None:
    bench = Bench(SYNC, workers=(0, 1, 2))
    assert bench.shard.waits(bench.now) == ()
    bench.push(1, 1, 2.0)
    bench.now += 1.0
    bench.push(0, 1, 2.0)
    bench.now += 0.5
    first, second = bench.shard.waits(bench.now)
    assert (first.worker, first.notice.seconds) == (1, 1.5)
    assert (second.worker, second.notice.seconds) == (0, 0.5)
    assert first.notice.names == second.notice.names == ("worker:2",)
    assert first.notice.reason == "round 1"
    bench.push(2, 1, 2.0)
    assert bench.shard.waits(bench.now) == ()


def test_who_is_too_far_ahead_waits_for_the_slowest_and_lags_are_told() -> None:
    bench = Bench(Rule(aggregate=1, staleness=1))
    bench.push(0, 1, 2.0)
    bench.push(0, 2, 2.0, pulled=1)
    bench.now += 2.0
    (wait,) = bench.shard.waits(bench.now)
    assert (wait.worker, wait.notice.names) == (0, ("worker:1",))
    assert (wait.notice.reason, wait.notice.seconds) == ("staleness bound 1", 2.0)
    assert bench.shard.lags() == {0: 0, 1: 2}


def test_who_is_too_far_ahead_is_answered_when_the_job_ends() -> None:
    bench = Bench(Rule(aggregate=1, staleness=1, max_steps=3), workers=(0, 1, 2))
    bench.push(0, 1, 2.0)
    assert bench.push(0, 2, 2.0, pulled=1) == []
    answers = dict(told(bench.push(1, 1, 2.0, pulled=2)))
    assert {*answers} == {"push 0.2", "push 1.1"}, "worker 2 is behind still, and need not push"


def test_who_waits_for_first_values_waits_for_the_chief() -> None:
    bench = Bench(loaded=False)
    bench.attach(1)
    bench.pull(1)
    (wait,) = bench.shard.waits(bench.now)
    assert (wait.worker, wait.notice.names) == (1, ("worker:0",))
