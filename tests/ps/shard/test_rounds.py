"""The update that the pushes of a round make."""

from __future__ import annotations

import torch

from trireme.ps.flat import PartBuffer
from trireme.ps.layout import Layout
from trireme.ps.messages import ParameterSpec, Push
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.push_table import Pending
from trireme.ps.shard.rounds import Mean, absent_in
from trireme.ps.shard.values.gradient_sums import Total

LAYOUT = Layout.of([ParameterSpec("a", (16,), "float32", 0)], servers=1)


def buffer(value: float) -> PartBuffer:
    return PartBuffer(LAYOUT, 0, [torch.full((16,), value)])


def pending(
    worker: int, value: float = 1.0, weight: float = 1.0, absent: tuple[int, ...] = ()
) -> Pending:
    push = Push(1, 1, 0, 5, weight, absent=absent)
    return Pending(Participant(worker, 1), push, None, buffer(value), 0.0)


def mean_of(mean: Mean, *members: Pending) -> float:
    total = mean.update(members, 1.0)
    assert total is not None
    return float(total.gradients.vectors[0][0]) / total.divisor


def three() -> tuple[Mean, Pending, Pending, Pending]:
    spare = buffer(0.0)
    return Mean(lambda: spare), pending(0, 1.0), pending(1, 2.0), pending(2, 3.0)


def test_the_mean_is_over_the_members() -> None:
    mean, a, b, c = three()
    assert mean_of(mean, a, c) == 2.0
    assert mean.update([b], 1.0) == Total(b.gradients), "one gradient is not copied"


def test_those_that_weigh_nothing_are_members_without_a_part_in_the_mean() -> None:
    mean, a, _, _ = three()
    empty = pending(1, 100.0, weight=0.0)
    assert mean_of(mean, a, empty) == 1.0
    assert mean.square([empty]) == 0.0
    assert mean.update([empty], 0.5) is None
    assert mean.update([empty], 1.0) is None


def test_scaling_leaves_the_gradients_alone() -> None:
    mean, a, b, _ = three()
    scaled = mean.update([b], 0.25)
    assert scaled is not None
    assert scaled.divisor == 1.0
    assert (scaled.gradients.vectors[0] == 0.5).all()
    assert (b.gradients.vectors[0] == 2.0).all()
    mean.forget()
    assert mean_of(mean, a, b) == 1.5


def test_what_nobody_measures_is_left_to_the_optimizer_to_divide() -> None:
    mean, a, b, c = three()
    total = mean.update([a, c], 1.0)
    assert total is not None
    assert total.divisor == 2.0
    assert (total.gradients.vectors[0] == 4.0).all()
    mean.forget()
    assert mean.square([a, b]) == 16 * 1.5**2
    measured = mean.update([a, b], 1.0)
    assert measured is not None
    assert measured.divisor == 1.0
    assert (measured.gradients.vectors[0] == 1.5).all()


def test_what_no_update_that_weighs_has_is_absent_from_the_round() -> None:
    mean, *_ = three()
    a, b = pending(0, absent=(1, 3, 4)), pending(1, absent=(0, 3, 4))
    empty = pending(2, absent=(), weight=0.0)
    assert absent_in([a, b, empty]) == (3, 4)
    assert absent_in([a]) == (1, 3, 4)
    total = mean.update([a, b, empty], 1.0)
    assert total is not None and total.absent == (3, 4)
    assert absent_in([a, b, pending(2)]) == ()


def test_a_mean_that_is_forgotten_is_made_again() -> None:
    mean, a, _, _ = three()
    mean.square([a])
    a.gradients.vectors[0].fill_(5.0)
    mean.forget()
    assert mean.square([a]) == 16 * 25.0
