"""Deltas at a shard: updates of several steps of their workers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ps.bench import Bench, applied, snapshot_of, told
from trireme.errors import ConfigurationError
from trireme.ps.messages import (
    Applied,
    GroupSpec,
    OptimizerSpec,
    PullReply,
    PushReply,
    RejectedVerdict,
    Stale,
)
from trireme.ps.rule import Average, Rule

EVERY = 8
ROUNDS = Rule(aggregate=0, staleness=0, every=EVERY)
ONE_BY_ONE = Rule(aggregate=1, staleness=1000, every=EVERY)
MEAN = OptimizerSpec("SGD", (GroupSpec({"lr": 1.0}),))


def test_a_round_makes_as_many_steps_as_the_longest_delta_in_it() -> None:
    bench = Bench(ROUNDS)
    bench.push(0, 1, 2.0, steps=EVERY)
    assert told(bench.push(1, 1, 4.0, steps=EVERY - 3)) == [
        ("push 0.1", applied(EVERY)),
        ("push 1.1", applied(EVERY)),
    ]
    assert bench.value == 97.0


def test_a_delta_of_a_round_that_was_closed_is_stale_however_long_it_is() -> None:
    bench = Bench(Rule(aggregate=1, staleness=0, every=EVERY))
    bench.push(0, 1, 2.0, steps=3)
    late = bench.push(1, 1, 50.0, pulled=0, steps=EVERY)
    assert told(late) == [("push 1.1", PushReply(Stale(3), 3, 3, False))]
    assert bench.value == 98.0


def test_the_outer_optimizer_takes_one_step_for_each_round() -> None:
    hyper = GroupSpec({"lr": 0.5, "momentum": 0.5, "nesterov": True})
    bench = Bench(ROUNDS, workers=(0,), optimizer=OptimizerSpec("SGD", (hyper,)))
    bench.push(0, 1, 8.0, steps=EVERY)
    assert bench.value == 100 - 0.5 * (8 + 0.5 * 8)
    bench.push(0, 2, 0.0, steps=2)
    assert bench.value == 94 - 0.5 * (0 + 0.5 * 4)
    assert bench.shard.state.step == EVERY + 2


@pytest.mark.parametrize(("rule", "most"), [(ROUNDS, EVERY), (Rule(), 1)])
@pytest.mark.parametrize("more", [0, 1])
def test_a_push_of_no_steps_or_too_many_is_refused(rule: Rule, most: int, more: int) -> None:
    bench = Bench(rule)
    steps = most + more if more else 0
    ((_, answer),) = told(bench.push(0, 1, 2.0, steps=steps))
    assert isinstance(answer, PushReply)
    assert isinstance(answer.verdict, RejectedVerdict)
    assert f"a push is of {steps} steps, and may be of 1 to {most}" in answer.verdict.reason
    assert bench.value == 100.0


def test_the_moving_average_decays_once_for_each_step() -> None:
    average = Average(0.5, warm_up=False)
    bench = Bench(Rule(aggregate=1, staleness=5, every=EVERY, average=average))
    bench.push(0, 1, 8.0, steps=3)
    _, numbers = snapshot_of(bench.snapshot())
    assert numbers == [92.0, 100 - 8 * (1 - 0.5**3)]


def test_the_moving_average_decays_once_for_each_step_of_a_round() -> None:
    average = Average(0.5, warm_up=False)
    bench = Bench(Rule(aggregate=0, staleness=0, every=EVERY, average=average))
    bench.push(0, 1, 8.0, steps=3)
    bench.push(1, 1, 8.0, steps=1)
    _, numbers = snapshot_of(bench.snapshot())
    assert numbers == [92.0, 100 - 8 * (1 - 0.5**3)]


def test_a_rule_without_sense_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="every is 0: it must be 1 step"):
        Rule(every=0).check()
    with pytest.raises(ConfigurationError, match="each worker clips its own"):
        Rule(0, 0, every=4, clip_norm=1.0).check()


@given(
    st.integers(1, 4),
    st.integers(0, 70),
    st.integers(0, 40),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, EVERY)), max_size=60),
    st.data(),
)
def test_one_by_one_a_job_ends_at_its_last_step_or_less_than_a_period_later(
    workers: int, last: int, asked_after: int, begun: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Workers push when chance has it; the end is set at the start, or while they train."""
    at_start = not asked_after
    rule = Rule(1, 1000, every=EVERY, max_steps=last if at_start else None)
    bench = Bench(rule, workers=range(workers), optimizer=MEAN)
    pulled: dict[int, int] = {}  # who computes, from which step
    sequence = dict.fromkeys(range(workers), 0)
    made, ended = 0, set()

    def hear(out: list) -> None:  # type: ignore[type-arg]
        nonlocal made
        for route, message in told(out):
            worker = int(str(route).split()[1].split(".")[0])
            if isinstance(message, PushReply):
                assert isinstance(message.verdict, Applied), "no work is lost"
            elif not isinstance(message, PullReply):
                continue
            if message.stop:
                ended.add(worker)
                bench.retire(worker)
            else:
                pulled[worker] = message.step

    for worker in range(workers):
        hear(bench.pull(worker, train=True))
    for turn in range(1000):
        if len(ended) == workers:
            break
        if turn == asked_after and not at_start:
            out = bench.stop()
            last = told(out)[0][1].step  # type: ignore[attr-defined]
            hear(out[1:])
            continue
        assert pulled, "everybody waits for somebody"
        worker, steps = begun[turn] if turn < len(begun) else (turn, EVERY)
        worker = sorted(pulled)[worker % len(pulled)]
        sequence[worker] += 1
        made += steps
        hear(bench.push(worker, sequence[worker], 1.0, pulled=pulled.pop(worker), steps=steps))
    assert len(ended) == workers
    assert bench.shard.state.step == made
    assert last <= made < last + EVERY
    assert bench.value == 100.0 - sum(sequence.values())
