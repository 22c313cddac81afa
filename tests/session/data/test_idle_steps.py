"""A worker that has no examples while others still have some."""

from __future__ import annotations

from unittest import mock

from trireme.session.data.idle_steps import IdleSteps


def test_who_waits_long_for_the_examples_of_others_says_so() -> None:
    worker = mock.MagicMock()
    worker.setup.settings.rule.staleness = None
    waits: list[float] = []
    idle = IdleSteps(worker, flush=lambda: None, sleep=waits.append)
    while sum(waits) < 29:
        idle.wait(awaited=False)
    told = worker.progress.waiting_for_update
    told.assert_not_called()
    while sum(waits) < 59:
        idle.wait(awaited=False)
    told.assert_called_once()
    reason, names, seconds = told.call_args.args
    assert (reason, names) == ("for the examples that they hold", ("other workers",))
    assert 30 <= seconds <= 31
    idle.over()
    waits.clear()
    while sum(waits) < 29:
        idle.wait(awaited=False)
    told.assert_called_once()
