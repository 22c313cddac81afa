"""Synchronous rounds: which updates make a step, and how servers agree on them."""

from __future__ import annotations

import math

import pytest
import torch

from trireme.cluster.view import ShardEntry, View
from trireme.ps.flat import PartBuffer
from trireme.ps.layout import Layout
from trireme.ps.messages import ParameterSpec, Push
from trireme.ps.rule import Rule
from trireme.ps.server_messages import RoundClose, RoundReady
from trireme.ps.shard.instructions import Send
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.push_table import Pending
from trireme.ps.shard.rounds import Decision, Round, RoundFollower, RoundLeader, clip_factor
from trireme.ps.shard.values.gradient_sums import Total

LAYOUT = Layout.of([ParameterSpec("a", (16,), "float32", 0)], servers=1)
ALL = Rule(aggregate=0, staleness=0)
TWO = Rule(aggregate=2, staleness=0)
CLIP = Rule(aggregate=0, staleness=0, clip_norm=6.0)
A, B, C = Participant(0, 1), Participant(1, 1), Participant(2, 1)
D = Participant(2, 2)
LIVE = {0: 1, 1: 1, 2: 1}
MOVED = View(3, (), (), (ShardEntry(0, 1, 4), ShardEntry(1, 2, 1), ShardEntry(2, 3, 0)))
"""The primaries of the three shards are not at the servers of their numbers."""


def buffer(value: float) -> PartBuffer:
    return PartBuffer(LAYOUT, 0, [torch.full((16,), value)])


def pending(
    member: Participant, value: float = 1.0, weight: float = 1.0, absent: tuple[int, ...] = ()
) -> Pending:
    push = Push(1, 1, 0, 5, weight, absent=absent)
    return Pending(member, push, None, buffer(value), 0.0)


def round_of(*members: Participant) -> Round:
    spare = buffer(0.0)
    current = Round(5, lambda: spare)
    for value, member in enumerate(members, start=1):
        current.add(pending(member, float(value)))
    return current


def ready(
    *members: Participant,
    measured: tuple[Participant, ...] = (),
    square: float = 0.0,
    step: int = 5,
) -> RoundReady:
    return RoundReady(step, members, measured, square)


def close(*members: Participant, scale: float = 1.0, step: int = 5) -> RoundClose:
    return RoundClose(step, members, scale)


# The updates of a round ------------------------------------------------------------------------


def test_only_updates_of_live_starts_count() -> None:
    current = round_of(B, A, C, D)
    assert current.held({0: 1, 1: 1, 2: 2}) == (A, B, D)
    assert current.held({1: 1}) == (B,)


def test_the_mean_is_over_the_members() -> None:
    current = round_of(A, B, C)
    mean = current.mean((A, C))
    assert mean is not None
    assert (mean.vectors[0] == 2.0).all()
    assert current.mean((A, C)) is mean, "computed once"
    alone = current.mean((B,))
    assert alone is current.pending[B].gradients


def test_those_that_weigh_nothing_are_members_without_a_part_in_the_mean() -> None:
    current = round_of(A)
    current.add(pending(B, 100.0, weight=0.0))
    mean = current.mean((A, B))
    assert mean is not None
    assert (mean.vectors[0] == 1.0).all()
    assert current.mean((B,)) is None
    assert current.square((B,)) == 0.0
    assert current.update(Decision((B,), 0.5)) is None
    assert current.update(Decision((B,), 1.0)) is None


def test_scaling_leaves_the_gradients_alone() -> None:
    current = round_of(A, B)
    scaled = current.update(Decision((B,), 0.25))
    assert scaled is not None
    assert scaled.divisor == 1.0
    assert (scaled.gradients.vectors[0] == 0.5).all()
    assert (current.pending[B].gradients.vectors[0] == 2.0).all()
    again = current.mean((A, B))
    assert again is not None
    assert (again.vectors[0] == 1.5).all()


def test_what_nobody_measures_is_left_to_the_optimizer_to_divide() -> None:
    current = round_of(A, B, C)
    before = current.square((A, B))
    total = current.update(Decision((A, C), 1.0))
    assert total is not None
    assert total.divisor == 2.0
    assert (total.gradients.vectors[0] == 4.0).all()
    assert current.square((A, B)) == before, "made anew: the sum took its memory"
    assert current.square((A, C)) > 0
    measured = current.update(Decision((A, C), 1.0))
    assert measured is not None
    assert measured.divisor == 1.0
    assert measured.gradients is current.mean((A, C))
    assert (measured.gradients.vectors[0] == 2.0).all()
    alone = current.update(Decision((B,), 1.0))
    assert alone is not None
    assert alone == Total(current.pending[B].gradients)


def test_what_no_update_that_weighs_has_is_absent_from_the_round() -> None:
    current = round_of()
    current.add(pending(A, absent=(1, 3, 4)))
    current.add(pending(B, absent=(0, 3, 4)))
    current.add(pending(C, absent=(), weight=0.0))
    assert current.absent((A, B, C)) == (3, 4)
    assert current.absent((A,)) == (1, 3, 4)
    total = current.update(Decision((A, B, C), 1.0))
    assert total is not None and total.absent == (3, 4)
    current.add(pending(C, absent=()))
    assert current.absent((A, B, C)) == ()


def test_an_update_that_is_kept_is_a_copy() -> None:
    current = round_of(A, B)
    current.square((A,))
    original = current.pending[A].gradients
    current.keep(A)
    original.vectors[0].fill_(math.nan)
    assert current.pending[A].answered
    mean = current.mean((A,))
    assert mean is not None
    assert (mean.vectors[0] == 1.0).all()


# The leader ------------------------------------------------------------------------------------


def test_alone_it_closes_when_all_live_workers_are_in() -> None:
    leader = RoundLeader(ALL, 1)
    assert leader.decide(round_of(A, B), LIVE) == ([], None)
    assert leader.decide(round_of(A, B, C), LIVE) == ([], Decision((A, B, C), 1.0))
    assert leader.decide(round_of(A, B), {0: 1, 1: 1}) == ([], Decision((A, B), 1.0))


def test_of_those_that_all_hold_the_first_make_the_round() -> None:
    leader = RoundLeader(TWO, 2)
    current = round_of(C, A, B)
    leader.hear(5, 1, ready(A, B, C))
    assert leader.decide(current, LIVE)[1] == Decision((A, C), 1.0)


def test_nobody_makes_no_round() -> None:
    assert RoundLeader(ALL, 1).decide(round_of(), {}) == ([], None)
    assert RoundLeader(ALL, 1).decide(round_of(A), {}) == ([], None)


def test_fewer_workers_than_a_round_wants_are_enough_when_no_more_live() -> None:
    leader = RoundLeader(TWO, 1)
    assert leader.decide(round_of(A), LIVE)[1] is None
    assert leader.decide(round_of(C, A), LIVE)[1] == Decision((A, C), 1.0)
    assert leader.decide(round_of(A), {0: 1})[1] == Decision((A,), 1.0)


def test_the_leader_waits_until_every_server_holds_the_updates() -> None:
    leader = RoundLeader(ALL, 3)
    current = round_of(A, B, C)
    assert leader.decide(current, LIVE) == ([], None)
    leader.hear(5, 1, ready(A, B, C))
    leader.hear(5, 2, ready(A, B))
    assert leader.decide(current, LIVE) == ([], None)
    assert leader.missing(current, LIVE, MOVED) == ()
    leader.hear(5, 2, ready(A, B, C))
    told = close(A, B, C)
    assert leader.decide(current, LIVE) == (
        [Send(1, told), Send(2, told)],
        Decision((A, B, C), 1.0),
    )


def test_only_what_everybody_holds_is_counted() -> None:
    leader = RoundLeader(TWO, 2)
    leader.hear(5, 1, ready(B, C))
    assert leader.decide(round_of(A, B), LIVE) == ([], None)
    assert leader.decide(round_of(A, B, C), LIVE)[1] == Decision((B, C), 1.0)


def test_who_is_out_by_the_leaders_view_is_not_counted() -> None:
    leader = RoundLeader(ALL, 2)
    leader.hear(5, 1, ready(A, B, C))
    assert leader.decide(round_of(A, B, C), {0: 1, 1: 1})[1] == Decision((A, B), 1.0)
    # Another start of worker 2: the one that ps:1 holds is not the one that counts.
    assert leader.decide(round_of(A, B, C, D), {0: 1, 1: 1, 2: 2}) == ([], None)


def test_words_on_another_round_do_not_count() -> None:
    leader = RoundLeader(ALL, 2)
    leader.hear(5, 1, ready(A, step=4))
    assert leader.decide(round_of(A), {0: 1}) == ([], None)
    leader.hear(5, 1, ready(A))
    leader.begin()
    assert leader.decide(round_of(A), {0: 1}) == ([], None)


def test_a_server_that_missed_the_decision_is_told_again() -> None:
    leader = RoundLeader(ALL, 2)
    assert leader.hear(5, 1, ready(A)) == []
    leader.decide(round_of(A), {0: 1})
    leader.begin()
    assert leader.hear(6, 1, ready(A)) == [Send(1, close(A))]
    assert leader.hear(7, 1, ready(A, step=3)) == []


def test_the_leader_names_whom_it_waits_for() -> None:
    leader = RoundLeader(ALL, 3)
    assert leader.missing(round_of(B), LIVE, MOVED) == ("worker:0", "worker:2")
    leader.hear(5, 1, ready(A, B, C))
    assert leader.missing(round_of(A, B, C), LIVE, MOVED) == ("ps:0",)


def test_clipping_alone_needs_nobody() -> None:
    (_, decision) = RoundLeader(CLIP, 1).decide(round_of(A), {0: 1})
    assert decision == Decision((A,), 1.0)
    (_, decision) = RoundLeader(CLIP, 1).decide(round_of(A, B, C), LIVE)
    assert decision is not None
    assert decision.scale == pytest.approx(6.0 / 8.0, rel=1e-6)


def test_norms_that_came_with_the_same_members_are_used_at_once() -> None:
    leader = RoundLeader(CLIP, 2)
    leader.hear(5, 1, ready(A, B, measured=(A, B), square=128.0))
    told, decision = leader.decide(round_of(A, B), {0: 1, 1: 1})
    assert decision is not None
    # 16 elements of 1.5 here, 128 there: a norm of sqrt(164).
    assert decision.scale == pytest.approx(6.0 / math.sqrt(164.0), rel=1e-6)
    assert told == [Send(1, close(A, B, scale=decision.scale))]


def test_other_members_are_proposed_once_and_kept_to() -> None:
    rule = Rule(aggregate=2, staleness=0, clip_norm=6.0)
    leader, current = RoundLeader(rule, 2), round_of(A, B)
    leader.hear(5, 1, ready(A, B, C, measured=(A, B, C), square=1.0))
    assert leader.decide(current, LIVE) == ([Send(1, close(A, B, scale=-1.0))], None)
    assert leader.decide(current, LIVE) == ([], None)
    current.add(pending(C))
    assert leader.decide(current, LIVE) == ([], None), "two are enough: they stay the members"
    leader.hear(5, 1, ready(A, B, C, measured=(A, B), square=0.0))
    _, decision = leader.decide(current, LIVE)
    assert decision is not None
    assert decision.members == (A, B)


def test_a_proposal_is_given_up_when_a_member_is_lost_or_more_are_needed() -> None:
    leader, current = RoundLeader(CLIP, 2), round_of(A, B)
    leader.hear(5, 1, ready(A, B, C, measured=(A, B, C)))
    assert leader.decide(current, {0: 1, 1: 1})[0] == [Send(1, close(A, B, scale=-1.0))]
    assert leader.decide(current, {0: 1})[0] == [Send(1, close(A, scale=-1.0))]
    # Others have joined before the norm is in.
    current.add(pending(C))
    told, decision = leader.decide(current, LIVE)
    assert decision is not None
    assert decision.members == (A, B, C)
    assert told == [Send(1, close(A, B, C, scale=decision.scale))]


def test_the_leader_lets_go_of_who_is_out() -> None:
    current = round_of(A, B)
    RoundLeader(ALL, 2).drop(current, A)
    assert set(current.pending) == {B}


# A follower ------------------------------------------------------------------------------------


def test_a_follower_says_what_it_holds_once_it_is_enough() -> None:
    follower = RoundFollower(ALL)
    assert follower.decide(round_of(A, B), LIVE) == ([], None)
    current = round_of(A, B, C)
    assert follower.decide(current, LIVE) == ([Send(0, ready(A, B, C))], None)
    assert follower.decide(current, LIVE) == ([], None), "nothing new"
    assert follower.missing(current, LIVE, MOVED) == ("ps:4",)


def test_a_follower_says_so_when_it_holds_more() -> None:
    follower, current = RoundFollower(TWO), round_of(A, B)
    assert follower.decide(current, LIVE)[0] == [Send(0, ready(A, B))]
    current.add(pending(C))
    assert follower.decide(current, LIVE)[0] == [Send(0, ready(A, B, C))]


def test_a_follower_decides_nothing_by_itself() -> None:
    follower, current = RoundFollower(ALL), round_of(A)
    follower.decide(current, {0: 1})
    follower.hear(5, close(A, step=4))
    assert follower.decide(current, {0: 1}) == ([], None)
    follower.hear(5, close(A))
    assert follower.decide(current, {0: 1}) == ([], Decision((A,), 1.0))
    follower.begin()
    assert follower.decide(round_of(), {0: 1}) == ([], None)


def test_a_follower_measures_what_is_proposed() -> None:
    follower, current = RoundFollower(CLIP), round_of(A, B, C)
    measured = (A, B, C)
    assert follower.decide(current, LIVE)[0] == [
        Send(0, ready(A, B, C, measured=measured, square=16 * 4.0))
    ]
    follower.hear(5, close(A, C, scale=-1.0))
    assert follower.decide(current, {0: 1, 2: 1})[0] == [
        Send(0, ready(A, C, measured=(A, C), square=pytest.approx(16 * 4.0)))
    ]
    follower.hear(5, close(A, scale=-1.0))
    assert follower.decide(current, {0: 1, 2: 1})[0] == [
        Send(0, ready(A, C, measured=(A,), square=pytest.approx(16 * 1.0)))
    ]


def test_a_follower_reports_on_a_proposal_though_it_holds_less_than_a_round_needs() -> None:
    follower, current = RoundFollower(CLIP), round_of(A, B)
    assert follower.decide(current, LIVE) == ([], None)
    follower.hear(5, close(A, B, scale=-1.0))
    assert follower.decide(current, LIVE)[0] == [
        Send(0, ready(A, B, measured=(A, B), square=pytest.approx(16 * 1.5**2)))
    ]


def test_a_gradient_that_is_not_finite_makes_the_scale_so_everywhere() -> None:
    leader, current = RoundLeader(CLIP, 2), round_of(A)
    leader.hear(5, 1, ready(A, measured=(A,), square=math.inf))
    told, decision = leader.decide(current, {0: 1})
    assert decision is not None
    assert math.isnan(decision.scale)
    follower = RoundFollower(CLIP)
    assert isinstance(told[0].message, RoundClose)
    follower.hear(5, told[0].message)
    _, same = follower.decide(round_of(A), {0: 1})
    assert same is not None
    assert math.isnan(same.scale)


def test_a_follower_keeps_what_it_has_said_that_it_holds() -> None:
    follower, current = RoundFollower(ALL), round_of(A, B)
    follower.drop(current, B)
    assert set(current.pending) == {A}, "of this one it had not said anything"
    follower.decide(current, {0: 1})
    follower.drop(current, A)
    assert current.pending[A].answered
    follower.hear(5, close(A))
    assert follower.decide(current, {}) == ([], Decision((A,), 1.0))


# Clipping --------------------------------------------------------------------------------------


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
