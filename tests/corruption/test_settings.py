"""When checks are due, and how much time those between may take."""

from __future__ import annotations

import pytest

from trireme.corruption.settings import Budget, Settings
from trireme.errors import ConfigurationError
from trireme.job_config import JobConfig


def test_a_check_is_due_at_each_multiple_that_is_reached_or_passed() -> None:
    settings = Settings(10)
    assert [step for step in range(1, 31) if settings.due(step - 1, step)] == [10, 20, 30]
    assert settings.due(8, 24)
    assert not Settings().due(0, 100)


def test_what_to_do_needs_something_to_compare() -> None:
    config = JobConfig().replaced("command line", on_corruption="heal")
    with pytest.raises(ConfigurationError, match="add --check-every N"):
        Settings.of(config)
    assert Settings.of(config.replaced("file", check_every=5)) == Settings(5, "heal")
    assert Settings.of(JobConfig()) == Settings(0, "warn")


def test_digests_take_their_share_of_the_time() -> None:
    now = [0.0]
    budget = Budget(lambda: now[0])
    assert budget.allows()
    with budget.spending():
        now[0] += 1.0
    assert not budget.allows()
    now[0] += 498.0
    assert not budget.allows()
    now[0] += 1.0
    assert budget.allows()
