"""When checks are due, how much time digests may take, and what is said of what they find."""

from __future__ import annotations

import pytest

from trireme.corruption.checks import Checks
from trireme.errors import ConfigurationError, CorruptedValues
from trireme.job_config import JobConfig
from trireme.monitor.records import CORRUPTED


def config(every: int = 10, **options: object) -> JobConfig:
    return JobConfig().replaced("file", check_every=every, **options)


def test_a_check_is_due_at_each_multiple_that_is_reached_or_passed() -> None:
    checks = Checks(config(10), pytest.fail)
    assert [step for step in range(1, 31) if checks.due(step - 1, step)] == [10, 20, 30]
    assert checks.due(8, 24)
    assert not Checks(JobConfig(), pytest.fail).due(0, 100)


def test_what_to_do_needs_something_to_compare() -> None:
    alone = JobConfig().replaced("command line", on_corruption="heal")
    with pytest.raises(ConfigurationError, match="add --check-every N"):
        Checks(alone, pytest.fail)
    checks = Checks(alone.replaced("file", check_every=5), pytest.fail)
    assert (checks.every, checks.action) == (5, "heal")
    checks = Checks(JobConfig(), pytest.fail)
    assert (checks.every, checks.action, checks.status()) == (0, "warn", {})


def test_digests_between_checks_take_their_share_of_the_time() -> None:
    now = [0.0]
    checks = Checks(config(10), pytest.fail, lambda: now[0])
    assert checks.wants(1, 2)
    with checks.spending():
        now[0] += 1.0
    assert not checks.wants(1, 2) and checks.wants(9, 10)
    now[0] += 498.0
    assert not checks.wants(1, 2)
    now[0] += 1.0
    assert checks.wants(1, 2)
    assert not Checks(JobConfig(), pytest.fail).wants(1, 2)


def test_what_stays_so_is_said_once_and_again_when_it_was_settled() -> None:
    said: list[str] = []
    checks = Checks(config(), said.append)
    assert checks.status() == {"corruptions": 0}
    for step in (1, 2):
        checks.found(f"shard 1 at {step}", 1)
    checks.found("a push")
    checks.found("a push")
    assert said == ["corrupted values: shard 1 at 1", *["corrupted values: a push"] * 2]
    checks.settled(1)
    checks.found("shard 1 at 9", 1)
    assert checks.status() == {"corruptions": 4, CORRUPTED: "corrupted values: shard 1 at 9"}


def test_what_ends_the_job_is_said_by_its_error_in_each_thread() -> None:
    checks = Checks(config(on_corruption="stop"), pytest.fail)
    checks.raise_found()
    for again in (lambda: checks.found("a push"), checks.raise_found):
        with pytest.raises(CorruptedValues, match="corrupted values: a push"):
            again()
    assert checks.status()["corruptions"] == 1
