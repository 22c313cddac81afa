"""The shard: each event and each refusal, as events in and instructions out."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch

from tests.ps.bench import PARAMETER, SGD, SYNC, Bench, applied, payload_of, snapshot_of, told, view
from trireme.ps.layout import Layout
from trireme.ps.messages import (
    Applied,
    Attached,
    Collect,
    Collected,
    Done,
    Duplicate,
    FencedVerdict,
    GroupSpec,
    Lease,
    OptimizerSpec,
    PullReply,
    PushReply,
    Refused,
    RejectedVerdict,
    ServerStatus,
    Share,
    Span,
    Status,
    Verdict,
    Waiting,
    WorkerProgress,
)
from trireme.ps.rule import Rule
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.shard import NOTICE_SECONDS
from trireme.ps.snapshot_messages import Loaded


def fenced(number: int, reason: str, *, step: int = 0) -> PushReply:
    return PushReply(FencedVerdict(number, reason), step, 0, False)


def verdict_of(instructions: Any) -> Verdict:
    ((_, reply),) = told(instructions)
    assert isinstance(reply, PushReply)
    return reply.verdict


# Membership ------------------------------------------------------------------------------------


OUTSIDE = [
    ({"worker": 7}, "worker:7 is not in view 2"),
    ({"incarnation": 2}, "worker:0 was started anew: 1 has replaced 2"),
    ({"view": 1}, "view 1 is not the present one, 2"),
    ({"view": 3}, "view 3 is not the present one, 2"),
]


@pytest.mark.parametrize(("changed", "reason"), OUTSIDE)
@pytest.mark.parametrize("request_name", ["attach", "load", "pull"])
def test_who_is_outside_of_the_view_is_fenced_off(
    request_name: str, changed: dict[str, int], reason: str
) -> None:
    bench = Bench()
    bench.view(0)
    out = getattr(bench, request_name)(**{"worker": 0, **changed})
    assert [message for _, message in told(out)] == [Refused("fenced", reason, 2)]


@pytest.mark.parametrize(("changed", "reason"), OUTSIDE)
def test_a_push_from_outside_is_fenced_off_and_changes_nothing(
    changed: dict[str, int], reason: str
) -> None:
    bench = Bench()
    bench.view(0)
    assert verdict_of(bench.push(**changed)) == FencedVerdict(2, reason)  # type: ignore[arg-type]
    assert bench.value == 100.0
    assert bench.counters["fenced"] == 1


def test_an_older_view_changes_nothing() -> None:
    bench = Bench()
    bench.view(0)
    assert bench.shard.view(bench.now, view(1, 0, 1, 2)) == []
    assert bench.shard.view(bench.now, view(2, 0, 1, 2)) == []
    assert isinstance(verdict_of(bench.push(2)), FencedVerdict)


def test_a_push_under_an_older_view_goes_on_when_it_is_repeated_under_the_new_one() -> None:
    bench = Bench(SYNC)
    bench.push(0)
    bench.view(0, 1, 2)
    assert isinstance(verdict_of(bench.push(1, view=1)), FencedVerdict)
    assert bench.push(1) == []
    assert bench.push(0, route="again") == [], "it is in the round already"
    routes = [route for route, _ in told(bench.push(2))]
    assert routes == ["again", "push 1.1", "push 2.1"]


def test_a_new_start_counts_from_one() -> None:
    bench = Bench()
    bench.push(0, 1)
    bench.push(0, 2)
    bench.view((0, 2), 1)
    assert verdict_of(bench.push(0, 3)) == FencedVerdict(
        2, "worker:0 was started anew: 2 has replaced 1"
    )
    assert verdict_of(bench.push(0, 1, incarnation=2)) == Applied(3)
    assert bench.table[0] == WorkerProgress(0, 2, 1, 3, 0)


# Attach and load -------------------------------------------------------------------------------


def test_the_first_worker_creates_the_shard_and_the_others_must_agree() -> None:
    bench = Bench(loaded=False)
    assert told(bench.attach(0)) == [("attach 0", Attached(False, 0, 1))]
    bench.load(0)
    bench.push(0)
    assert told(bench.attach(1)) == [("attach 1", Attached(True, 1, 1))]


@pytest.mark.parametrize(
    ("changed", "code", "said"),
    [
        (
            {"layout": Layout.of([msgspec.structs.replace(PARAMETER, shape=(3,))], servers=1).spec},
            "mismatch",
            "parameter 0 is 'w' (16 float32, group 0) at worker:0 and 'w' (3 float32",
        ),
        (
            {"rule": Rule(aggregate=1, staleness=3)},
            "mismatch",
            "the strategies differ: aggregate 1, codec none at worker:0, staleness 3 at worker:1",
        ),
        (
            {"optimizer": OptimizerSpec("Adam", SGD.groups)},
            "mismatch",
            "the optimizers differ: SGD at worker:0, Adam at worker:1",
        ),
        (
            {"layout": Layout.of([], servers=1).spec},
            "mismatch",
            "at worker:0 and missing at worker:1",
        ),
    ],
    ids=["model", "rule", "optimizer", "nothing"],
)
def test_who_trains_something_else_is_told_the_difference(
    changed: dict[str, Any], code: str, said: str
) -> None:
    bench = Bench()
    ((_, refused),) = told(bench.attach(1, **changed))
    assert isinstance(refused, Refused)
    assert refused.code == code
    assert said in refused.reason


@pytest.mark.parametrize(
    ("changed", "code", "said"),
    [
        ({"optimizer": OptimizerSpec("Lion", ())}, "optimizer", "no optimizer 'Lion'"),
        ({"rule": Rule(aggregate=-1, staleness=0)}, "rejected", "aggregate is -1"),
        (
            {"optimizer": OptimizerSpec("SGD", (GroupSpec({"lr": -1.0}),))},
            "rejected",
            "Invalid learning rate",
        ),
    ],
    ids=["unknown optimizer", "rule", "learning rate"],
)
def test_what_cannot_be_trained_creates_nothing(
    changed: dict[str, Any], code: str, said: str
) -> None:
    bench = Bench(loaded=False)
    ((_, refused),) = told(bench.attach(0, **changed))
    assert isinstance(refused, Refused)
    assert refused.code == code
    assert said in refused.reason
    assert told(bench.attach(1)) == [("attach 1", Attached(False, 0, 1))]


def test_values_are_loaded_once() -> None:
    bench = Bench(loaded=False)
    ((_, refused),) = told(bench.load())
    assert isinstance(refused, Refused)
    assert refused.code == "rejected"
    assert "nothing was attached yet" in refused.reason
    bench.attach()
    assert told(bench.load(value=3.0, step=40)) == [("load 0", Loaded(40))]
    assert told(bench.load(1, value=9.0, step=50)) == [("load 1", Loaded(40))]
    assert bench.value == 3.0


def test_the_chief_of_a_later_view_replaces_what_one_that_did_not_go_on_has_loaded() -> None:
    bench = Bench(loaded=False)
    bench.attach()
    bench.load(value=3.0, step=40)
    bench.view(1)
    assert told(bench.load(1, value=9.0, step=50)) == [("load 1", Loaded(50))]
    assert bench.value == 9.0


def test_values_that_do_not_fit_are_rejected_and_others_may_follow() -> None:
    bench = Bench(loaded=False)
    bench.attach()
    ((_, refused),) = told(bench.load(count=8))
    assert isinstance(refused, Refused)
    assert refused.code == "rejected"
    assert told(bench.load()) == [("load 0", Loaded(0))]


def test_examples_that_end_before_they_begin_are_rejected_with_their_load() -> None:
    bench = Bench(loaded=False)
    bench.attach()
    out = bench.load(consumed=(Span("d", 4, 2),))
    assert told(out) == [("load 0", Refused("rejected", "examples end before they begin", 1))]
    assert told(bench.load()) == [("load 0", Loaded(0))], "others may follow"


def test_a_resumed_job_counts_its_pushes_anew() -> None:
    bench = Bench(loaded=False)
    bench.attach()
    rows = (WorkerProgress(0, 3, 41, 30, 11), WorkerProgress(5, 1, 9, 9, 0))
    bench.load(step=39, workers=rows)
    assert verdict_of(bench.push(0)) == Applied(40)
    bench.view(0, 1, 5)
    assert verdict_of(bench.push(5)) == Applied(41)
    assert bench.table == (
        WorkerProgress(0, 1, 1, 31, 11),
        WorkerProgress(1, 1, 0, 0, 0),
        WorkerProgress(5, 1, 1, 10, 0),
    )


# Pull ------------------------------------------------------------------------------------------


def test_a_pull_is_answered_when_values_are_loaded() -> None:
    bench = Bench(loaded=False)
    bench.attach()
    assert bench.pull(0) == []
    assert bench.pull(1) == []
    out = bench.load(value=5.0, step=3)
    assert told(out) == [
        ("load 0", Loaded(3)),
        ("pull 0", PullReply(3, False)),
        ("pull 1", PullReply(3, False)),
    ]
    assert payload_of(out, "pull 1") == [5.0]


def test_who_waits_for_first_values_looks_again_who_is_chief() -> None:
    bench = Bench(loaded=False)
    bench.attach()
    bench.pull(1)
    assert told(bench.view(1)) == [("pull 1", Refused("fenced", "the view has changed", 2))]
    bench.attach(1)
    assert told(bench.load(1)) == [("load 1", Loaded(0))]


def test_a_pull_for_a_later_step_waits_for_it() -> None:
    bench = Bench(SYNC, workers=(0, 1, 2))
    assert bench.pull(2, at_least=1, train=False) == []
    bench.push(0)
    bench.push(1)
    out = bench.push(2)
    assert told(out)[-1] == ("pull 2", PullReply(1, False))
    assert payload_of(out, "pull 2") == [99.0]


def test_who_waits_for_a_later_step_and_is_lost_is_told() -> None:
    bench = Bench(SYNC)
    bench.pull(1, at_least=1)
    assert told(bench.view(0)) == [("pull 1", Refused("fenced", "the view has changed", 2))]


# Asynchronous pushes ---------------------------------------------------------------------------


def test_an_update_is_applied_and_answered_with_the_new_values() -> None:
    bench = Bench()
    out = bench.push(0, 1, 3.0)
    assert told(out) == [("push 0.1", applied(1))]
    assert payload_of(out, "push 0.1") == [97.0]
    assert told(bench.push(1, 1, 2.0, pulled=0)) == [("push 1.1", applied(2, staleness=1))]
    assert bench.value == 95.0
    assert bench.counters == {"applied": 2.0, "staleness": 1.0}


def test_a_repeat_gets_the_first_verdict_and_the_present_values() -> None:
    bench = Bench()
    bench.push(0, 1, 3.0)
    bench.push(1, 1, 2.0)
    out = bench.push(0, 1, 3.0, pulled=0, route="again")
    assert told(out) == [("again", PushReply(Duplicate(Applied(1)), 2, 0, False))]
    assert payload_of(out, "again") == [95.0]
    bench.push(0, 1, 3.0, pulled=0)
    assert bench.counters["duplicate"] == 2
    assert bench.shard.state.step == 2


def test_what_a_worker_knows_is_forgotten() -> None:
    bench = Bench()
    bench.push(0, 1)
    bench.push(0, 2, acknowledged=1)
    verdict = verdict_of(bench.push(0, 1))
    assert isinstance(verdict, RejectedVerdict)
    assert "push 1 was decided, and the worker said it knew how" in verdict.reason
    assert verdict_of(bench.push(0, 2)) == Duplicate(Applied(2))


def test_values_are_sent_only_if_they_are_asked_for() -> None:
    bench = Bench()
    assert payload_of(bench.push(pull=False), "push 0.1") == []


def test_an_update_that_weighs_nothing_makes_a_step_and_changes_nothing() -> None:
    bench = Bench()
    assert verdict_of(bench.push(weight=0.0)) == Applied(1)
    assert bench.value == 100.0


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"sequence": 3}, "push 3 of worker:0 came after push 0: the ones between are missing"),
        ({"weight": math.nan}, "a push weighs nan"),
        ({"weight": math.inf}, "a push weighs inf"),
        ({"weight": -1.0}, "a push weighs -1.0"),
        ({"examples": (Span("d", 4, 2),)}, "a push names the examples 4 to 2 of 'd'"),
        ({"hyper": ()}, "there are 1 parameter groups, and values for 0 came"),
        ({"hyper": (GroupSpec({"warmth": 1.0}),)}, "no hyper-parameter 'warmth'"),
    ],
)
def test_a_senseless_push_is_rejected_and_changes_nothing(
    changed: dict[str, Any], said: str
) -> None:
    bench = Bench()
    verdict = verdict_of(bench.push(**changed))
    assert isinstance(verdict, RejectedVerdict)
    assert said in verdict.reason
    assert bench.counters == {"rejected": 1.0}
    assert verdict_of(bench.push()) == Applied(1)


def test_a_push_before_there_are_values_is_rejected() -> None:
    bench = Bench(loaded=False)
    bench.attach()
    verdict = verdict_of(bench.push())
    assert isinstance(verdict, RejectedVerdict)
    assert "before the values were loaded" in verdict.reason


def test_a_push_of_a_step_to_come_is_rejected_in_rounds() -> None:
    bench = Bench(SYNC, server=1, servers=2)
    verdict = verdict_of(bench.push(pulled=1))
    assert isinstance(verdict, RejectedVerdict)
    assert "a push for step 1, and ps:1 is at 0" in verdict.reason


def test_hyper_parameters_come_with_a_push() -> None:
    bench = Bench()
    bench.push(0, 1, 1.0, hyper=(GroupSpec({"lr": 10.0}),))
    bench.push(1, 1, 1.0)
    assert bench.value == 80.0


# Bounded staleness -----------------------------------------------------------------------------


BOUND = Rule(aggregate=1, staleness=2)


def test_who_is_too_far_ahead_waits_for_the_slowest() -> None:
    bench = Bench(BOUND)
    assert told(bench.push(0, 1)) == [("push 0.1", applied(1))]
    assert told(bench.push(0, 2)) == [("push 0.2", applied(2))]
    assert bench.push(0, 3) == [], "applied, but not answered"
    assert bench.shard.state.step == 3
    assert told(bench.push(1, 1, pulled=0)) == [
        ("push 0.3", applied(3, at=4)),
        ("push 1.1", applied(4, staleness=3)),
    ]


def test_a_repeat_of_a_withheld_answer_only_changes_its_way() -> None:
    bench = Bench(BOUND)
    for sequence in (1, 2, 3):
        bench.push(0, sequence)
    assert bench.push(0, 3, route="new connection") == []
    out = bench.push(1, 1)
    assert ("new connection", applied(3, at=4)) in told(out)
    assert len(out) == 2
    assert bench.value == 96.0


@pytest.mark.parametrize("how", ["left", "retired"])
def test_nobody_waits_for_who_trains_no_more(how: str) -> None:
    bench = Bench(BOUND)
    for sequence in (1, 2, 3):
        bench.push(0, sequence)
    out = bench.view(0) if how == "left" else bench.retire(1)
    assert told(out)[-1] == ("push 0.3", applied(3))


def test_a_newcomer_begins_at_the_slowest() -> None:
    bench = Bench(BOUND)
    for sequence in range(1, 6):
        bench.push(0, sequence)
        bench.push(1, sequence)
    bench.view(0, 1, 2)
    assert told(bench.push(0, 6)) == [("push 0.6", applied(11))]
    assert told(bench.push(0, 7)) == [("push 0.7", applied(12))]
    assert bench.push(0, 8) == []


def test_a_newcomer_does_not_begin_at_one_who_has_retired() -> None:
    bench = Bench(BOUND)
    bench.retire(1)
    for sequence in range(1, 6):
        bench.push(0, sequence)
    bench.view(0, 1, 2)
    assert told(bench.push(0, 6)) == [("push 0.6", applied(6))]


def test_a_withheld_answer_of_a_lost_worker_is_a_fence() -> None:
    bench = Bench(BOUND)
    for sequence in (1, 2, 3):
        bench.push(0, sequence)
    assert told(bench.view(1)) == [("push 0.3", fenced(2, "worker:0 is not in view 2", step=3))]
    assert bench.value == 97.0, "it was applied and stays so"


# Examples --------------------------------------------------------------------------------------


def test_applied_examples_are_consumed_and_stale_ones_dealt_again() -> None:
    bench = Bench(Rule(aggregate=1, staleness=0))
    (mine,), (yours,) = bench.lease(0), bench.lease(1)
    bench.push(0, 1, examples=(mine,))
    bench.push(1, 1, pulled=0, examples=(yours,))
    assert bench.lease(0) == (yours,)
    assert snapshot_of(bench.snapshot())[0].consumed == (mine,)


def test_a_lease_that_is_repeated_gets_the_same_examples() -> None:
    bench = Bench()
    first = bench.lease(0, number=1)
    assert bench.lease(0, number=1) == first
    assert bench.lease(0, number=2) != first


def test_a_lost_worker_gives_its_examples_back() -> None:
    bench = Bench()
    held = bench.lease(1, count=2)
    bench.view(0, (1, 2))
    assert bench.lease(0, count=2) == held


def test_rounds_of_all_deal_interleaved() -> None:
    assert Bench(SYNC).lease(1) == (Span("d", 4, 8),)
    assert Bench(Rule(aggregate=1, staleness=0)).lease(1) == (Span("d", 0, 4),)


def test_a_lease_of_another_size_is_refused() -> None:
    bench = Bench()
    bench.lease(0)
    request = Lease(1, "d", 7, 4, 1)
    ((_, refused),) = told(bench.shard.request(bench.now, "lease", Participant(1, 1), request))
    assert isinstance(refused, Refused)
    assert refused.code == "rejected"
    assert "every worker must load the same data" in refused.reason


# Waiting ---------------------------------------------------------------------------------------


def test_who_waits_is_told_for_whom() -> None:
    bench = Bench(SYNC, workers=(0, 1, 2))
    bench.push(1)
    bench.shard.tick(bench.now)
    assert bench.shard.tick(bench.now + NOTICE_SECONDS - 0.1) == []
    out = bench.shard.tick(bench.now + NOTICE_SECONDS)
    names = ("worker:0", "worker:2")
    assert told(out) == [("push 1.1", Waiting("round 1", names, NOTICE_SECONDS))]


def test_who_waits_for_first_values_is_told_of_the_chief() -> None:
    bench = Bench(loaded=False)
    bench.attach()
    bench.pull(1)
    assert told(bench.shard.tick(bench.now + 9)) == [
        ("pull 1", Waiting("its first values", ("worker:0",), 9.0))
    ]


def test_who_is_ahead_is_told_of_the_slowest() -> None:
    bench = Bench(BOUND)
    for sequence in (1, 2, 3):
        bench.push(0, sequence)
    assert told(bench.shard.tick(bench.now + 9)) == [
        ("push 0.3", Waiting("staleness bound 2", ("worker:1",), 9.0))
    ]


def test_who_drains_is_told_who_trains() -> None:
    bench = Bench()
    bench.drain()
    bench.retire(0)
    assert told(bench.shard.tick(bench.now + 9)) == [
        ("drain", Waiting("the last updates", ("worker:1",), 9.0))
    ]


def test_who_drains_again_waits_once() -> None:
    """A chief does so whenever it has saved what the others have learned meanwhile."""
    bench = Bench()
    bench.retire(0)
    for number in range(500):
        bench.now = float(number)
        assert bench.drain(route=f"drain {number}") == []
    assert told(bench.shard.tick(bench.now + 9)) == [
        ("drain 499", Waiting("the last updates", ("worker:1",), 508.0))
    ]


def test_status_tells_how_things_are() -> None:
    bench = Bench()
    bench.push(0)
    ((route, status),) = told(bench.shard.request(bench.now, "status", Participant(0, 0), Status()))
    assert route == "status"
    assert status == ServerStatus(
        1,
        True,
        1,
        (WorkerProgress(0, 1, 1, 1, 0), WorkerProgress(1, 1, 0, 0, 0)),
        {"applied": 1.0, "staleness": 0.0},
    )


# What workers tell each other ------------------------------------------------------------------


def test_workers_leave_each_other_bytes() -> None:
    bench = Bench()

    def leave(worker: int, incarnation: int, *data: int) -> None:
        who, payload = Participant(worker, incarnation), torch.tensor(data, dtype=torch.uint8)
        out = bench.shard.request(bench.now, "s", who, Share("topic"), payload)
        assert told(out) == [("s", Done())]

    leave(1, 1, 5, 6)
    leave(0, 1, 7)
    leave(0, 2, 9)  # not a start of this view
    leave(1, 1, 8, 8, 8)
    out = bench.shard.request(bench.now, "c", Participant(0, 0), Collect("topic"))
    assert told(out) == [("c", Collected((0, 1), (1, 3)))]
    assert payload_of(out, "c") == [7, 8]
    assert told(bench.shard.request(bench.now, "c", Participant(0, 0), Collect("other"))) == [
        ("c", Collected((), ()))
    ]
