"""A consistent cut, as one shard sees it."""

from __future__ import annotations

from tests.ps.bench import (
    SYNC,
    Bench,
    applied,
    payload_of,
    snapshot_of,
    told,
)
from trireme.ps.messages import (
    Done,
    FencedVerdict,
    GroupSpec,
    OptimizerSpec,
    PushReply,
    Refused,
    WorkerProgress,
)
from trireme.ps.server_messages import RoundClose
from trireme.ps.shard.shard import FREEZE_SECONDS
from trireme.ps.snapshot_messages import Frozen

A, B = (0, 1), (1, 1)


def fenced(number: int, reason: str, *, step: int = 0) -> PushReply:
    return PushReply(FencedVerdict(number, reason), step, 0, False)


# A consistent cut ------------------------------------------------------------------------------


def test_a_frozen_shard_decides_nothing() -> None:
    bench = Bench()
    bench.push(0, 1)
    assert told(bench.freeze()) == [("freeze 7", Frozen(1, ((0, 1), (1, 0)), 1))]
    assert bench.push(0, 2) == []
    assert bench.push(1, 1) == []
    assert bench.shard.state.step == 1
    assert told(bench.freeze()) == [("freeze 7", Frozen(1, ((0, 1), (1, 0)), 1))], "a repeat"


def test_a_cut_copies_and_lets_go() -> None:
    bench = Bench()
    bench.push(0, 1, 1.0)
    bench.freeze()
    bench.push(0, 2, 10.0)
    bench.push(1, 1, 20.0)
    out = bench.cut(1, (0, 1), (1, 0))
    message, numbers = snapshot_of(out)
    assert (message.step, numbers) == (1, [99.0])
    assert message.workers == (WorkerProgress(0, 1, 1, 1, 0), WorkerProgress(1, 1, 0, 0, 0))
    # The answers carry the values that they name, and not those of a step between.
    assert told(out)[1:] == [
        ("push 0.2", applied(2, at=3)),
        ("push 1.1", applied(3, staleness=1)),
    ]
    assert payload_of(out, "push 0.2") == payload_of(out, "push 1.1") == [69.0]


def test_a_cut_waits_for_what_other_servers_have_decided() -> None:
    bench = Bench()
    bench.freeze()
    bench.push(1, 1, 20.0)
    assert bench.cut(1, (0, 1), (1, 0)) == []
    out = bench.push(0, 1, 1.0)
    message, numbers = snapshot_of(out)
    assert (message.step, numbers) == (1, [99.0])
    assert [route for route, _ in told(out)] == ["cut 7", "push 0.1", "push 1.1"]


def test_a_round_that_other_servers_have_closed_is_closed_here_too() -> None:
    bench = Bench(SYNC, server=1, servers=2)
    bench.push(0, 1, 2.0)
    bench.push(1, 1, 4.0)
    bench.freeze()
    assert bench.shard.heard(bench.now, 0, RoundClose(0, (A, B), 1.0)) == []
    message, numbers = snapshot_of(bench.cut(1, (0, 1), (1, 1)))
    assert message.step == 1
    assert bench.shard.state.step == 1
    assert numbers in ([97.0], [])


def test_a_round_beyond_the_cut_waits() -> None:
    bench = Bench(SYNC)
    bench.push(0, 1, 2.0)
    bench.freeze()
    assert bench.push(1, 1, 4.0) == []
    out = bench.cut(0, (0, 0), (1, 0))
    message, numbers = snapshot_of(out)
    assert (message.step, numbers) == (0, [100.0])
    assert told(out)[1:] == [("push 0.1", applied(1)), ("push 1.1", applied(1))]


def test_the_optimizers_state_is_copied_if_it_is_asked_for() -> None:
    bench = Bench(optimizer=OptimizerSpec("SGD", (GroupSpec({"lr": 1.0, "momentum": 0.5}),)))
    bench.push(0, 1, 3.0)
    for state, keys in ((True, ["values", "state/momentum_buffer"]), (False, ["values"])):
        bench.freeze()
        message, numbers = snapshot_of(bench.cut(1, (0, 1), (1, 0), state=state))
        assert [spec.key for spec in message.tensors] == keys
        assert numbers == [97.0, 3.0][: len(keys)]


def test_one_cut_at_a_time() -> None:
    bench = Bench()
    bench.freeze(7)
    busy = Refused("busy", "another cut is under way", 1)
    assert told(bench.freeze(8)) == [("freeze 8", busy)]
    ((_, refused),) = told(bench.cut(0, token=8))
    assert isinstance(refused, Refused)
    assert refused.code == "busy"
    assert told(bench.thaw(8)) == [("thaw 8", Done())]
    bench.push(0)
    assert bench.shard.state.step == 0, "still frozen"


def test_a_thaw_lets_go() -> None:
    bench = Bench()
    bench.freeze()
    bench.push(0)
    assert told(bench.thaw()) == [("thaw 7", Done()), ("push 0.1", applied(1))]
    assert told(bench.freeze(8))[0][0] == "freeze 8"


def test_nothing_to_copy_before_values_are_loaded() -> None:
    bench = Bench(loaded=False)
    assert told(bench.freeze()) == [("freeze 7", Refused("rejected", "no values are loaded", 1))]


def test_a_cut_is_given_up_when_the_view_changes() -> None:
    bench = Bench()
    bench.freeze()
    bench.push(0)
    bench.cut(3, (0, 1), (1, 1))
    reason = "the cut was given up: the view has changed"
    assert told(bench.view(0)) == [("cut 7", Refused("busy", reason, 2))]
    ((_, refused),) = told(bench.cut(3, (0, 1)))
    assert isinstance(refused, Refused)
    assert refused.code == "busy"


def test_what_was_held_back_under_an_old_view_is_decided_under_the_new_one() -> None:
    bench = Bench()
    bench.freeze()
    bench.push(0)
    bench.push(1, 1, 50.0)
    assert sorted(told(bench.view(0)), key=str) == [
        ("push 0.1", applied(1)),
        ("push 1.1", fenced(2, "worker:1 is not in view 2")),
    ]
    assert bench.value == 99.0


def test_a_cut_that_takes_too_long_is_given_up() -> None:
    bench = Bench()
    bench.freeze()
    bench.push(0)
    assert bench.shard.tick(bench.now + FREEZE_SECONDS) == []
    out = bench.shard.tick(bench.now + FREEZE_SECONDS + 0.1)
    assert told(out) == [("push 0.1", applied(1))]
