"""For whom a process of a process group waits, by a clock that the test moves."""

from __future__ import annotations

from collections.abc import Sequence

from tests.clocks import VirtualClock
from trireme.parallel.straggler_watch import StepPosition, StragglerWatch, stragglers


def test_who_is_not_as_far_is_waited_for() -> None:
    mine = StepPosition(7, True, 1)
    places = [(7, True), (6, True), (7, False), (8, False)]
    others = {
        rank: (StepPosition(step, inside, 1), 0.0) for rank, (step, inside) in enumerate(places)
    }
    assert stragglers(mine, others) == {
        1: "has made 6 steps of 7",
        2: "has not begun this step",
    }
    assert stragglers(mine, {0: (others[0][0], 12.0)}) == {0: "has not reported for 12 s"}


class Three:
    """Three processes with one store and one clock."""

    def __init__(self) -> None:
        self.store: dict[str, bytes] = {}
        self.clock = VirtualClock()
        self.said: list[tuple[int, str, tuple[str, ...]]] = []
        self.watches = [
            StragglerWatch(
                rank, 3, self.store.__setitem__, self.store.get, self.say(rank), self.clock
            )
            for rank in range(3)
        ]

    def say(self, rank: int):  # type: ignore[no-untyped-def]
        def said(reason: str, names: Sequence[str], seconds: float) -> None:
            self.said.append((rank, reason, tuple(names)))

        return said

    def live(self, seconds: int, *ranks: int) -> None:
        """Lets time pass, in which only some processes live."""
        for _ in range(seconds):
            self.clock.advance(1.0)
            for rank in ranks:
                self.watches[rank].look()


def test_one_that_does_not_begin_its_step_is_named_by_those_who_did() -> None:
    three = Three()
    for rank in (0, 2):
        three.watches[rank].step_began(0)
    three.live(4, 0, 1, 2)
    assert three.said == []
    three.live(4, 0, 1, 2)
    assert {said[0] for said in three.said} == {0, 2}
    wanted = ("worker:1 has not begun this step", ("worker:1",))
    assert all(said[1:] == wanted for said in three.said)


def test_one_that_is_stopped_in_its_step_is_found_out_by_its_silence() -> None:
    three = Three()
    for watch in three.watches:
        watch.step_began(0)
    three.live(2, 0, 1, 2)
    three.live(14, 0, 2)
    assert {said[0] for said in three.said} == {0, 2}
    assert all(names == ("worker:1",) for _, _, names in three.said)
    assert "worker:1 has not reported for" in three.said[0][1]


def test_it_is_not_said_all_the_time_and_not_when_all_goes_well() -> None:
    three = Three()
    for step in range(20):
        for watch in three.watches:
            watch.step_began(step)
        three.live(2, 0, 1, 2)
        for watch in three.watches:
            watch.step_ended(step + 1)
    assert three.said == []
    three.watches[0].step_began(20)
    three.live(26, 0, 1, 2)
    assert [said[0] for said in three.said] == [0, 0, 0]


def test_a_step_that_takes_long_everywhere_waits_for_nobody() -> None:
    three = Three()
    for watch in three.watches:
        watch.step_began(3)
    three.live(60, 0, 1, 2)
    assert three.said == []
