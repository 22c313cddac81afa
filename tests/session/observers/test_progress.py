from __future__ import annotations

import io

import pytest

from tests.clocks import VirtualClock
from trireme.session.observers.progress import Progress, pace_text
from trireme.session.result import StepResult


def result_of(step: int, loss: float | None = 1 / 8) -> StepResult:
    metrics = {} if loss is None else {"accuracy": 0.97}
    return StepResult(loss, [], {}, 100, 2 * step, _values=metrics)


def test_lines() -> None:
    clock, stream = VirtualClock(), io.StringIO()
    progress = Progress(stream, clock, max_steps=4000)
    progress.state("joining")
    progress.state("restoring", "step 1200")
    for step in (1100, 1200):
        clock.advance(1.0)
        progress.step(step, 100.0 * step, result_of(step))
    progress.message("checkpoint step-000001300 is damaged")
    assert stream.getvalue().splitlines() == [
        "joining",
        "restoring step 1200",
        "step 1100 (global 2200/4000) loss 0.125 accuracy 0.97",
        "step 1200 (global 2400/4000) loss 0.125 accuracy 0.97 10,000 examples/s",
        "checkpoint step-000001300 is damaged",
    ]


def test_a_step_without_loss_or_metrics() -> None:
    stream = io.StringIO()
    Progress(stream, VirtualClock()).step(1, 0.0, result_of(1, None))
    assert stream.getvalue() == "step 1 (global 2)\n"


def test_waiting_names_who_and_does_not_repeat_itself() -> None:
    clock, stream = VirtualClock(), io.StringIO()
    progress = Progress(stream, clock)
    for second in range(12):
        names = ["worker:1", "ps:0"] if second < 3 else ["worker:1"]
        progress.waiting(names, 294.4 - second)
        clock.advance(1.0)
    progress.waiting([], 10.0)
    progress.state("training")
    progress.waiting(["worker:1"], -1.0)
    assert stream.getvalue().splitlines() == [
        "waiting for worker:1, ps:0 (294 s left)",
        "waiting for worker:1 (291 s left)",
        "waiting for worker:1 (286 s left)",
        "training",
        "waiting for worker:1 (0 s left)",
    ]


def test_waiting_for_many_names_a_few() -> None:
    stream = io.StringIO()
    progress = Progress(stream, VirtualClock())
    progress.waiting([f"worker:{i}" for i in range(8)], 3.0)
    assert "worker:5 and 2 more (3 s left)" in stream.getvalue()
    assert "worker:6" not in stream.getvalue()


def test_waiting_for_an_update_says_why() -> None:
    stream = io.StringIO()
    progress = Progress(stream, VirtualClock())
    progress.waiting_for_update("the round's last update", ["worker:1"], 12.3)
    line = "waiting for worker:1 (the round's last update; 12 s so far)"
    assert stream.getvalue() == line + "\n"


def test_warnings_are_never_lost(caplog: pytest.LogCaptureFixture) -> None:
    Progress().warn("100% lost")
    assert caplog.messages == ["100% lost"]
    stream = io.StringIO()
    Progress(stream, VirtualClock()).warn("[lost]")
    assert stream.getvalue() == "warning: [lost]\n"


@pytest.mark.parametrize(
    ("pace", "text"), [(125_000.0, "125,000 examples/s"), (2.5, "2.5 examples/s")]
)
def test_pace(pace: float, text: str) -> None:
    assert pace_text(pace) == text
