"""When checks are due, how much time digests may take, and what is said of what they find."""

from __future__ import annotations

import pytest

from trireme.corruption.checks import Checks
from trireme.errors import ConfigurationError, CorruptedValues
from trireme.job_config import JobConfig
from trireme.monitor.recording import CORRUPTED


def config(every: int = 10, **options: object) -> JobConfig:
    return JobConfig().replaced("file", check_every=every, **options)


def test_a_check_is_due_at_each_multiple_that_is_reached_or_passed() -> None:
    checks = Checks(config(10), pytest.fail)
    assert [step for step in range(1, 31) if checks.due(step - 1, step)] == [10, 20, 30]
    assert checks.due(8, 24)


def test_what_to_do_needs_something_to_compare() -> None:
    alone = JobConfig().replaced("command line", on_corruption="heal")
    with pytest.raises(ConfigurationError, match="add --check-every N"):
        Checks(alone, pytest.fail)
    checks = Checks(alone.replaced("file", check_every=5), pytest.fail)
    assert (checks.every, checks.heals) == (5, True)
    checks = Checks(JobConfig(), pytest.fail)
    assert (checks.every, checks.heals) == (0, False)


def test_digests_between_checks_take_their_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("trireme.corruption.checks.perf_counter", lambda: now[0])
    checks = Checks(config(10), pytest.fail)
    assert checks.wants(1, 2)
    with checks.spending():
        now[0] += 1.0
    assert not checks.wants(1, 2) and checks.wants(9, 10)
    now[0] += 498.0
    assert not checks.wants(1, 2)
    now[0] += 1.0
    assert checks.wants(1, 2)


def test_copies_that_stay_different_are_said_once_and_again_when_they_were_alike() -> None:
    said: list[str] = []
    checks = Checks(config(), said.append)
    assert checks.status() == {"corruptions": 0}
    for step, other in enumerate((2, 2, 1, 3)):
        copies = {"ps:0": {"a": 1}, "ps:1": {"a": other}}
        assert checks.compare("shard 1", step, copies) == ([], [])
    text = "corrupted values: ps:0 and ps:1 have different values of shard 1 at step {}, in a; "
    text += "nothing says who is right"
    assert said == [text.format(0), text.format(3)]
    assert checks.status() == {"corruptions": 2, CORRUPTED: said[-1]}


def test_what_ends_the_job_is_said_by_its_error_and_kept_for_other_threads() -> None:
    checks = Checks(config(on_corruption="stop"), pytest.fail)
    assert checks.error is None
    with pytest.raises(CorruptedValues, match="corrupted values: a push") as raised:
        checks.found("a push")
    assert checks.error is raised.value
    assert checks.status()["corruptions"] == 1


def test_what_is_found_again_and_again_ends_a_job_that_heals() -> None:
    said: list[str] = []
    checks = Checks(config(on_corruption="heal"), said.append)
    for what in ("one", "one", "one", "other", "one", "one", "one"):
        checks.found(what)
    with pytest.raises(CorruptedValues, match="corrupted values: one"):
        checks.found("one")
    assert len(said) == 7
