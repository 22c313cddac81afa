from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest

from benchmarks.pairs import Interleaved, Plan, Sample, Spread, interleave, paired_ratio


@dataclass
class Counter:
    """Gives 1, 2, 3, ... and writes down when it was asked."""

    name: str
    log: list[str] = field(default_factory=list)
    fails_at: int = 0
    _asked: int = 0

    def measure(self) -> Sample:
        self._asked += 1
        self.log.append(self.name)
        if self._asked == self.fails_at:
            raise RuntimeError("out of order")
        return Sample(float(self._asked))


def test_contenders_take_turns_and_the_warm_up_does_not_count() -> None:
    log: list[str] = []
    result = interleave([Counter("a", log), Counter("b", log)], Plan(rounds=3, warmup=1))
    assert log == ["a", "b"] * 4
    assert result.values("a") == [2.0, 3.0, 4.0]


def test_one_that_fails_is_left_out_and_the_others_go_on() -> None:
    result = interleave([Counter("a"), Counter("b", fails_at=3)], Plan(rounds=4))
    assert result.values("a") == [2.0, 3.0, 4.0, 5.0]
    assert "b" not in result.samples
    assert result.failed == {"b": "RuntimeError: out of order"}


def test_the_rounds_of_several_starts_are_one_and_say_which_they_are_of() -> None:
    measured = Interleaved()
    for start in range(2):
        measured.extend(interleave([Counter("a"), Counter("b")], Plan(rounds=2)), start)
    assert measured.values("a") == [2.0, 3.0, 2.0, 3.0]
    assert [sample.start for sample in measured.samples["b"]] == [0, 0, 1, 1]


def test_one_that_fails_at_a_later_start_has_no_figures_of_the_first_either() -> None:
    measured = Interleaved()
    measured.extend(interleave([Counter("a"), Counter("b")], Plan(rounds=2)), 0)
    measured.extend(interleave([Counter("a"), Counter("b", fails_at=3)], Plan(rounds=2)), 1)
    assert list(measured.samples) == ["a"]
    assert list(measured.failed) == ["b"]


def test_no_round_begins_after_the_seconds_are_over_once_there_are_enough() -> None:
    times = iter(range(0, 1000, 10))
    plan = Plan(rounds=50, warmup=0, seconds=25, least=2)
    result = interleave([Counter("a")], plan, clock=lambda: float(next(times)))
    assert len(result.values("a")) == 4  # asked at 10 and 20, and stopped at 30


def test_there_are_at_least_so_many_rounds_however_long_they_take() -> None:
    times = iter(range(0, 100_000, 1000))
    plan = Plan(rounds=50, warmup=1, seconds=1, least=3)
    result = interleave([Counter("a")], plan, clock=lambda: float(next(times)))
    assert len(result.values("a")) == 3


def test_a_ratio_is_of_figures_of_the_same_round() -> None:
    # The machine was half as fast in two rounds of three: the ratio does not see it.
    assert paired_ratio([10, 5, 5], [20, 10, 10]) == 0.5
    # Not the ratio of the medians, which would be 1.
    assert paired_ratio([1, 2, 30], [2, 1, 2]) == 2.0


def test_rounds_without_a_partner_do_not_count() -> None:
    assert paired_ratio([1, 1, 100], [2, 2]) == 0.5
    with pytest.raises(ValueError, match="no pair"):
        paired_ratio([], [1.0])


def test_a_spread_is_of_quartiles_where_there_are_enough_figures() -> None:
    assert Spread.of([5, 1, 3, 2, 4]) == Spread(2, 3, 4)
    assert Spread.of([3, 1]) == Spread(1, 2, 3)
    with pytest.raises(ValueError, match="no figures"):
        Spread.of([])


def test_a_sample_whose_processor_time_is_not_known_says_so() -> None:
    assert math.isnan(Sample(1.0).cpu_seconds)
