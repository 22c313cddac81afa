"""To whom each answer of a shard goes, what exactly it says, and what is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ps.bench import ASYNC, PARAMETER, SGD, SYNC, Bench, applied, told, view
from trireme.ps.flat import PartBuffer
from trireme.ps.layout import Layout
from trireme.ps.leader.decisions import Apply, Decided, Held
from trireme.ps.messages import (
    Attached,
    Collect,
    Collected,
    Done,
    FencedVerdict,
    GroupSpec,
    Lease,
    Leased,
    OptimizerSpec,
    PullReply,
    PushReply,
    Refused,
    RejectedVerdict,
    Retire,
    Share,
    Span,
    Stopping,
    Waiting,
)
from trireme.ps.rule import Rule
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.shard import NOTICE_SECONDS, Shard
from trireme.ps.snapshot_messages import TakeSnapshot
from trireme.wire.message import Message

BOUND = Rule(aggregate=1, staleness=2)


def rejected(reason: str, *, step: int = 0) -> PushReply:
    return PushReply(RejectedVerdict(reason), step, 0, False)


def gradients(bench: Bench, value: float = 1.0) -> PartBuffer:
    made = PartBuffer(bench.layout, bench.shard.number)
    for vector in made.vectors:
        vector.fill_(value)
    return made


def test_a_shard_begins_with_nothing() -> None:
    shard = Shard(3)
    state = shard.state
    assert (shard.number, state.step, state.loaded, state.layout) == (3, 0, False, None)
    assert shard.state.rule == Rule()
    assert (shard.waits(0.0), shard.lags(), shard.tick(0.0)) == ((), {}, [])
    assert shard.state.counters == {}


# Refusals --------------------------------------------------------------------------------------


def test_who_shows_something_else_is_answered_where_it_asked() -> None:
    bench = Bench()
    other = Layout.of([PARAMETER], servers=2).spec
    for changed, code in (
        ({"layout": other}, "mismatch"),
        ({"rule": SYNC}, "mismatch"),
        ({"incarnation": 2}, "fenced"),
    ):
        ((route, refused),) = told(bench.attach(1, **changed))
        assert route == "attach 1"
        assert isinstance(refused, Refused) and (refused.code, refused.view) == (code, 1)
    fresh = Bench(loaded=False)
    unknown, invalid = (OptimizerSpec("Lion", ()), OptimizerSpec("SGD", (GroupSpec({"lr": -1.0}),)))
    for optimizer, code in ((unknown, "optimizer"), (invalid, "rejected")):
        ((route, refused),) = told(fresh.attach(0, optimizer=optimizer))
        assert route == "attach 0"
        assert isinstance(refused, Refused) and refused.code == code


def test_values_that_cannot_be_loaded_are_refused_where_they_came_from() -> None:
    bench = Bench(loaded=False)
    nothing = Refused(
        "rejected", "nothing was attached yet, so there is nothing to load values into", 1
    )
    assert told(bench.load(1)) == [("load 1", nothing)]
    bench.attach()
    ((route, refused),) = told(bench.load(1, count=8))
    assert route == "load 1"
    assert isinstance(refused, Refused) and refused.code == "rejected"
    assert not bench.shard.state.loaded
    bench.load(step=7)
    assert told(bench.attach(1)) == [("attach 1", Attached(True, 7, 1))]


def test_a_push_that_makes_no_sense_is_told_why() -> None:
    bench = Bench()
    nobody = rejected("push 2 of worker:0 came after push 0: the ones between are missing")
    assert told(bench.push(0, 2)) == [("push 0.2", nobody)]
    for weight in (-1.0, float("inf"), float("nan")):
        ((_, reply),) = told(bench.push(weight=weight))
        assert reply == rejected(f"a push weighs {weight}: it must be finite and 0 or more")
    for steps in (0, 2):
        ((_, reply),) = told(bench.push(steps=steps))
        assert reply == rejected(f"a push is of {steps} steps, and may be of 1 to 1")
    for absent in ((-1,), (1,), (0, 0)):
        ((_, reply),) = told(bench.push(absent=absent))
        assert reply == rejected(
            "a push names absent parameters that are not, ascending, among the 1"
        )
    assert bench.counters == {"rejected": 9.0}
    assert bench.value == 100.0
    rounds = Bench(SYNC)
    ((_, reply),) = told(rounds.push(pulled=1))
    assert reply == rejected(
        "a push for step 1, and ps:0 is at 0: pull the values of one step from all servers"
    )
    early = Bench(loaded=False)
    early.attach()
    assert told(early.push()) == [
        ("push 0.1", rejected("a push came before the values were loaded"))
    ]


def test_what_weighs_nothing_and_is_of_the_most_steps_makes_sense() -> None:
    bench = Bench(Rule(every=3))
    assert told(bench.push(0, 1, weight=0.0, steps=3)) == [("push 0.1", applied(3))]
    assert told(bench.push(0, 2, steps=1)) == [("push 0.2", applied(4))]


def test_an_answer_that_the_worker_said_it_has_is_not_given_twice() -> None:
    bench = Bench()
    bench.push(0, 1)
    bench.push(0, 2)
    reason = "push 1 was decided, and the worker said it knew how"
    assert told(bench.push(0, 1)) == [("push 0.1", rejected(reason, step=2))]
    assert bench.counters == {"applied": 2.0, "duplicate": 1.0, "staleness": 0.0}


def test_a_lease_is_refused_where_it_was_asked_for() -> None:
    bench = Bench()
    bench.lease(0)
    for incarnation, lease, code in (
        (1, Lease(1, "d", 7, 4, 1), "rejected"),
        (2, Lease(1, "d", 100, 4, 1), "fenced"),
        (1, Lease(2, "d", 100, 4, 1), "fenced"),
    ):
        who = Participant(1, incarnation)
        ((route, refused),) = told(bench.shard.request(bench.now, "here", who, lease))
        assert route == "here"
        assert isinstance(refused, Refused) and (refused.code, refused.view) == (code, 1)
    lease = Lease(1, "d", 100, 4, 1)
    ((route, leased),) = told(bench.shard.request(bench.now, "here", Participant(1, 1), lease))
    assert (route, leased) == ("here", Leased((Span("d", 4, 8),)))


def test_examples_that_are_in_the_values_are_held_by_nobody() -> None:
    bench = Bench()
    (mine,), (yours,) = bench.lease(0), bench.lease(1)
    bench.push(0, 1, examples=(mine,))
    assert bench.leader.examples.consumed() == (mine,)
    held = bench.leader.examples._ledgers["d"]._held
    assert list(held[1].within(0, 100)) == [(yours.start, yours.stop)]
    assert not list(held[0].within(0, 100))


# Who is out ------------------------------------------------------------------------------------


def test_who_was_started_anew_hears_which_start_has_replaced_it() -> None:
    bench = Bench(SYNC)
    bench.push(0)
    out = bench.view((0, 2), 1)
    fence = FencedVerdict(2, "worker:0 was started anew: 2 has replaced 1")
    assert told(out) == [("push 0.1", PushReply(fence, 0, 0, False))]
    assert bench.counters == {"fenced": 1.0}


def test_who_is_out_with_a_withheld_answer_is_counted_as_fenced() -> None:
    bench = Bench(BOUND)
    for sequence in (1, 2, 3):
        bench.push(0, sequence)
    bench.view(1)
    assert bench.counters["fenced"] == 1.0
    assert bench.shard.waits(bench.now) == ()


def test_pulls_before_there_are_values_are_sent_back_with_a_new_view() -> None:
    bench = Bench(loaded=False)
    bench.attach()
    bench.pull(0)
    bench.pull(1)
    changed = Refused("fenced", "the view has changed", 2)
    assert told(bench.view(0, 1)) == [("pull 0", changed), ("pull 1", changed)]
    assert [route for route, _ in told(bench.load())] == ["load 0"], "nobody else waits"


def test_only_who_is_out_is_sent_back_from_a_pull_for_a_later_step() -> None:
    bench = Bench(Rule(1, staleness=0))
    bench.pull(0, at_least=1)
    bench.pull(1, at_least=1)
    assert told(bench.view(1)) == [("pull 0", Refused("fenced", "the view has changed", 2))]
    out = told(bench.push(1))
    assert [route for route, _ in out] == ["push 1.1", "pull 1"]
    assert isinstance(out[1][1], PullReply) and out[1][1].step == 1


def test_who_retires_is_answered_and_only_its_own_start_counts() -> None:
    bench = Bench(SYNC)
    bench.push(1)
    other = bench.shard.request(bench.now, "r", Participant(0, 2), Retire())
    assert told(other) == [("r", Done())]
    assert bench.shard.lags() == {0: 0, 1: 0}, "it was another start of it"
    assert [route for route, _ in told(bench.retire(0))] == ["retire 0", "push 1.1"]
    assert bench.shard.lags() == {1: 0}


# Rounds and their end --------------------------------------------------------------------------


def test_what_servers_tell_each_other_is_heard_by_whom_it_is_for() -> None:
    leader, follower = Bench(SYNC, servers=2), Bench(SYNC, server=1, servers=2)
    close, ready = Decided(0, (), 1), Held(0, ((0, 1, 1),))
    assert leader.shard.heard(leader.now, 0, close) == []
    assert follower.shard.heard(follower.now, 1, ready) == []
    for bench in (leader, follower):
        bench.push(0)
        bench.push(1)
        assert bench.shard.state.step == 0
    both = ((0, 1, 1), (1, 1, 1))
    leader.hear(1, Held(0, both))
    follower.hear(0, Decided(0, (Apply(1, both),), 1))
    assert (leader.shard.state.step, follower.shard.state.step) == (1, 1)
    assert leader.counters["rounds"] == follower.counters["rounds"] == 1.0


def test_what_servers_tell_each_other_of_pushes_is_heard_by_whom_it_is_for() -> None:
    leader, follower = Bench(ASYNC, servers=2), Bench(ASYNC, server=1, servers=2)
    staged, committed = Held(0, ((0, 1, 1),)), Decided(0, (), 1)
    for bench in (leader, follower, Bench(SYNC), Bench(loaded=False)):
        if bench is not leader:
            assert bench.shard.heard(bench.now, 1, staged) == []
        if bench is not follower:
            assert bench.shard.heard(bench.now, 0, committed) == []
        assert bench.shard.state.step == 0


def test_who_is_out_is_not_answered_again_when_its_push_is_committed() -> None:
    bench = Bench(ASYNC, server=1, servers=2)
    bench.push(1)
    ((route, _),) = told(bench.view(0))[:1]
    assert route == "push 1.1"
    out = told(bench.hear(0, Decided(0, (Apply(1, ((1, 1, 1),)),), 1)))
    assert [route for route, _ in out if str(route).startswith("push")] == []
    assert bench.shard.state.step == 1
    assert bench.shard.waits(bench.now) == ()


def test_who_waits_at_the_end_is_answered_where_it_asked() -> None:
    bench = Bench(SYNC)
    assert told(bench.stop()) == [("stop", Stopping(0))]
    late = Bench(SYNC)
    assert told(late.drain()) == []
    late.retire(0)
    assert told(late.retire(1)) == [("retire 1", Done()), ("drain", Stopping(0))]
    assert told(late.drain()) == [("drain", Stopping(0))], "nobody is waited for twice"


@pytest.mark.parametrize(
    ("rule", "servers", "waits"),
    [
        (Rule(max_steps=3), 1, True),
        (Rule(max_steps=3), 2, True),
        (Rule(max_steps=3, staleness=4), 1, True),
        (Rule(max_steps=3, staleness=4), 2, True),
        (Rule(max_steps=3, aggregate=0, staleness=0), 1, False),
    ],
)
def test_who_would_make_an_update_too_many_waits_where_that_is_possible(
    rule: Rule, servers: int, waits: bool
) -> None:
    bench = Bench(rule, workers=(0, 1, 2, 3), servers=servers)
    for worker in range(3):
        assert [route for route, _ in told(bench.pull(worker))] == [f"pull {worker}"]
    out = told(bench.pull(3))
    assert (out == []) == waits
    if not waits:
        ((_, reply),) = out
        assert isinstance(reply, PullReply)
        assert reply.stop == (not rule.synchronous)


# Copies ----------------------------------------------------------------------------------------


def test_a_copy_for_a_worker_that_is_out_is_answered_where_it_was_asked_for() -> None:
    bench = Bench(servers=2)
    assert bench.snapshot(worker=1) == []
    ((route, refused),) = told(bench.view(0))[:1]
    assert route == "snapshot 7"
    assert refused == Refused("fenced", "the view has changed", 2)


def test_there_is_no_copy_before_values_are_loaded() -> None:
    empty = Bench(loaded=False)
    none = Refused("rejected", "no values are loaded", 1)
    assert told(empty.snapshot()) == [("snapshot 7", none)]


def test_a_copy_is_asked_for_again_where_the_connection_was_lost() -> None:
    bench = Bench(servers=2)
    assert bench.snapshot() == []
    who = Participant(0, 1)
    assert bench.shard.request(bench.now, "again", who, TakeSnapshot(7, False)) == []
    out = bench.hear(1, Held(0, (), ((0, 7),)))
    assert [route for route, _ in told(out)] == ["ps:1", "again"]


def test_only_shard_0_is_asked_what_the_leader_keeps() -> None:
    bench, who = Bench(server=1, servers=2), Participant(0, 1)
    answers = [
        *bench.stop(),
        *bench.shard.request(bench.now, "lease", who, Lease(1, "d", 100, 4, 1)),
        *bench.shard.request(bench.now, "share", who, Share("t"), torch.zeros(1)),
    ]
    for _, answer in told(answers):
        assert isinstance(answer, Refused) and "only shard 0" in answer.reason


# Notices ---------------------------------------------------------------------------------------


def test_notices_come_every_so_often_and_say_since_when() -> None:
    bench = Bench(SYNC)
    bench.push(0)
    began = bench.now
    first = bench.shard.tick(began)
    assert told(first) == [("push 0.1", Waiting("round 1", ("worker:1",), 0.0))]
    assert bench.shard.tick(began + NOTICE_SECONDS - 0.1) == []
    again = bench.shard.tick(began + NOTICE_SECONDS)
    assert told(again) == [("push 0.1", Waiting("round 1", ("worker:1",), NOTICE_SECONDS))]
    (wait,) = bench.shard.waits(began + 2.0)
    assert (wait.worker, wait.notice.seconds) == (0, 2.0)


def test_who_waits_longest_comes_first() -> None:
    bench = Bench(Rule(0, staleness=0), workers=(0, 1, 2))
    bench.push(1)
    bench.now += 3.0
    bench.push(0)
    assert [wait.worker for wait in bench.shard.waits(bench.now)] == [1, 0]


def test_who_waits_for_first_values_hears_of_the_chief() -> None:
    bench = Bench(loaded=False)
    bench.attach()
    bench.pull(1)
    notice = Waiting("its first values", ("worker:0",), 2.0)
    assert told(bench.shard.tick(bench.now + 2.0)) == [("pull 1", notice)]
    alone = Shard(0)
    alone.view(0.0, view(1))
    assert alone.waits(0.0) == ()


def test_who_waits_at_the_end_hears_for_whose_updates() -> None:
    bench = Bench(Rule(max_steps=2))
    bench.pull(0)
    bench.pull(1)
    out = told(bench.push(0, 1))
    assert out == [], "the other's update may be the last one"
    (wait,) = bench.shard.waits(bench.now + 1.0)
    assert wait.notice == Waiting("the last updates", ("worker:1",), 1.0)
    assert [route for route, _ in told(bench.push(1, 1))] == ["push 0.1", "push 1.1"]


def test_lags_are_behind_the_furthest_of_those_who_train() -> None:
    bench = Bench(workers=(0, 1, 2))
    for sequence in (1, 2, 3):
        bench.push(0, sequence)
    bench.push(1)
    assert bench.shard.lags() == {0: 0, 1: 2, 2: 3}
    bench.retire(0)
    assert bench.shard.lags() == {1: 0, 2: 1}


# What workers tell each other ------------------------------------------------------------------


def test_what_is_left_is_the_newest_of_each_worker_of_now() -> None:
    bench = Bench()

    def share(worker: int, incarnation: int, text: bytes, topic: str = "t") -> Any:
        payload = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        who = Participant(worker, incarnation)
        return told(bench.shard.request(bench.now, "share", who, Share(topic), payload))

    def collect(topic: str = "t") -> tuple[Message, list[bytes]]:
        (reply,) = bench.shard.request(bench.now, "collect", Participant(0, 0), Collect(topic))
        return reply.message, [bytes(t.numpy()) for t in reply.payload]  # type: ignore[union-attr]

    assert share(1, 1, b"one") == [("share", Done())]
    assert share(0, 1, b"zero!") == [("share", Done())]
    assert share(0, 2, b"of another start") == [("share", Done())]
    assert share(7, 1, b"of nobody") == [("share", Done())]
    assert collect() == (Collected((0, 1), (5, 3)), [b"zero!", b"one"])
    share(1, 1, b"newer")
    assert collect() == (Collected((0, 1), (5, 5)), [b"zero!", b"newer"])
    assert collect("other") == (Collected((), ()), [])


def test_a_topic_is_forgotten_once_somebody_shares_nothing_under_it() -> None:
    """Of a trace all workers share megabytes, which nobody needs once it is written."""
    bench = Bench()

    def share(worker: int, *data: int) -> None:
        who, payload = Participant(worker, 1), torch.tensor(data, dtype=torch.uint8)
        assert told(bench.shard.request(bench.now, "s", who, Share("t"), payload)) == [
            ("s", Done())
        ]

    share(0, 1, 2)
    share(1, 3)
    share(0)
    assert not bench.leader.topics
    share(0)
    assert told(bench.shard.request(bench.now, "c", Participant(0, 0), Collect("t"))) == [
        ("c", Collected((), ()))
    ]


def test_only_so_many_topics_are_kept_and_the_known_ones_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trireme.ps.shard.shard._MOST_TOPICS", 1)
    bench = Bench()
    for topic, answer in (
        ("t", Done()),
        ("u", Refused("rejected", "workers share 1 topics", 1)),
        ("t", Done()),
    ):
        out = bench.shard.request(
            bench.now, "share", Participant(0, 1), Share(topic), torch.ones(1)
        )
        assert told(out) == [("share", answer)]


def test_rules_and_optimizers_that_differ_are_shown() -> None:
    bench = Bench(ASYNC)
    ((_, refused),) = told(bench.attach(1, rule=SYNC))
    assert isinstance(refused, Refused)
    assert refused.reason == (
        "the strategies differ: aggregate 1 at worker:0, aggregate 0, staleness 0 at worker:1; "
        "start every task with the same program and options"
    )
    ((_, refused),) = told(bench.attach(1, optimizer=OptimizerSpec("Adam", SGD.groups)))
    assert isinstance(refused, Refused)
    assert refused.reason.startswith("the optimizers differ: SGD at worker:0, Adam at worker:1")
