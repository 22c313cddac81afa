"""Which updates of a host go to the server as one: events in, instructions out."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.ps.bench import PARAMETER
from trireme.ps.dense import PartBuffer
from trireme.ps.gathering import NOTICE_SECONDS, Gathering, Instruction, SendSum
from trireme.ps.instructions import Reply
from trireme.ps.layout import Layout
from trireme.ps.messages import (
    Applied,
    MemberAnswer,
    Push,
    PushedTogether,
    PushReply,
    Refused,
    Waiting,
)

LAYOUT = Layout.of([PARAMETER], servers=1, slots=1)
VALUES = PartBuffer(LAYOUT, 0).vectors


class Bench:
    """A gathering of some workers, and what is said to it."""

    def __init__(self, *workers: int, connected: bool = True) -> None:
        self.now = 10.0
        self.gathering = Gathering(lambda: PartBuffer(LAYOUT, 0), patience=2.0)
        if connected:
            assert self.gathering.connect() == []
        for worker in workers:
            self.gathering.enlist(worker)
        self.gathering.tick(self.now)

    def push(self, worker: int, value: float = 1.0, **changed: Any) -> list[Instruction]:
        fields = {"weight": 1.0, **changed}
        push = Push(worker, 1, 1, sequence=1, acknowledged=0, pulled=0, **fields)
        gradients = PartBuffer(LAYOUT, 0)
        for vector in gradients.vectors:
            vector.fill_(value)
        return self.gathering.push(self.now, f"to {worker}", push, gradients)

    def tick(self, seconds: float) -> list[Instruction]:
        self.now += seconds
        return self.gathering.tick(self.now)


def sums(out: list[Instruction]) -> list[tuple[int, tuple[int, ...], float]]:
    """Each sum that is sent: its number, whose it is, and its first element."""
    return [
        (i.number, tuple(push.worker for push in i.pushes), i.total.vectors[0][0].item())
        for i in out
        if isinstance(i, SendSum)
    ]


def told(out: list[Instruction]) -> dict[object, object]:
    return {i.route: i.message for i in out if isinstance(i, Reply)}


def test_a_sum_goes_when_the_last_of_the_host_has_come_in_the_order_of_the_workers() -> None:
    bench = Bench(0, 1, 2)
    assert bench.push(2, 3.0) == bench.push(0, 1.0) == []
    assert sums(bench.push(1, 5.0)) == [(1, (0, 1, 2), 9.0)]


def test_what_weighs_nothing_is_not_looked_at() -> None:
    bench = Bench(0, 1, 2)
    bench.push(0, float("nan"), weight=0.0)
    bench.push(1, 2.0, weight=3.0)
    assert sums(bench.push(2, 4.0, weight=2.0)) == [(1, (0, 1, 2), 14.0)]
    bench.push(0, float("nan"), weight=0.0)
    bench.push(1, 2.0, weight=3.0)
    assert sums(bench.push(2, 4.0, weight=0.0)) == [(2, (0, 1, 2), 2.0)]


def test_who_leaves_is_not_waited_for_and_its_update_does_not_go() -> None:
    bench = Bench(0, 1, 2)
    bench.push(0, 1.0)
    bench.push(1, 5.0)
    assert bench.gathering.leave(1) == []
    assert sums(bench.gathering.leave(2)) == [(1, (0,), 1.0)]


def test_who_is_late_is_waited_for_again_only_after_it_has_come() -> None:
    bench = Bench(0, 1)
    bench.push(0)
    assert sums(bench.tick(1.9)) == []
    assert sums(bench.tick(0.1)) == [(1, (0,), 1.0)]
    assert sums(bench.push(0)) == [(2, (0,), 1.0)]
    assert sums(bench.push(1)) == []
    assert sums(bench.push(0)) == [(3, (0, 1), 2.0)]


def test_all_are_answered_and_who_is_not_spoken_of_pushes_by_itself() -> None:
    bench = Bench(0, 1)
    bench.push(0)
    bench.push(1)
    message = PushedTogether(4, (MemberAnswer(1, Applied(4), 0, True),))
    out = bench.gathering.answered(1, message, VALUES)
    assert told(out) == {
        "to 1": PushReply(Applied(4), 4, 0, True),
        "to 0": Refused("apart", "the server does not speak of it", 0),
    }
    assert out[0].payload is VALUES  # type: ignore[union-attr]
    assert bench.gathering.answered(1, message, VALUES) == []


def test_a_refusal_sends_all_to_the_server_by_themselves() -> None:
    bench = Bench(0, 1)
    bench.push(0)
    bench.push(1)
    apart = Refused("apart", "because", 3)
    out = bench.gathering.refused(1, apart)
    assert told(out) == dict.fromkeys(("to 0", "to 1"), Refused("apart", "because", 0))


def test_all_push_by_themselves_while_the_server_is_out_of_reach() -> None:
    bench = Bench(0, 1, 2)
    bench.push(0)
    bench.gathering.leave(2)
    bench.push(1)
    bench.gathering.enlist(2)
    bench.push(0)
    lost = Refused("apart", "the aggregator has lost its connection to the server", 0)
    out = bench.gathering.disconnect()
    assert told(out) == {"to 0": lost, "to 1": lost}
    none = Refused("apart", "the aggregator has no connection to the server", 0)
    assert told(bench.push(2)) == {"to 2": none}
    bench.gathering.connect()
    bench.push(0)
    bench.push(1)
    assert sums(bench.push(2)) == [(2, (0, 1, 2), 3.0)]


def test_the_first_updates_wait_for_the_connection() -> None:
    bench = Bench(0, 1, connected=False)
    assert bench.push(0) == []
    assert bench.push(1) == []
    assert bench.tick(1.9) == []
    assert sums(bench.gathering.connect()) == [(1, (0, 1), 2.0)]
    one_comes_later = Bench(0, 1, connected=False)
    one_comes_later.push(0)
    assert one_comes_later.gathering.connect() == []
    assert sums(one_comes_later.push(1)) == [(1, (0, 1), 2.0)]


def test_the_first_updates_do_not_wait_for_ever() -> None:
    bench = Bench(0, 1, connected=False)
    bench.push(0)
    none = Refused("apart", "the aggregator has no connection to the server", 0)
    assert told(bench.tick(2.0)) == {"to 0": none}
    assert told(bench.push(1)) == {"to 1": none}, "nobody waits a second time"
    assert bench.gathering.connect() == []
    bench.push(0)
    assert sums(bench.push(1)) == [(1, (0, 1), 2.0)]


def test_who_waits_hears_for_whom() -> None:
    bench = Bench(0, 1)
    bench.push(0)
    bench.tick(1.0)
    bench.push(1)
    bench.push(0)
    bench.gathering.waiting(1, Waiting("round 1", ("worker:9",), 3.0))
    out = told(bench.tick(NOTICE_SECONDS))
    assert out["to 1"] == Waiting("round 1", ("worker:9",), NOTICE_SECONDS)
    late = Bench(0, 1)
    late.push(0)
    late._patience = None  # type: ignore[attr-defined]
    late.gathering._patience = 100.0
    assert told(late.tick(NOTICE_SECONDS)) == {
        "to 0": Waiting("the updates of this host", ("worker:1",), NOTICE_SECONDS)
    }


@given(st.lists(st.tuples(st.sampled_from(("push", "leave", "tick", "cut")), st.integers(0, 3))))
def test_every_update_is_answered_sent_or_waits_for_another(events: list[tuple[str, int]]) -> None:
    bench = Bench(0, 1, 2, 3)
    under_way: set[int] = set()
    numbers: dict[int, set[int]] = {}
    for what, worker in events:
        if what == "push" and worker not in under_way:
            bench.gathering.connect()
            out = bench.push(worker)
            under_way.add(worker)
        elif what == "leave":
            out = bench.gathering.leave(worker)
            under_way.discard(worker)
            bench.gathering.enlist(worker)
        elif what == "tick":
            out = bench.tick(2.0)
        elif what == "cut":
            out = bench.gathering.disconnect()
            assert {route for route in told(out)} == {f"to {w}" for w in under_way}
            under_way.clear()
            numbers.clear()
        else:
            continue
        for number, members, _ in sums(out):
            numbers[number] = set(members)
            assert numbers[number] <= under_way
    # Everybody who waits is in one sum at most; the rest goes when time has passed.
    for number, members, _ in sums(bench.tick(2.0)):
        numbers[number] = set(members)
    for number, members in numbers.items():
        answers = tuple(MemberAnswer(w, Applied(1), 0, False) for w in sorted(members))
        out = bench.gathering.answered(number, PushedTogether(1, answers), VALUES)
        answered = {int(str(route).removeprefix("to ")) for route in told(out)}
        assert answered <= under_way
        under_way -= answered
    assert not under_way
