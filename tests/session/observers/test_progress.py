from __future__ import annotations

import io
import timeit

import pytest
from rich.console import Console

from tests.clocks import VirtualClock
from trireme.clock import MonotonicClock
from trireme.session.observers.progress import (
    LiveProgress,
    PlainProgress,
    Progress,
    ProgressRow,
    make_progress,
    summary_line,
)


class Result:
    """A step's outcome that counts how often it was looked at."""

    def __init__(self) -> None:
        self.looks = 0

    @property
    def loss(self) -> float:
        self.looks += 1
        return 1 / 8

    @property
    def metrics(self) -> dict[str, float]:
        return {"accuracy": 0.97}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def live(clock: VirtualClock, max_steps: int | None = None) -> tuple[LiveProgress, io.StringIO]:
    stream = Terminal()
    console = Console(
        file=stream, force_terminal=True, width=100, color_system=None, legacy_windows=False
    )
    return LiveProgress(console, clock, max_steps=max_steps), stream


def train(progress: Progress, clock: VirtualClock, steps: range, seconds: float) -> None:
    for step in steps:
        clock.advance(seconds)
        progress.step(ProgressRow(step, 2 * step, 100.0 * step, Result()))


def test_plain_lines() -> None:
    clock, stream = VirtualClock(), io.StringIO()
    progress = PlainProgress(stream, clock, max_steps=4000, log_every=100)
    progress.state("joining")
    progress.state("restoring", "step 1200")
    train(progress, clock, range(1100, 1301), 0.01)
    progress.message("checkpoint step-000001300 is damaged")
    progress.close()
    assert stream.getvalue().splitlines() == [
        "joining",
        "restoring step 1200",
        "step 1100 (global 2200/4000) loss 0.125 accuracy 0.97",
        "step 1200 (global 2400/4000) loss 0.125 accuracy 0.97 10,000 examples/s",
        "step 1300 (global 2600/4000) loss 0.125 accuracy 0.97 10,000 examples/s",
        "checkpoint step-000001300 is damaged",
    ]


def test_plain_lines_come_now_and_then_where_steps_are_slow() -> None:
    clock, stream = VirtualClock(), io.StringIO()
    progress = PlainProgress(stream, clock, log_every=1000)
    train(progress, clock, range(1, 9), 12.0)
    assert stream.getvalue().splitlines() == [
        "step 4 (global 8) loss 0.125 accuracy 0.97 8.3 examples/s",
        "step 7 (global 14) loss 0.125 accuracy 0.97 8.3 examples/s",
    ]


def test_a_row_without_loss_or_metrics() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream, VirtualClock(), log_every=1)
    progress.step(ProgressRow(1, 1, 0))
    assert stream.getvalue() == "step 1 (global 1)\n"


def test_waiting_names_who_and_does_not_repeat_itself() -> None:
    clock, stream = VirtualClock(), io.StringIO()
    progress = PlainProgress(stream, clock)
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
    progress = PlainProgress(stream, VirtualClock())
    progress.waiting([f"worker:{i}" for i in range(8)], 3.0)
    assert "worker:5 and 2 more (3 s left)" in stream.getvalue()
    assert "worker:6" not in stream.getvalue()


def test_waiting_for_an_update_says_why() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream, VirtualClock())
    progress.waiting_for_update("the round's last update", ["worker:1"], 12.3)
    live_progress, terminal = live(VirtualClock())
    live_progress.waiting_for_update("the round's last update", ["worker:1"], 12.3)
    live_progress.close()
    line = "waiting for worker:1 (the round's last update; 12 s so far)"
    assert stream.getvalue() == line + "\n"
    assert line in terminal.getvalue()


def test_warnings_are_never_lost(caplog: pytest.LogCaptureFixture) -> None:
    Progress().warn("100% lost")
    assert caplog.messages == ["100% lost"]
    stream = io.StringIO()
    PlainProgress(stream, VirtualClock()).warn("[lost]")
    live_progress, terminal = live(VirtualClock())
    live_progress.warn("[lost]")
    live_progress.close()
    assert stream.getvalue() == "warning: [lost]\n"
    assert "warning: [lost]\n" in terminal.getvalue()


def test_a_live_line_shows_everything_and_leaves_the_last_step() -> None:
    clock = VirtualClock()
    progress, stream = live(clock, max_steps=4000)
    progress.state("waiting for the cluster")
    assert "waiting for the cluster" in stream.getvalue()
    progress.waiting(["worker:1"], 294.0)
    assert "waiting for worker:1 (294 s left)" in stream.getvalue()
    train(progress, clock, range(1000, 1101), 0.01)
    shown = stream.getvalue()
    assert "10,000 examples/s 0:09 left" in shown
    assert "━" in shown
    progress.message("[a message]")
    assert "[a message]" in stream.getvalue()
    before = len(stream.getvalue())
    progress.close()
    progress.close()
    final = stream.getvalue()[before:]
    assert final.endswith(
        "step 1100 (global 2200/4000) loss 0.125 accuracy 0.97 10,000 examples/s\n"
    )
    assert final.count("\x1b[2Kstep 1100") == 1


def test_what_is_told_after_training_comes_below_its_last_step() -> None:
    clock = VirtualClock()
    progress, stream = live(clock)
    train(progress, clock, range(1, 101), 0.01)
    before = len(stream.getvalue())
    progress.training_ended()
    progress.message("saved step-000000100")
    progress.close()
    after = stream.getvalue()[before:]
    assert after.count("step 100 (global 200)") == 1
    assert after.index("step 100 (global 200)") < after.index("saved step-000000100")


def test_a_live_line_is_one_line_on_a_narrow_terminal() -> None:
    stream = Terminal()
    console = Console(file=stream, force_terminal=True, width=30, color_system=None)
    progress = LiveProgress(console, VirtualClock(), max_steps=10)
    progress.state("waiting for the cluster, and for much else")
    progress.state("finished")
    assert "waiting for the cluster" in stream.getvalue()
    assert "\n" not in stream.getvalue()
    progress.close()


def test_a_live_line_is_not_drawn_at_every_step() -> None:
    clock = VirtualClock()
    progress, stream = live(clock)
    train(progress, clock, range(1, 1001), 0.001)
    assert 3 <= stream.getvalue().count("examples/s") <= 5
    progress.close()


def test_the_mode_chooses_the_display() -> None:
    assert type(make_progress("none")) is Progress
    assert type(make_progress("auto", stream=io.StringIO())) is PlainProgress
    assert type(make_progress("plain", stream=Terminal())) is PlainProgress


def test_a_terminal_gets_a_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    progress = make_progress("auto", stream=Terminal())
    assert isinstance(progress, LiveProgress)
    progress.close()
    monkeypatch.setenv("TERM", "dumb")
    assert type(make_progress("auto", stream=Terminal())) is PlainProgress


def test_the_default_is_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    make_progress("plain").state("joining")
    assert capsys.readouterr().out == "joining\n"


@pytest.mark.parametrize(
    ("seconds", "examples", "line"),
    [
        (3.2, 400_000, "4000 global steps in 3.2 s, 125,000 examples/s"),
        (100.04, 250, "4000 global steps in 100.0 s, 2.5 examples/s"),
        (0.0, 0, "4000 global steps in 0.0 s, 0.0 examples/s"),
    ],
)
def test_summary_line(seconds: float, examples: float, line: str) -> None:
    assert summary_line(4000, seconds, examples) == line


@pytest.mark.parametrize("kind", ["plain", "live"])
def test_a_step_that_is_not_shown_costs_next_to_nothing(kind: str) -> None:
    console = Console(file=Terminal(), force_terminal=True)
    progress: Progress
    if kind == "plain":
        progress = PlainProgress(io.StringIO(), MonotonicClock(), log_every=10**9)
    else:
        progress = LiveProgress(console, MonotonicClock())
    result = Result()
    best = min(
        timeit.repeat(lambda: progress.step(ProgressRow(1, 1, 1, result)), number=500, repeat=20)
    )
    assert best / 500 < 5e-6
    assert result.looks <= 1
    progress.close()
