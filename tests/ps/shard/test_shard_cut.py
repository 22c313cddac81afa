"""A consistent copy, as one shard sees it."""

from __future__ import annotations

from tests.ps.bench import SYNC, Bench, applied, snapshot_of, told
from trireme.ps.leader.decisions import Apply, Cut, Decided, Held
from trireme.ps.messages import GroupSpec, OptimizerSpec, WorkerProgress


def test_alone_a_shard_copies_what_it_has_when_it_is_asked() -> None:
    bench = Bench()
    bench.push(0, 1, 1.0)
    message, numbers = snapshot_of(bench.snapshot())
    assert (message.step, numbers) == (1, [99.0])
    assert message.workers == (WorkerProgress(0, 1, 1, 1, 0), WorkerProgress(1, 1, 0, 0, 0))


def test_a_copy_between_two_rounds_takes_nothing_of_the_open_one() -> None:
    bench = Bench(SYNC)
    bench.push(0, 1, 2.0)
    message, numbers = snapshot_of(bench.snapshot())
    assert (message.step, numbers) == (0, [100.0])
    assert told(bench.push(1, 1, 4.0)) == [("push 0.1", applied(1)), ("push 1.1", applied(1))]


def test_the_optimizers_state_is_copied_if_it_is_asked_for() -> None:
    bench = Bench(optimizer=OptimizerSpec("SGD", (GroupSpec({"lr": 1.0, "momentum": 0.5}),)))
    bench.push(0, 1, 3.0)
    for token, state, keys in (
        (1, True, ["values", "state/momentum_buffer"]),
        (2, False, ["values"]),
    ):
        message, numbers = snapshot_of(bench.snapshot(token, state=state))
        assert [spec.key for spec in message.tensors] == keys
        assert numbers == [97.0, 3.0][: len(keys)]


def test_a_shard_reports_that_it_was_asked_and_copies_where_the_leader_decides() -> None:
    bench = Bench(server=1, servers=2)
    assert told(bench.snapshot()) == [("ps:0", Held(0, (), ((0, 7),)))]
    assert told(bench.push(0, 1, 2.0)) == [("ps:0", Held(0, ((0, 1, 1),), ((0, 7),)))]
    out = bench.hear(0, Decided(0, (Apply(1, ((0, 1, 1),)), Cut(1, 0, 7)), 1))
    message, _ = snapshot_of(out)
    assert message.step == 1
    assert [route for route, _ in told(out)] == ["snapshot 7", "push 0.1"]


def test_a_copy_that_was_not_asked_for_here_is_passed_over() -> None:
    bench = Bench(server=1, servers=2)
    assert bench.hear(0, Decided(0, (Cut(0, 0, 7),), 1)) == []
    assert [type(m).__name__ for _, m in told(bench.snapshot())] == ["Refused"]


def test_two_workers_may_ask_for_copies_at_a_time() -> None:
    bench = Bench(servers=2)
    assert bench.snapshot(7, worker=0) == []
    assert bench.snapshot(8, worker=1) == []
    out = bench.hear(1, Held(0, (), ((0, 7), (1, 8))))
    assert {route for route, _ in told(out)} == {"ps:1", "snapshot 7", "snapshot 8"}
