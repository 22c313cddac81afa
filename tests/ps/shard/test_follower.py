"""What one shard holds and reports, and the decisions that it takes from the leader."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from trireme.ps.flat import PartBuffer
from trireme.ps.layout import Layout
from trireme.ps.leader.decisions import Apply, Cut, Decided, Held, PushId
from trireme.ps.messages import ParameterSpec, Push
from trireme.ps.shard.follower import Follower
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.push_table import Pending

LAYOUT = Layout.of([ParameterSpec("a", (16,), "float32", 0)], servers=1)
A, B, C = (0, 1, 1), (1, 1, 1), (2, 1, 1)
LIVE = {0: 1, 1: 1, 2: 1}


def pending(push: PushId = A) -> Pending:
    worker, incarnation, sequence = push
    gradients = PartBuffer(LAYOUT, 0, [torch.full((16,), 1.0)])
    message = Push(1, sequence, 0, 5, 1.0)
    return Pending(Participant(worker, incarnation), message, None, gradients, 0.0)


def following(*pushes: PushId) -> tuple[Follower, list[Pending]]:
    follower, held = Follower(), [pending(push) for push in pushes]
    for each in held:
        follower.hold(each)
    return follower, held


def report(
    follower: Follower, needed: int = 1, clips: bool = False, asked: Sequence[tuple[int, int]] = ()
) -> list[Held]:
    square = (lambda pushes: float(len(pushes))) if clips else None
    held = follower.report(needed, LIVE, asked, square)
    return [] if held is None else [held]


def apply(*pushes: PushId, step: int = 6) -> Apply:
    return Apply(step, pushes)


def ids(follower: Follower) -> list[PushId]:
    return [each.id for each in follower.held.values()]


# Reports -----------------------------------------------------------------------------------------


def test_a_shard_reports_what_it_holds_and_how_much_it_knows() -> None:
    follower, _ = following(A)
    assert report(follower) == [Held(0, (A,))]
    assert report(follower) == []
    follower.hear(Decided(0, (apply(A),), 1))
    follower.take(A)
    follower.hold(pending(B))
    assert report(follower) == [Held(1, (B,))]


def test_a_shard_reports_once_it_holds_enough_for_a_step() -> None:
    follower, _ = following(A, B)
    assert report(follower, needed=3) == []
    follower.hold(pending(C))
    assert report(follower, needed=3) == [Held(0, (A, B, C))]


def test_pushes_of_workers_that_are_out_are_not_enough() -> None:
    follower, _ = following(A, (2, 2, 1))
    assert report(follower, needed=2) == []


def test_copies_are_reported_at_once() -> None:
    follower, _ = following(A)
    assert report(follower, needed=3, asked=((7, 99),)) == [Held(0, (A,), ((7, 99),))]


def test_a_shard_measures_what_it_holds_and_then_what_is_proposed() -> None:
    follower, _ = following(A, B, C)
    assert report(follower, needed=3, clips=True) == [Held(0, (A, B, C), (), (A, B, C), 3.0)]
    follower.propose((A, C))
    assert report(follower, needed=3, clips=True) == [Held(0, (A, B, C), (), (A, C), 2.0)]


def test_it_measures_a_proposal_though_it_holds_less_than_a_round_needs() -> None:
    follower, _ = following(A, B)
    follower.propose((A, B))
    assert report(follower, needed=3, clips=True) == [Held(0, (A, B), (), (A, B), 2.0)]


def test_who_has_too_few_pushes_for_a_round_does_not_look_at_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To look at all of them at each that comes takes a second in a round of a thousand."""
    looked, counting = [], Follower.counting

    def look(self: Follower, live: dict[int, int]) -> tuple[PushId, ...]:
        looked.append(len(self.held))
        return counting(self, live)

    monkeypatch.setattr(Follower, "counting", look)
    follower, live = Follower(), dict.fromkeys(range(100), 1)
    out = []
    for worker in range(100):
        follower.hold(pending((worker, 1, 1)))
        out.append(follower.report(100, live, (), None))
    assert looked == [100]
    assert [each is None for each in out] == [True] * 99 + [False]


# Decisions ---------------------------------------------------------------------------------------


def test_decisions_are_taken_once_and_in_order() -> None:
    follower, _ = following(A, B)
    first, second = apply(B), Cut(6, 7, 99)
    follower.hear(Decided(0, (first,), 1))
    follower.hear(Decided(0, (first, second), 1))
    follower.hear(Decided(0, (first,), 1))
    assert [*follower.decided] == [first, second]
    assert follower.known == 2


def test_a_gap_or_a_push_that_is_not_here_is_not_believed() -> None:
    follower, _ = following(A)
    follower.hear(Decided(1, (apply(A),), 1))
    follower.hear(Decided(0, (apply(A, B),), 1))
    follower.hear(Decided(0, (apply((0, 1, 2)),), 1))
    assert not follower.decided
    assert follower.known == 0


# Workers that are out ----------------------------------------------------------------------------


def test_what_was_reported_is_kept_in_memory_of_its_own() -> None:
    follower, (mine,) = following(A)
    report(follower)
    follower.drop(mine, 2, leads=False)
    mine.gradients.vectors[0].fill_(math.nan)  # its worker, started anew, writes there again
    follower.hear(Decided(0, (apply(A),), 1))
    kept = follower.take(A)
    assert kept.answered
    assert kept.gradients.vectors[0][0] == 1.0


def test_what_was_not_reported_goes_at_once_and_so_does_all_at_the_leaders_shard() -> None:
    follower, (mine,) = following(A)
    follower.drop(mine, 2, leads=False)
    assert ids(follower) == []
    follower, (mine,) = following(A)
    report(follower)
    follower.drop(mine, 2, leads=True)
    assert ids(follower) == []


def test_what_is_kept_goes_once_the_leader_has_taken_the_view() -> None:
    follower, (mine, _) = following(A, B)
    report(follower)
    follower.drop(mine, 2, leads=False)
    follower.hear(Decided(0, (), 1))
    assert ids(follower) == [A, B]
    follower.hear(Decided(0, (), 2))
    assert ids(follower) == [B]


def test_what_is_decided_stays_though_the_leader_has_taken_the_view() -> None:
    follower, (mine,) = following(A)
    report(follower)
    follower.hear(Decided(0, (apply(A),), 2))
    follower.drop(mine, 2, leads=False)
    assert ids(follower) == [A]


def test_what_the_leader_will_never_apply_is_not_kept() -> None:
    follower, (mine,) = following(A)
    follower.hear(Decided(0, (), 2))
    report(follower)
    follower.drop(mine, 2, leads=False)
    assert ids(follower) == []


def test_a_proposal_with_a_push_that_is_dropped_is_given_up() -> None:
    follower, (mine, _) = following(A, B)
    report(follower)
    follower.propose((A, B))
    follower.hear(Decided(0, (), 2))
    follower.drop(mine, 2, leads=False)
    assert follower.proposed == ()
