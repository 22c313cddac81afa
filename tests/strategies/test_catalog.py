"""Strategies by name, and what their options may be."""

from __future__ import annotations

import pytest

from trireme.errors import ConfigurationError
from trireme.ps.rule import Rule
from trireme.strategies import Averaging, DiLoCo, Strategy, Sync, resolve


@pytest.mark.parametrize(
    ("options", "strategy", "rule"),
    [
        ({"name": "averaging"}, Averaging(16), Rule(0, 0, every=16)),
        ({"name": "averaging", "every": 4}, Averaging(4), Rule(0, 0, every=4)),
        ({"name": "averaging", "staleness": 2}, Averaging(16, 2), Rule(1, 2, every=16)),
        ({"name": "diloco"}, DiLoCo(100), Rule(0, 0, every=100)),
        ({"name": "diloco", "every": 7, "aggregate": 2}, DiLoCo(7, 2), Rule(2, 0, every=7)),
    ],
)
def test_names_and_options(options: dict[str, int], strategy: Strategy, rule: Rule) -> None:
    found = resolve(**options)  # type: ignore[arg-type]
    assert found == strategy
    assert found.rule() == rule


def test_the_servers_optimizer_over_deltas() -> None:
    assert Averaging().outer(3) == {"lr": 1.0}
    assert Averaging(staleness=1).outer(4) == {"lr": 0.25}
    assert Averaging(staleness=1, share=0.5).outer(4) == {"lr": 0.5}
    assert DiLoCo().outer(4) == {"lr": 0.9, "momentum": 0.5, "nesterov": True}
    assert DiLoCo(outer_momentum=0.0).outer(4) == {"lr": 0.9, "momentum": 0.0, "nesterov": False}
    assert Sync().outer(4) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "averaging", "aggregate": 1}, "--aggregate 1 is for sync and diloco"),
        ({"name": "diloco", "staleness": 1}, "--staleness 1 is for ssp and averaging"),
        ({"name": "sync", "every": 4}, "--every 4 is for averaging and diloco, not for sync"),
        ({"name": "averaging", "prefetch": True}, "--prefetch is for async and ssp, not for av"),
        ({"name": "averagin"}, "did you mean 'averaging'"),
    ],
)
def test_options_of_other_strategies_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolve(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (Averaging(0), "every is 0"),
        (Averaging(staleness=0), "averaging with staleness 0: give 1 or more"),
        (Averaging(share=0.5), "needs a staleness"),
        (Averaging(staleness=1, share=1.5), "above 0 and at most 1"),
        (DiLoCo(0), "every is 0"),
        (DiLoCo(aggregate=0), "a round needs at least one delta"),
        (DiLoCo(outer_lr=0.0), "must be above 0"),
        (DiLoCo(outer_momentum=1.0), r"in \[0, 1\)"),
    ],
)
def test_values_out_of_range_are_refused(strategy: Strategy, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        strategy.rule()


def test_a_round_must_be_able_to_fill() -> None:
    DiLoCo(aggregate=3).check(workers=3, servers=1)
    with pytest.raises(ConfigurationError, match="give at most --aggregate 2"):
        DiLoCo(aggregate=3).check(workers=2, servers=1)
