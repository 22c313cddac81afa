from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from trireme.errors import ConfigurationError
from trireme.session.hooks import Hook
from trireme.tracking.early_stopping import EarlyStopping


@dataclass
class FakeSession:
    is_chief: bool = True
    stopped: list[str] = field(default_factory=list)

    def stop(self, reason: str) -> None:
        self.stopped.append(reason)


def evaluate(
    hook: Hook, values: list[float], session: FakeSession, name: str = "validation"
) -> list[str]:
    for value in values:
        hook.on_evaluate(cast(Any, session), name, {"accuracy": value, "loss": -value})
    return session.stopped


def test_early_stopping_waits_its_patience_from_the_last_best() -> None:
    hook, session = EarlyStopping("accuracy", 2, "max"), FakeSession()
    assert evaluate(hook, [0.5, 0.4, 0.6, 0.6], session) == []
    assert hook.best == 0.6
    assert evaluate(hook, [0.5], session) == [
        "accuracy of validation has not got better than 0.6 in 2 evaluations"
    ]
    assert len(evaluate(hook, [0.4, 0.3], session)) == 1


def test_early_stopping_on_what_shall_fall() -> None:
    hook, session = EarlyStopping("loss", 1), FakeSession()
    assert evaluate(hook, [0.1, 0.2, 0.3], session) == []
    assert hook.best == -0.3
    assert len(evaluate(hook, [0.3], session)) == 1


def test_a_small_gain_is_none() -> None:
    hook, session = EarlyStopping("accuracy", 2, "max", min_delta=0.01), FakeSession()
    assert len(evaluate(hook, [0.5, 0.505, 0.509], session)) == 1


def test_nan_is_never_the_best() -> None:
    hook, session = EarlyStopping("accuracy", 3, "max"), FakeSession()
    assert evaluate(hook, [math.nan, math.nan, 0.5, math.nan], session) == []
    assert hook.best == 0.5


def test_only_the_chief_and_only_the_named_evaluation_count() -> None:
    hook = EarlyStopping("accuracy", 1, "max")
    assert evaluate(hook, [0.5, 0.4, 0.3], FakeSession(is_chief=False)) == []
    assert evaluate(hook, [0.5, 0.4, 0.3], FakeSession(), "test") == []
    assert hook.best is None


def test_a_metric_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"'acuracy'.* it has accuracy, loss"):
        evaluate(EarlyStopping("acuracy", 1), [0.5], FakeSession())


@pytest.mark.parametrize("options", [{"mode": "up"}, {"patience": 0}, {"min_delta": -1.0}])
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        EarlyStopping(**{"metric": "loss", "patience": 1, **options})
