"""The one rule: which knobs make sense together."""

from __future__ import annotations

import pytest

from trireme.errors import ConfigurationError
from trireme.ps.rule import Average, Rule


@pytest.mark.parametrize(
    "rule",
    [
        Rule(),
        Rule(staleness=None),
        Rule(staleness=3),
        Rule(aggregate=0, staleness=0),
        Rule(aggregate=5, staleness=0, clip_norm=1.0),
        Rule(average=Average(0.0), max_steps=0),
    ],
)
def test_what_makes_sense_passes(rule: Rule) -> None:
    rule.check()


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (Rule(aggregate=-1, staleness=0), "aggregate is -1"),
        (Rule(staleness=-2), "staleness is -2"),
        (Rule(aggregate=2, staleness=None), "aggregate is 2: it must be 1 unless"),
        (Rule(aggregate=0, staleness=3), "aggregate is 0: it must be 1 unless"),
        (Rule(clip_norm=0.0), "clip_norm is 0.0"),
        (Rule(clip_norm=float("nan")), "clip_norm is nan"),
        (Rule(average=Average(1.0)), "average is .*decay=1.0"),
        (Rule(average=Average(-0.1)), "average is .*decay=-0.1"),
        (Rule(max_steps=-1), "max_steps is -1"),
    ],
)
def test_what_does_not_is_named(rule: Rule, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        rule.check()


def test_only_no_staleness_is_synchronous() -> None:
    assert Rule(aggregate=0, staleness=0).synchronous
    assert not Rule(staleness=1).synchronous
    assert not Rule(staleness=None).synchronous


def test_the_average_warms_up() -> None:
    average = Average(0.9)
    assert average.decay_at(0) == pytest.approx(0.1)
    assert average.decay_at(8) == pytest.approx(0.5)
    assert average.decay_at(1000) == 0.9
    assert Average(0.9, warm_up=False).decay_at(0) == 0.9
