"""The progress display of a run: one live line on a terminal, plain lines elsewhere.

waiting for the cluster
waiting for worker:1 (294 s left)
restoring step 1200
training
step 1300 (global 2600/4000) loss 0.123 accuracy 0.97 12,345 examples/s
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Literal, NamedTuple, TextIO

from trireme.clock import Clock, MonotonicClock

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from trireme.session.result import StepResult

_log = logging.getLogger(__name__)

_SILENCE_SECONDS = 30.0
_REFRESH_SECONDS = 0.2
_NAMES_SHOWN = 6
_BAR_WIDTH = 20


class ProgressRow(NamedTuple):
    """One step."""

    step: int  # of this worker
    global_step: int
    examples: float  # so far, of this process or the job: their growth gives examples per second
    result: StepResult | None = None  # loss and metrics are read if they are shown: it may wait


class Progress:
    """Displays the progress of a session; this class shows nothing, and logs warnings."""

    def state(self, name: str, detail: str = "") -> None:
        """Shows a new state of the session, such as `restoring`, with a detail: `step 1200`."""

    def waiting(self, names: Sequence[str], seconds_left: float) -> None:
        """Shows the tasks that the cluster still waits for. May be called at any rate."""

    def waiting_for_update(self, reason: str, names: Sequence[str], seconds: float) -> None:
        """Shows that an answer is withheld for `seconds` so far, because of these tasks."""

    def step(self, row: ProgressRow) -> None:
        """Shows a step; called about ten times a second, and when a record is due."""

    def training_ended(self) -> None:
        """Ends the display of steps; messages and states may follow."""

    def message(self, text: str) -> None:
        """Shows a line of text."""

    def warn(self, text: str) -> None:
        """Shows a warning; a silent display logs it."""
        _log.warning(text)

    def close(self) -> None:
        """Ends the display and restores the terminal. Closing twice does nothing."""


class PlainProgress(Progress):
    """Writes lines, for files, pipes and logs.

    Where steps are slow, a line is written every 30 seconds.
    """

    repeat_seconds = 5.0
    """After how long a wait for the same tasks is shown again."""

    def __init__(
        self,
        stream: IO[str],
        clock: Clock,
        *,
        max_steps: int | None = None,
        log_every: int = 100,
        steps: bool = True,
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._max_steps = max_steps
        self._log_every = log_every
        self._steps = steps
        self._per_second: float | None = None
        self._mark: tuple[float, float] | None = None  # the time and the examples of the last line
        self._waiting_for: tuple[str, ...] = ()
        self._waiting_since = 0.0

    def state(self, name: str, detail: str = "") -> None:
        self._waiting_for = ()
        self._show(f"{name} {detail}".rstrip())

    def waiting(self, names: Sequence[str], seconds_left: float) -> None:
        now = self._clock.now()
        news = tuple(names) != self._waiting_for
        if names and (news or now - self._waiting_since >= self.repeat_seconds):
            self._waiting_for, self._waiting_since = tuple(names), now
            self._show(_waiting_text(names, f"{max(seconds_left, 0):.0f} s left"))

    def waiting_for_update(self, reason: str, names: Sequence[str], seconds: float) -> None:
        self._show(_waiting_text(names, f"{reason}; {seconds:.0f} s so far"))

    def step(self, row: ProgressRow) -> None:
        if not self._steps:
            return
        now = self._clock.now()
        if self._elapsed(now, row) >= _SILENCE_SECONDS or row.step % self._log_every == 0:
            self.message(self._row_text(row, now))

    def message(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def warn(self, text: str) -> None:
        self.message(f"warning: {text}")

    def _show(self, text: str) -> None:
        self.message(text)

    def _elapsed(self, now: float, row: ProgressRow) -> float:
        if self._mark is None:
            self._mark = now, row.examples
        return now - self._mark[0]

    def _row_text(self, row: ProgressRow, now: float | None = None) -> str:
        """Returns a row as text; measures the examples per second up to now."""
        if now is not None:
            then, before = self._mark or (now, row.examples)
            if now > then:
                self._per_second = (row.examples - before) / (now - then)
                self._mark = now, row.examples
        end = "" if self._max_steps is None else f"/{self._max_steps}"
        parts = [f"step {row.step} (global {row.global_step}{end})"]
        if row.result is not None:
            parts.append(f"loss {row.result.loss:.4g}")
            parts += [f"{name} {value:.4g}" for name, value in row.result.metrics.items()]
        if self._per_second is not None:
            parts.append(_pace_text(self._per_second))
        return " ".join(parts)


class LiveProgress(PlainProgress):
    """Updates one line of a terminal, below other output, instead of writing new ones."""

    repeat_seconds = 0.0

    def __init__(self, console: Console, clock: Clock, *, max_steps: int | None = None) -> None:
        from rich.live import Live

        super().__init__(console.file, clock, max_steps=max_steps)
        self._console = console
        self._first: tuple[float, int] | None = None  # time and global step of the first row
        self._last: ProgressRow | None = None
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def step(self, row: ProgressRow) -> None:
        self._last, now = row, self._clock.now()
        began, first = self._first = self._first or (now, row.global_step)
        if self._elapsed(now, row) >= _REFRESH_SECONDS:
            text = self._row_text(row, now)
            if self._max_steps is not None and row.global_step > first:
                each = (now - began) / (row.global_step - first)
                text += f" {_duration((self._max_steps - row.global_step) * each)} left"
            self._show(text)

    def training_ended(self) -> None:
        if self._last is None:
            return
        self.message(self._row_text(self._last))
        self._last = None
        if self._live.is_started:
            self._show("")

    def message(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._live.is_started:
            self._live.stop()
            self.training_ended()

    def _show(self, text: str) -> None:
        self._live.update(self._line(text), refresh=True)

    def _line(self, text: str) -> Table:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        line = Table.grid(padding=(0, 1))
        words = Text(text, no_wrap=True, overflow="ellipsis", end="")
        width = min(_BAR_WIDTH, self._console.width - len(text) - 2)
        if self._max_steps and self._last is not None and width >= _BAR_WIDTH / 2:
            line.add_row(ProgressBar(self._max_steps, self._last.global_step, width=width), words)
        else:
            line.add_row(words)
        return line


def make_progress(
    mode: Literal["auto", "plain", "events", "none"],
    *,
    max_steps: int | None = None,
    log_every: int = 100,
    stream: TextIO | None = None,
) -> Progress:
    """Makes the display of a mode: `events` is plain without steps, `auto` live on a terminal."""
    if mode == "none":
        return Progress()
    stream, clock = stream or sys.stdout, MonotonicClock()
    if mode == "auto" and stream.isatty():
        from rich.console import Console

        console = Console(file=stream)
        if console.is_terminal and not console.is_dumb_terminal:
            return LiveProgress(console, clock, max_steps=max_steps)
    steps = mode != "events"
    return PlainProgress(stream, clock, max_steps=max_steps, log_every=log_every, steps=steps)


def summary_line(global_steps: int, seconds: float, examples: float) -> str:
    """Returns the summary of a run, such as `4000 global steps in 3.2 s, 125,000 examples/s`."""
    pace = _pace_text(examples / seconds if seconds > 0 else 0.0)
    return f"{global_steps} global steps in {seconds:.1f} s, {pace}"


def _pace_text(per_second: float) -> str:
    return f"{per_second:,.{0 if per_second >= 10 else 1}f} examples/s"


def _waiting_text(names: Sequence[str], remark: str) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN]) or "the others"
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"waiting for {shown}{more} ({remark})"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
