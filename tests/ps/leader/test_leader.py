"""The leader: which decisions it writes, when, and what it sends to other shards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
import torch

from trireme.cluster.view import ShardEntry, View
from trireme.ps.leader.decisions import (
    Apply,
    Cut,
    Decided,
    Decision,
    Divide,
    Held,
    Measure,
    Members,
    PushId,
    Stop,
)
from trireme.ps.leader.leader import Leader, clip_factor
from trireme.ps.rule import Rule

ASYNC = Rule(aggregate=1, staleness=None)
ALL = Rule(aggregate=0, staleness=0)
TWO = Rule(aggregate=2, staleness=0)
CLIP = Rule(aggregate=0, staleness=0, clip_norm=6.0)
A, B, C = (0, 1, 1), (1, 1, 1), (2, 1, 1)
LIVE = {0: 1, 1: 1, 2: 1}
MOVED = View(3, (), (), (ShardEntry(0, 1, 4), ShardEntry(1, 2, 1), ShardEntry(2, 3, 0)))
"""The primaries of the three shards are not at the servers of their numbers."""


def members(live: Mapping[int, int]) -> Members:
    return Members(5, tuple(sorted(live.items())))


class Deciding:
    """A leader, the pushes that shard 0 holds, and how far it is."""

    def __init__(self, rule: Rule = ASYNC, shards: int = 2, *held: PushId) -> None:
        self.leader = Leader()
        self.leader.begin(rule, shards, 0)
        self.leader.loaded = True
        self.step = 5
        self.live: Mapping[int, int] = LIVE
        self.snapshots: dict[int, int] = {}
        self.square = 0.0
        self.measured: list[Sequence[PushId]] = []
        for push in held:
            self.leader.hold(push, 1)

    def hear(self, shard: int, *pushes: PushId, **said: object) -> None:
        self.leader.hear(shard, Held(**{"known": 0, "pushes": pushes, **said}))  # type: ignore[arg-type]

    def decide(self) -> Decision | None:
        """Returns the next decision, but for `Members`, which comes before where they change."""
        decision = self.leader.decide(self.step, self.live, self.snapshots, self._measure)
        if isinstance(decision, Members):
            assert decision.workers == members(self.live).workers
            return self.decide()
        if isinstance(decision, Apply):
            self.step = decision.step
        return decision

    def _measure(self, pushes: Sequence[PushId]) -> float:
        self.measured.append(pushes)
        return self.square


# Pushes that are applied one by one --------------------------------------------------------------


def test_a_push_is_applied_once_every_shard_holds_it() -> None:
    job = Deciding(ASYNC, 3, A)
    assert job.leader.missing([A], MOVED) == ("ps:1", "ps:0")
    job.hear(1, A)
    assert (job.decide(), job.leader.missing([A], MOVED)) == (None, ("ps:0",))
    job.hear(2, A)
    assert job.decide() == Apply(6, (A,))
    assert job.decide() is None


def test_a_push_that_comes_last_to_shard_0_is_decided_at_once() -> None:
    job = Deciding()
    job.hear(1, A, B)
    job.leader.hold(A, 3)
    assert job.decide() == Apply(8, (A,))


def test_alone_it_asks_and_tells_nobody() -> None:
    job = Deciding(ASYNC, 1, B, A)
    assert job.leader.alone
    assert (job.decide(), job.decide(), job.decide()) == (Apply(6, (B,)), Apply(7, (A,)), None)
    assert job.leader.tell(1) == []


def test_what_another_shard_held_before_does_not_count_for_a_later_push() -> None:
    job = Deciding()
    job.hear(1, A)
    job.leader.hold((0, 1, 2), 1)
    assert job.decide() is None
    job.leader.hold((1, 2, 1), 1)
    job.hear(1, B)  # of the incarnation before
    assert job.decide() is None


def test_a_late_report_takes_nothing_back() -> None:
    job = Deciding()
    job.hear(1, (0, 1, 2), known=3)
    job.hear(1, (0, 1, 1), known=2)
    job.leader.hold((0, 1, 2), 1)
    assert job.decide() is not None


def test_a_push_is_decided_once_however_often_shards_report_it() -> None:
    job = Deciding(ASYNC, 2, A)
    job.hear(1, A)
    job.hear(1, A)
    assert job.decide() is not None
    job.hear(1, A)
    assert job.decide() is None


def test_each_shard_is_sent_all_that_it_has_not_said_it_knows() -> None:
    job = Deciding(ASYNC, 3, A, B)
    for shard in (1, 2):
        job.hear(shard, A, B)
    job.decide()
    first, second = (members(LIVE), Apply(6, (A,))), Apply(7, (B,))
    assert job.leader.tell(4) == [(1, Decided(0, first, 4)), (2, Decided(0, first, 4))]
    job.hear(2, known=2)
    job.decide()
    both = *first, second
    assert job.leader.tell(4) == [(1, Decided(0, both, 4)), (2, Decided(2, (second,), 4))]
    assert job.leader.tell(4) == []
    assert job.leader.tell(5) == [(1, Decided(0, both, 5)), (2, Decided(2, (second,), 5))]


def test_who_trains_comes_before_the_next_update_and_once() -> None:
    job = Deciding(ASYNC, 2, A)
    job.hear(1, A)
    job.live = {0: 1}
    job.decide()
    job.live = {0: 1, 1: 2}
    job.leader.hold((1, 2, 1), 1)
    job.hear(1, (1, 2, 1))
    job.decide()
    assert job.decide() is None
    ((_, decided),) = job.leader.tell(4)
    one, two = members({0: 1}), Members(6, ((0, 1), (1, 2)))
    assert decided.decisions == (one, Apply(6, (A,)), two, Apply(7, ((1, 2, 1),)))


def test_a_shard_that_has_held_nothing_is_sent_no_view() -> None:
    assert Deciding().leader.tell(1) == []


def test_a_shard_that_the_job_does_not_have_changes_nothing() -> None:
    job = Deciding(ASYNC, 2, A)
    job.hear(2, A)
    job.hear(0, A)
    assert job.decide() is None


def test_what_is_not_decided_is_dropped_with_its_worker() -> None:
    job = Deciding(ASYNC, 2, A)
    job.hear(1, B)
    job.leader.hold(B, 1)
    for push in (A, B):
        job.leader.drop(push)
    job.hear(1, A, B)
    assert job.decide() is None


# Rounds ------------------------------------------------------------------------------------------


def test_alone_it_closes_a_round_when_all_live_workers_are_in() -> None:
    job = Deciding(ALL, 1, B, A)
    assert job.decide() is None
    job.leader.hold(C, 1)
    assert job.decide() == Apply(6, (A, B, C))


def test_a_round_closes_when_the_workers_that_it_waited_for_are_out() -> None:
    job = Deciding(ALL, 1, A, B)
    job.live = {0: 1, 1: 1}
    assert job.decide() == Apply(6, (A, B))


def test_nobody_makes_no_round() -> None:
    job = Deciding(ALL, 1)
    job.live = {}
    assert job.decide() is None


def test_of_those_that_all_hold_the_first_make_the_round() -> None:
    job = Deciding(TWO, 2, C, A, B)
    job.hear(1, C, A, B)
    assert job.decide() == Apply(6, (A, C))
    assert job.decide() is None, "the third is stale"


def test_fewer_workers_than_a_round_wants_are_enough_when_no_more_live() -> None:
    job = Deciding(TWO, 1, A)
    assert job.decide() is None
    job.live = {0: 1}
    assert job.decide() == Apply(6, (A,))


def test_a_round_waits_until_every_shard_holds_its_pushes() -> None:
    job = Deciding(ALL, 3, A, B, C)
    job.hear(1, A, B, C)
    job.hear(2, A, B)
    assert job.decide() is None
    assert job.leader.missing([A, B, C], MOVED) == ("ps:0",)
    job.hear(2, A, B, C)
    assert job.decide() == Apply(6, (A, B, C))


def test_who_is_out_by_the_leaders_view_is_not_counted() -> None:
    job = Deciding(ALL, 2, A, B, C)
    job.hear(1, A, B, C)
    job.live = {0: 1, 1: 1, 2: 2}  # it is another incarnation of worker 2 that counts
    assert job.decide() is None
    job.live = {0: 1, 1: 1}
    assert job.decide() == Apply(6, (A, B))


def test_a_round_of_deltas_makes_as_many_steps_as_the_longest() -> None:
    job = Deciding(ALL, 1)
    for push, steps in ((A, 2), (B, 4), (C, 3)):
        job.leader.hold(push, steps)
    assert job.decide() == Apply(9, (A, B, C))


# Clipping ----------------------------------------------------------------------------------------


def test_clipping_alone_needs_nobody() -> None:
    job = Deciding(CLIP, 1, A, B, C)
    job.square = 64.0
    decision = job.decide()
    assert isinstance(decision, Apply)
    assert decision.scale == pytest.approx(6.0 / 8.0, rel=1e-6)
    assert job.measured == [(A, B, C)]


def test_norms_that_came_with_the_same_pushes_are_used_at_once() -> None:
    job = Deciding(CLIP, 2, A, B)
    job.live, job.square = {0: 1, 1: 1}, 36.0
    job.hear(1, A, B, measured=(A, B), square=128.0)
    decision = job.decide()
    assert isinstance(decision, Apply)
    assert decision.scale == pytest.approx(6.0 / math.sqrt(164.0), rel=1e-6)


def test_other_pushes_are_proposed_once_and_kept_to() -> None:
    job = Deciding(Rule(aggregate=2, staleness=0, clip_norm=6.0), 2, A, B)
    job.hear(1, A, B, C, measured=(A, B, C), square=1.0)
    assert job.decide() == Measure(5, (A, B))
    assert job.decide() is None
    job.leader.hold(C, 1)
    assert job.decide() is None, "two are enough: they stay the members"
    job.hear(1, A, B, C, measured=(A, B), square=0.0)
    assert job.decide() == Apply(6, (A, B))


def test_a_proposal_is_given_up_when_a_member_is_lost_or_more_are_needed() -> None:
    job = Deciding(CLIP, 2, A, B)
    job.hear(1, A, B, C, measured=(A, B, C))
    job.live = {0: 1, 1: 1}
    assert job.decide() == Measure(5, (A, B))
    job.live = {0: 1}
    assert job.decide() == Measure(5, (A,))
    job.live = LIVE  # others have joined before the norm is in
    job.leader.hold(C, 1)
    assert job.decide() == Apply(6, (A, B, C))


def test_a_gradient_that_is_not_finite_makes_the_scale_so() -> None:
    job = Deciding(CLIP, 2, A)
    job.live = {0: 1}
    job.hear(1, A, measured=(A,), square=math.inf)
    decision = job.decide()
    assert isinstance(decision, Apply) and math.isnan(decision.scale)


@pytest.mark.parametrize("limit", [0.5, 3.0, 100.0])
def test_clipping_is_torchs(limit: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.tensor([1.0, -2.0, 2.0, 4.0])
    square = float(parameter.grad.square().sum())
    expected = parameter.grad * clip_factor(square, limit)
    torch.nn.utils.clip_grad_norm_([parameter], limit)
    torch.testing.assert_close(parameter.grad, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("square", [math.nan, math.inf, -1.0])
def test_what_is_not_finite_is_not_hidden(square: float) -> None:
    assert math.isnan(clip_factor(square, 1.0))


def test_a_gradient_of_nothing_is_not_clipped() -> None:
    assert clip_factor(0.0, 1.0) == 1.0


# Copies, the end, other shards -------------------------------------------------------------------


def test_a_copy_is_made_once_every_shard_was_asked() -> None:
    job = Deciding(ASYNC, 3)
    job.snapshots = {7: 99}
    job.hear(1, snapshots=((7, 99),))
    job.hear(2, snapshots=((7, 98),))  # of an earlier request
    assert job.decide() is None
    assert job.leader.missing_snapshot(7, 99, MOVED) == ("ps:0",)
    job.hear(2, snapshots=((7, 99),))
    assert job.decide() == Cut(5, 7, 99)


def test_nothing_waits_for_a_copy_that_not_every_shard_was_asked_for() -> None:
    job = Deciding(ASYNC, 2, A)
    job.snapshots = {7: 99}
    job.hear(1, A)
    assert job.decide() == Apply(6, (A,))


def test_the_end_is_decided_once_and_drops_what_is_not_applied() -> None:
    job = Deciding(ASYNC, 1, A, B)
    job.leader.ending.set_last(0, 6)
    assert [job.decide() for _ in range(3)] == [Apply(6, (A,)), Stop(6), None]


def test_nothing_is_applied_before_values_are_loaded_but_shards_may_be_divided() -> None:
    job = Deciding(ASYNC, 1, A)
    job.leader.loaded = False
    assert job.decide() is None
    job.leader.view(View(4, (), (), MOVED.shards, next_shards=MOVED.shards[:1]), LIVE)
    assert (job.decide(), job.decide()) == (Divide(5, 4), None)


def test_a_view_takes_back_a_division_that_is_not_decided() -> None:
    job = Deciding(ASYNC, 3)
    job.leader.view(View(4, (), (), MOVED.shards, next_shards=MOVED.shards[:1]), LIVE)
    job.leader.view(View(5, (), (), MOVED.shards), LIVE)
    assert job.decide() is None
