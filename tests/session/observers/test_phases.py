from __future__ import annotations

import pytest

from tests.metric_values import value
from trireme.session.observers.phases import SERVED, Phases


def test_phases_are_summed_counted_and_told() -> None:
    phases, told = Phases(SERVED), []
    phases.add(("push", 1.0, 1.5))
    assert phases.totals["push"] == 0.5
    phases.observe(lambda *span: told.append(span))
    phases.add(("push", 2.0, 2.25))
    phases.add(("wait", 2.25, 3.25))
    assert phases.totals == {"data": 0.0, "compute": 0.0, "push": 0.75, "wait": 1.0}
    assert told == [("push", 2.0, 2.25), ("wait", 2.25, 3.25)]
    assert value(phases, "trireme_phase_seconds_count", phase="push") == 2


def test_a_phase_that_there_is_not_is_an_error() -> None:
    phases = Phases(SERVED)
    phases.add(("apply", 0.0, 1.0))
    with pytest.raises(KeyError):
        phases.settle()
