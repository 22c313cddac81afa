"""What a consistent cut holds back, and for how long."""

from __future__ import annotations

from trireme.ps.flat import PartBuffer
from trireme.ps.layout import Layout
from trireme.ps.messages import ParameterSpec, Push
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.push_table import Pending
from trireme.ps.shard.snapshot_barrier import SnapshotBarrier
from trireme.ps.snapshot_messages import Cut

GRADIENTS = PartBuffer(Layout.of([ParameterSpec("a", (16,), "float32", 0)], servers=1), 0)


def push(worker: int, sequence: int) -> Pending:
    said = Push(1, sequence, sequence - 1, 0, 1.0)
    return Pending(Participant(worker, 1), said, None, GRADIENTS, 0.0)


def hold_with(*decided: tuple[int, int], step: int = 4) -> SnapshotBarrier:
    hold = SnapshotBarrier()
    hold.begin(7, 10.0)
    hold.cut = Cut(7, step, decided, False)
    return hold


def test_nothing_is_held_before_a_cut_and_after_it() -> None:
    hold = SnapshotBarrier()
    assert (hold.holds(push(0, 1)), hold.stops_round(0)) == (False, False)
    hold.begin(7, 10.0)
    assert (hold.token, hold.since) == (7, 10.0)
    assert (hold.holds(push(0, 1)), hold.stops_round(0)) == (True, True)
    hold.cut, hold.route = Cut(7, 0, (), False), "route"
    hold.end()
    assert (hold.token, hold.cut, hold.route) == (None, None, None)
    assert (hold.holds(push(0, 1)), hold.stops_round(0)) == (False, False)


def test_a_repeat_keeps_what_is_held_since_when_it_was() -> None:
    hold = SnapshotBarrier()
    hold.begin(7, 10.0)
    hold.begin(7, 12.0)
    assert (hold.token, hold.since) == (7, 10.0)


def test_what_other_servers_have_decided_is_let_through_and_no_more() -> None:
    hold = hold_with((0, 3), (1, 0))
    assert [hold.holds(push(0, sequence)) for sequence in (2, 3, 4)] == [False, False, True]
    assert hold.holds(push(1, 1))
    assert hold.holds(push(2, 1)), "nobody has decided anything of worker 2"


def test_rounds_go_on_up_to_the_step_of_the_cut() -> None:
    hold = hold_with(step=4)
    assert [hold.stops_round(step) for step in (3, 4, 5)] == [False, True, True]
