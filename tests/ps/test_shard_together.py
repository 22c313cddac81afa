"""The updates of several workers as one sum: all of them count, or none."""

from __future__ import annotations

import pytest

from tests.ps.bench import SYNC, Bench, applied, payload_of, told
from trireme.ps.instructions import Instruction, Reply
from trireme.ps.messages import Duplicate, Refused, WorkerProgress
from trireme.ps.rule import Rule


def apart(instructions: list[Instruction]) -> dict[object, str]:
    """Who shall push by itself, and why."""
    return {
        each.route: each.message.reason
        for each in instructions
        if isinstance(each, Reply)
        and isinstance(each.message, Refused)
        and each.message.code == "apart"
    }


def test_a_sum_and_a_single_update_make_a_round() -> None:
    bench = Bench(SYNC, workers=(0, 1, 2))
    assert bench.push_together((0, 1, 2.0), (2, 1, 4.0)) == []
    out = bench.push(1, 1, 6.0)
    assert told(out) == [
        ("sum 0.1", applied(1)),
        ("push 1.1", applied(1)),
        ("sum 2.1", applied(1)),
    ]
    assert payload_of(out, "sum 2.1") == [96.0]
    assert [row.applied for row in bench.table] == [1, 1, 1]
    assert bench.counters == {"applied": 3.0, "rounds": 1.0, "together": 1.0}


def test_two_sums_are_weighted_by_what_is_in_them() -> None:
    bench = Bench(SYNC, workers=(0, 1, 2, 3))
    bench.push_together((0, 1, 2.0), (1, 1, 4.0), weights=(3.0, 3.0))
    bench.push_together((2, 1, 8.0), (3, 1, 20.0), weights=(1.0, 0.0))
    assert bench.value == pytest.approx(100 - (3 * 2 + 3 * 4 + 8) / 7)


def test_a_sum_in_which_nothing_weighs_is_a_step() -> None:
    bench = Bench(SYNC)
    out = bench.push_together((0, 1, 2.0), (1, 1, 4.0), weights=(0.0, 0.0))
    assert [message for _, message in told(out)] == [applied(1), applied(1)]
    assert bench.value == 100.0


def test_a_sum_is_clipped_as_its_mean() -> None:
    bench = Bench(Rule(aggregate=0, staleness=0, clip_norm=4.0))
    bench.push_together((0, 1, 3.0), (1, 1, 5.0))
    assert bench.value == pytest.approx(99.0, rel=1e-6)


def test_nothing_of_a_sum_with_an_update_that_was_decided_counts() -> None:
    bench = Bench(SYNC)
    bench.push(0)
    bench.push(1)
    out = bench.push_together((0, 2, 5.0), (1, 1, 5.0))
    assert apart(out) == dict.fromkeys(
        ["sum 0.2", "sum 1.1"], "push 1 of worker:1 was decided already"
    )
    assert bench.value == 99.0
    bench.push(0, 2, 3.0)
    bench.push(1, 2, 5.0)
    assert bench.value == 95.0


def test_nothing_of_a_sum_counts_with_an_update_that_is_here_already() -> None:
    bench = Bench(SYNC)
    bench.push(0, 1, 2.0)
    out = bench.push_together((0, 1, 2.0), (1, 1, 4.0))
    assert set(apart(out)) == {"sum 0.1", "sum 1.1"}
    assert told(bench.push(1, 1, 4.0)) == [("push 0.1", applied(1)), ("push 1.1", applied(1))]
    assert bench.value == 97.0


def test_who_comes_by_itself_while_the_sum_waits_gets_only_the_answer_there() -> None:
    bench = Bench(SYNC, workers=(0, 1, 2))
    bench.push_together((0, 1, 2.0), (1, 1, 4.0))
    assert bench.push(1, 1, 4.0) == []
    assert told(bench.push(2, 1, 6.0)) == [
        ("sum 0.1", applied(1)),
        ("push 1.1", applied(1)),
        ("push 2.1", applied(1)),
    ]
    assert bench.value == 96.0


def test_who_comes_by_itself_after_the_sum_was_decided_is_told_of_that() -> None:
    bench = Bench(SYNC)
    bench.push_together((0, 1, 2.0), (1, 1, 4.0))
    (_, answer), *_ = told(bench.push(1, 1, 4.0))
    assert isinstance(answer.verdict, Duplicate)  # type: ignore[attr-defined]
    assert bench.value == 97.0


def test_a_sum_is_taken_back_when_one_of_its_workers_is_lost() -> None:
    bench = Bench(SYNC, workers=(0, 1, 2))
    bench.push_together((0, 1, 2.0), (1, 1, 4.0))
    reason = "a worker whose update was in the sum is out"
    assert apart(bench.view(0, 2)) == {"sum 0.1": reason, "sum 1.1": reason}
    bench.push(0, 1, 2.0)
    assert told(bench.push(2, 1, 6.0)) == [("push 0.1", applied(1)), ("push 2.1", applied(1))]
    assert bench.value == 96.0
    assert bench.table[1] == WorkerProgress(1, 1, 0, 0, 0)


def test_a_sum_is_taken_back_when_one_of_its_workers_retires() -> None:
    bench = Bench(SYNC, workers=(0, 1, 2))
    bench.push_together((0, 1, 2.0), (1, 1, 4.0))
    assert set(apart(bench.retire(1))) == {"sum 0.1", "sum 1.1"}
    bench.push(0, 1, 2.0)
    bench.push(2, 1, 6.0)
    assert bench.value == 96.0


def test_a_sum_waits_for_a_copy_and_is_decided_after_it() -> None:
    bench = Bench(SYNC)
    bench.freeze()
    assert bench.push_together((0, 1, 2.0), (1, 1, 4.0)) == []
    out = bench.cut(0, (0, 0), (1, 0))
    assert [route for route, _ in told(out)] == ["cut 7", "sum 0.1", "sum 1.1"]
    assert bench.value == 97.0


def test_a_sum_that_waits_for_a_copy_is_taken_back_with_its_worker() -> None:
    bench = Bench(SYNC)
    bench.freeze()
    bench.push_together((0, 1, 2.0), (1, 1, 4.0))
    assert set(apart(bench.view(0))) == {"sum 0.1", "sum 1.1"}
    bench.push(0, 1, 2.0)
    assert bench.value == 98.0


@pytest.mark.parametrize(
    ("rule", "servers"),
    [(Rule(), 1), (Rule(aggregate=1, staleness=0), 1), (SYNC, 2)],
    ids=["async", "backup", "two servers"],
)
def test_only_one_server_that_waits_for_all_takes_a_sum(rule: Rule, servers: int) -> None:
    bench = Bench(rule, servers=servers)
    out = bench.push_together((0, 1, 2.0), (1, 1, 4.0))
    assert apart(out) == dict.fromkeys(
        ["sum 0.1", "sum 1.1"], "only one server that waits for every worker takes updates as a sum"
    )


def test_a_sum_is_refused_where_one_update_is_fenced_stale_or_makes_no_sense() -> None:
    bench = Bench(SYNC)
    parts = ((0, 1, 2.0), (1, 1, 4.0))
    assert apart(bench.push_together(*parts, incarnations=(1, 9)))
    assert apart(bench.push_together(*parts, view=7))
    assert apart(bench.push_together(*parts, weights=(1.0, float("inf"))))
    assert apart(bench.push_together((0, 1, 2.0), (0, 1, 2.0)))
    assert apart(bench.push_together((1, 1, 2.0), (0, 1, 2.0)))
    bench.push_together(*parts)
    assert apart(bench.push_together((0, 2, 2.0), (1, 2, 2.0), pulled=(1, 0)))
    assert bench.value == 97.0


def test_no_sum_is_taken_after_the_end() -> None:
    bench = Bench(SYNC)
    bench.set_end(1)
    bench.push_together((0, 1, 2.0), (1, 1, 4.0))
    assert apart(bench.push_together((0, 2, 2.0), (1, 2, 2.0))) == dict.fromkeys(
        ["sum 0.2", "sum 1.2"], "the job is over"
    )
