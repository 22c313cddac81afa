"""For whom a process of a process group waits, by a clock that the test moves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from tests.clocks import VirtualClock
from trireme.errors import ConfigurationError, JobFailed
from trireme.job_config import Timeouts
from trireme.parallel.processes.straggler_watch import (
    BEAT_SECONDS,
    Broken,
    Seen,
    StepPosition,
    StragglerWatch,
    broken_by,
    stragglers,
)


def test_who_is_not_as_far_is_waited_for() -> None:
    mine = StepPosition(7, True, 1)
    places = [(7, True), (6, True), (7, False), (8, False)]
    others = {
        rank: Seen(StepPosition(step, inside, 1), 12.0, 12.0, 12.0)
        for rank, (step, inside) in enumerate(places)
    }
    assert stragglers(mine, others, 12.0) == {
        1: "has made 6 steps of 7",
        2: "has not begun this step",
    }
    for lifeless, computes in ((12.0, ""), (1.0, ", and uses the processor")):
        assert stragglers(
            mine, {0: Seen(others[0].position, 0.0, 12.0, 12.0 - lifeless)}, 12.0
        ) == {0: f"has not reported for 12 s{computes}"}


class Member:
    """One of three processes, as a watch sees its process group."""

    size = 3

    def __init__(self, rank: int, store: dict[str, bytes]) -> None:
        self.rank = rank
        self.put: Callable[[str, bytes], None] = store.__setitem__
        self.get = store.get

    def interrupt(self) -> None: ...


class Three:
    """Three processes with one store and one clock."""

    def __init__(self, timeouts: Timeouts = Timeouts(heartbeat_timeout=100.0)) -> None:  # noqa: B008  # frozen
        self.store: dict[str, bytes] = {}
        self.clock = VirtualClock()
        self.said: list[tuple[int, str, tuple[str, ...]]] = []
        self.doing = {rank: ("", "") for rank in range(3)}
        self.hosts = {0: "a", 1: "b", 2: "b"}
        self.used = dict.fromkeys(range(3), 0.0)
        self.members = [Member(rank, self.store) for rank in range(3)]
        self.watches = [
            StragglerWatch(
                self.members[rank],
                self.say(rank),
                timeouts=timeouts,
                doing=partial(self.doing.__getitem__, rank),
                used=partial(self.used_by, rank),
                clock=self.clock,
            )
            for rank in range(3)
        ]

    def say(self, rank: int):  # type: ignore[no-untyped-def]
        def said(reason: str, names: Sequence[str], seconds: float) -> None:
            self.said.append((rank, reason, tuple(names)))

        return said

    def used_by(self, rank: int, other: int) -> float | None:
        return self.used[other] if self.hosts[other] == self.hosts[rank] else None

    def live(self, seconds: int, *ranks: int) -> None:
        """Lets time pass, in which only some processes live."""
        for _ in range(seconds):
            self.clock.advance(1.0)
            for rank in ranks:
                self.watches[rank].look()
                self.watches[rank].judge()

    def broken(self, rank: int) -> str:
        """Why the group is broken, as a process learns it; "" where it is whole."""
        try:
            self.watches[rank].check()
        except (ConfigurationError, JobFailed) as error:
            return f"{type(error).__name__}: {error}"
        return ""


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


# A wait in vain --------------------------------------------------------------------------------

IN, OUT = StepPosition(7, True, 1), StepPosition(7, False, 1)
ENDED = StepPosition(7, False, 1, ended=True)
FAR = StepPosition(8, False, 1, ended=True)
OPENS = StepPosition(7, True, 1, action="begins to read a data set")
JOINS = StepPosition(7, False, 1, joins=True)
FAR_OPENS = StepPosition(8, True, 1, action="begins to read a data set")


@pytest.mark.parametrize(
    ("mine", "waited", "other", "silent", "still", "words"),
    [
        (IN, 9.0, IN, 10.0, 9.0, ""),
        (IN, 10.0, IN, 10.0, 10.0, "worker:1 sent nothing for 10 s (--heartbeat-timeout)"),
        (OUT, 99.0, IN, 99.0, 99.0, ""),
        (ENDED, 10.0, OUT, 10.0, 10.0, "worker:1 sent nothing for 10 s"),
        (IN, 1.0, ENDED, 0.0, 99.0, ""),
        (IN, 2.0, ENDED, 0.0, 2.0, "rank 1 has ended its training after 7 steps, and rank 0 makes"),
        (IN, 60.0, FAR, 0.0, 60.0, ""),
        (ENDED, 60.0, IN, 0.0, 1.0, ""),
        (
            ENDED,
            60.0,
            IN,
            0.0,
            2.0,
            "rank 0 has ended its training after 7 steps, and rank 1 makes",
        ),
        (ENDED, 60.0, OUT, 0.0, 60.0, ""),
        (
            ENDED,
            600.0,
            OUT,
            0.0,
            600.0,
            "(--progress-timeout): worker:1 has not ended its training",
        ),
        (IN, 9.0, OPENS, 0.0, 1.0, ""),
        (IN, 1.0, OPENS, 0.0, 9.0, ""),
        (IN, 9.0, FAR_OPENS, 0.0, 9.0, ""),
        (OPENS, 9.0, OPENS, 0.0, 9.0, ""),
        (
            IN,
            2.0,
            OPENS,
            0.0,
            2.0,
            "rank 1 begins to read a data set after 7 steps, and rank 0 makes step 8",
        ),
        (
            OPENS,
            2.0,
            IN,
            0.0,
            2.0,
            "rank 0 begins to read a data set after 7 steps, and rank 1 makes step 8",
        ),
        (JOINS, 9.0, OUT, 10.0, 9.0, ""),
        (JOINS, 10.0, OUT, 10.0, 10.0, "worker:1 sent nothing for 10 s (--heartbeat-timeout)"),
        (JOINS, 99.0, ENDED, 0.0, 99.0, ""),
        (JOINS, 99.0, IN, 0.0, 99.0, ""),
        (IN, 99.0, JOINS, 0.0, 99.0, ""),
        (ENDED, 99.0, JOINS, 0.0, 99.0, ""),
        (JOINS, 99.0, OPENS, 0.0, 99.0, ""),
        (JOINS, 600.0, OUT, 0.0, 600.0, "(--progress-timeout): worker:1 has not begun step 8"),
        (IN, 99.0, OUT, 0.0, 99.0, ""),
        (IN, 600.0, OUT, 0.0, 599.0, ""),
        (IN, 600.0, OUT, 0.0, 600.0, "(--progress-timeout): worker:1 has not begun step 8"),
        (IN, 600.0, IN, 0.0, 600.0, "no process has completed step 8"),
    ],
)
def test_when_a_process_waits_in_vain(
    mine: StepPosition, waited: float, other: StepPosition, silent: float, still: float, words: str
) -> None:
    found = broken_by(
        0,
        mine,
        -waited,
        {1: Seen(other, -silent, -still, -silent)},
        Timeouts(heartbeat_timeout=10.0, progress_timeout=600.0),
        0.0,
    )
    assert (found is not None) == bool(words)
    assert found is None or words in found.text


def test_no_progress_is_waited_for_without_end_where_that_is_wanted() -> None:
    others = {1: Seen(OUT, 1e6, 0.0, 1e6)}
    timeouts = Timeouts(heartbeat_timeout=10.0, progress_timeout=0.0)
    assert broken_by(0, IN, 0.0, others, timeouts, 1e6) is None


def test_a_program_with_too_few_steps_would_have_them_again() -> None:
    assert isinstance(Broken("x", usage=True).error(), ConfigurationError)
    assert isinstance(Broken("x").error(), JobFailed)


def test_one_that_is_stopped_breaks_the_group_with_one_reason_for_all_others() -> None:
    three = Three(Timeouts(heartbeat_timeout=10.0))
    for watch in three.watches:
        watch.step_began(0)
    three.live(3, 0, 1, 2)
    three.live(9, 0, 2)
    assert not three.broken(0) and not three.broken(2)
    three.live(3, 0, 2)
    assert three.broken(0).startswith("JobFailed: worker:1 sent nothing for 10 s")
    assert three.broken(2) == three.broken(0)
    three.watches[1].look()  # it goes on, and learns that the others do not
    assert three.broken(1) == three.broken(0)
    with pytest.raises(JobFailed):
        three.watches[1].step_began(1)


def in_a_long_call(share: float, seconds: int, timeouts: Timeouts) -> Three:
    """Three processes, the second of which publishes nothing, and uses a share of a core."""
    three = Three(timeouts)
    for watch in three.watches:
        watch.step_began(0)
    three.live(3, 0, 1, 2)
    for _ in range(seconds):
        three.used[1] += share
        three.live(1, 2, 0)  # both wait; only the first of them runs on the silent one's host
    return three


def test_one_that_holds_the_interpreter_lock_and_computes_is_not_lost() -> None:
    three = in_a_long_call(0.5, 60, Timeouts(heartbeat_timeout=10.0, progress_timeout=100.0))
    assert [three.broken(rank) for rank in range(3)] == [""] * 3
    assert three.said[-1][1].endswith(", and uses the processor")
    three.live(9, 0, 2)  # and now it is stopped
    assert not three.broken(0)
    three.live(4, 0, 2)
    assert three.broken(0).startswith("JobFailed: worker:1 sent nothing for 10 s")


def test_one_that_computes_for_ever_makes_no_progress() -> None:
    three = in_a_long_call(1.0, 110, Timeouts(heartbeat_timeout=10.0, progress_timeout=100.0))
    assert "(--progress-timeout)" in three.broken(0)


def test_one_whose_threads_only_wait_for_the_interpreter_lock_is_lost() -> None:
    three = in_a_long_call(0.03, 14, Timeouts(heartbeat_timeout=10.0))
    assert three.broken(0).startswith("JobFailed: worker:1 sent nothing for 10 s")


def test_work_before_the_silence_is_no_sign_of_life() -> None:
    three = in_a_long_call(1.0, 5, Timeouts(heartbeat_timeout=10.0))
    three.live(60, 0, 1, 2)
    three.used[1] += 60.0
    three.live(12, 0, 2)
    assert three.broken(0).startswith("JobFailed: worker:1 sent nothing for 1")


def test_a_process_that_was_stopped_itself_accuses_nobody() -> None:
    three = Three(Timeouts(heartbeat_timeout=10.0))
    for watch in three.watches:
        watch.step_began(0)
    three.live(4, 0, 1, 2)
    three.clock.advance(60.0)  # the whole host
    for watch in three.watches:
        watch.judge()
    three.live(30, 0, 1, 2)
    assert [three.broken(rank) for rank in range(3)] == [""] * 3


def test_one_with_an_excuse_may_take_its_time_and_counts_from_its_end() -> None:
    three = Three(Timeouts(heartbeat_timeout=10.0, progress_timeout=60.0))
    for rank in (0, 2):
        three.watches[rank].step_began(4)
    three.doing[1] = ("it evaluates", "")
    three.live(300, 0, 1, 2)
    assert not three.broken(0)
    three.doing[1] = ("", "train.py:9 in main")
    three.live(58, 0, 1, 2)
    assert not three.broken(0)
    three.live(4, 0, 1, 2)
    assert "worker:1 has not begun step 5, its main thread is at train.py:9 in main" in (
        three.broken(0)
    )
    assert "worker:2" not in three.broken(0)


def test_one_that_is_stopped_while_another_waits_outside_of_a_step_is_found_out() -> None:
    three = Three(Timeouts(heartbeat_timeout=10.0))
    for watch in three.watches:
        watch.step_ended(5)
    with three.watches[0].waiting():
        three.live(3, 0, 1, 2)
        three.live(4, 0, 2)
        assert three.said == [(0, "worker:1 has not reported for 3 s", ("worker:1",))]
        three.live(9, 0, 2)
        assert three.broken(0).startswith("JobFailed: worker:1 sent nothing for 10 s")


def test_nothing_is_said_of_those_who_have_ended_or_come_later() -> None:
    three = Three()
    for watch in three.watches:
        watch.step_ended(5)
    three.watches[2].ended(5)
    with three.watches[0].waiting():
        three.live(60, 0, 1, 2)
    assert three.said == []
    three.live(60, 0, 1)  # the third process is silent, and no process waits for it
    assert not three.broken(0)


def test_its_threads_end_with_the_training_and_not_at_their_next_look() -> None:
    watch = Three().watches[0]
    watch.start()
    begin = time.monotonic()
    watch.close()
    assert time.monotonic() - begin < BEAT_SECONDS / 2


def test_a_store_that_does_not_answer_is_silent_too() -> None:
    three = Three(Timeouts(heartbeat_timeout=10.0))
    watch = three.watches[1]
    watch.step_began(0)
    asked = []

    def hangs(key: str, value: bytes) -> None:
        asked.append(key)
        for _ in range(12):
            three.clock.advance(1.0)
            watch.judge()

    three.members[1].put = hangs
    watch.look()
    assert asked
    assert "worker:0, or else what serves the store of the processes, sent nothing" in (
        three.broken(1)
    )


def test_an_exception_outside_of_a_step_ends_the_wait() -> None:
    three = Three(Timeouts(heartbeat_timeout=10.0))
    with pytest.raises(ValueError, match="of the program"), three.watches[0].waiting():
        three.live(3, 0, 1, 2)
        raise ValueError("of the program")
    three.live(60, 0)
    assert not three.broken(0) and three.said == []
