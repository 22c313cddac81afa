"""How a shard brings a job to exactly its last step."""

from __future__ import annotations

from typing import Any

from tests.ps.bench import Bench, applied, told
from trireme.ps.leader.decisions import Apply, Decided, Held
from trireme.ps.messages import Done, Lease, PullReply, PushReply, Refused, Span, Stale, Stopping
from trireme.ps.rule import Rule
from trireme.ps.shard.participants import Participant

# The end ---------------------------------------------------------------------------------------


def ending(last: int, **options: Any) -> Rule:
    return Rule(max_steps=last, **{"aggregate": 1, "staleness": None, **options})


def test_who_makes_the_last_step_is_told_to_stop() -> None:
    bench = Bench(ending(2), workers=(0,))
    bench.pull(0)
    assert told(bench.push(0, 1)) == [("push 0.1", applied(1))]
    assert told(bench.push(0, 2)) == [("push 0.2", applied(2, stop=True))]
    assert told(bench.pull(0)) == [("pull 0", PullReply(2, True))]


def test_an_update_too_many_is_not_let_begin() -> None:
    bench = Bench(ending(2))
    assert told(bench.pull(0)) == [("pull 0", PullReply(0, False))]
    assert told(bench.pull(1)) == [("pull 1", PullReply(0, False))]
    assert bench.push(0, 1) == [], "worker:1 makes the last step, unless it is lost"
    out = bench.push(1, 1, pulled=0)
    assert sorted(told(out), key=str) == [
        ("push 0.1", applied(1, at=2, stop=True)),
        ("push 1.1", applied(2, staleness=1, stop=True)),
    ]


def test_a_lost_update_is_made_by_another_worker() -> None:
    bench = Bench(ending(2))
    bench.pull(0)
    bench.pull(1)
    bench.push(0, 1)
    assert told(bench.view(0)) == [("push 0.1", applied(1))]
    assert told(bench.push(0, 2)) == [("push 0.2", applied(2, stop=True))]


def test_after_the_end_an_update_is_stale() -> None:
    bench = Bench(ending(1))
    bench.push(0)
    assert told(bench.push(1, 1)) == [("push 1.1", PushReply(Stale(1), 1, 0, True))]
    assert bench.value == 99.0


def test_rounds_end_with_the_last_one() -> None:
    bench = Bench(ending(1, aggregate=0, staleness=0))
    bench.push(0)
    assert [m for _, m in told(bench.push(1))] == [applied(1, stop=True)] * 2


def test_only_server_0_says_when_it_is_over() -> None:
    bench = Bench(ending(1), server=1, servers=2)
    assert told(bench.push(0)) == [("ps:0", Held(0, ((0, 1, 1),)))]
    decided = Decided(0, (Apply(1, ((0, 1, 1),)),), 1)
    assert told(bench.hear(0, decided)) == [("push 0.1", applied(1))]
    assert told(bench.pull(0)) == [("pull 0", PullReply(1, False))]


def test_a_stop_lets_in_what_is_under_way() -> None:
    bench = Bench()
    bench.pull(0)
    bench.pull(1)
    assert told(bench.stop()) == [("stop", Stopping(2))]
    bench.push(0, 1)
    out = bench.push(1, 1)
    assert bench.shard.state.step == 2
    assert all(message.stop for _, message in told(out) if isinstance(message, PushReply))


def test_a_stop_before_anybody_has_come_is_not_forgotten() -> None:
    bench = Bench(loaded=False)
    assert told(bench.stop()) == [("stop", Stopping(0))]
    bench.attach()
    bench.load()
    assert told(bench.pull(0)) == [("pull 0", PullReply(0, True))]


def test_a_drain_waits_until_nobody_trains() -> None:
    bench = Bench(ending(1))
    assert bench.drain() == []
    bench.retire(0)
    assert told(bench.view(0, 1)) == []
    assert told(bench.retire(1)) == [("retire 1", Done()), ("drain", Stopping(0))]
    assert told(bench.drain()) == [("drain", Stopping(0))]


def test_who_retires_gives_back_what_it_holds_and_what_it_would_have_been_dealt() -> None:
    bench = Bench(Rule(aggregate=0, staleness=0))
    assert bench.lease(0) == (Span("d", 0, 4),)
    assert bench.lease(1) == (Span("d", 4, 8),)
    bench.lease(0)
    bench.retire(1)
    others = bench.lease(0, count=3, until=20)
    assert others == (Span("d", 4, 8), Span("d", 12, 16), Span("d", 16, 20))


def test_what_was_left_out_is_finished_and_in_no_step() -> None:
    bench = Bench(workers=(0,))
    assert bench.lease(0) == (Span("d", 0, 4),)
    assert not bench.leased(0, count=0, until=4).finished
    assert bench.leased(0, count=0, until=4, left_out=((0, 4),)).finished
    assert bench.leader.examples.consumed() == (Span("d", 0, 4),)
    assert bench.shard.state.step == 0
    request = Lease(1, "d", 100, 4, 1, left_out=((0, 400),))
    ((_, answer),) = told(bench.shard.request(0.0, "lease", Participant(0, 1), request))
    assert isinstance(answer, Refused) and "were not dealt" in answer.reason


def test_a_worker_without_examples_hears_that_a_round_waits_for_it() -> None:
    bench = Bench(Rule(aggregate=0, staleness=0))
    assert not bench.leased(1, count=0).awaited
    bench.push(0)
    assert bench.leased(1, count=0).awaited
    assert not bench.leased(0, count=0).awaited
    bench.push(1, weight=0.0)
    assert not bench.leased(1, count=0).awaited


def test_an_update_without_examples_is_no_step_where_each_is_applied_by_itself() -> None:
    bench = Bench(Rule(staleness=1))
    assert told(bench.push(0, weight=0.0, steps=0)) == [("push 0.1", applied(0))]
    assert bench.shard.state.table.clocks[0, 1] == 1
    (reply,) = [r for _, r in told(bench.push(1, steps=0))]
    assert isinstance(reply, PushReply) and "may be of 1 to 1" in reply.verdict.reason  # type: ignore[union-attr]
