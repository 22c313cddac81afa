"""How a program shows a job that it has started: below a notebook's cell, or on a terminal."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any

from trireme.jobs.messages import Progress
from trireme.launch.output import Console, terminal_console

_LINES = 12
_BAR = 32
_REFRESH_SECONDS = 0.2


class Display:
    """Shows a job. This one shows nothing."""

    def line(self, task: str, text: str, error: bool) -> None:
        """Shows a line that a task has printed, or the launcher, which has no name."""

    def progress(self, progress: Progress, *, ended: bool = False) -> None:
        """Shows how far the job is."""


class ConsoleDisplay(Display):
    """Shows a job as `trireme run` does: its lines."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def line(self, task: str, text: str, error: bool) -> None:
        if task:
            self._console.line(task, text, error)
        else:
            self._console.say(text)


class NotebookDisplay(Display):
    """Shows a job below a notebook's cell: a bar, the progress, and its newest lines."""

    def __init__(self) -> None:
        from IPython.display import display

        self._lines: deque[str] = deque(maxlen=_LINES)
        self._progress = Progress()
        self._shown = 0.0
        shown: Any = display  # untyped
        self._handle = shown({"text/plain": "starting"}, raw=True, display_id=True)

    def line(self, task: str, text: str, error: bool) -> None:
        self._lines.append(f"{task} | {text}" if task else f"trireme: {text}")
        if time.monotonic() >= self._shown + _REFRESH_SECONDS:  # not for each line
            self._show()

    def progress(self, progress: Progress, *, ended: bool = False) -> None:
        self._progress = progress
        self._show()

    def _show(self) -> None:
        self._shown = time.monotonic()
        text = "\n".join([_text(self._progress), *self._lines]).strip()
        self._handle.update({"text/plain": text}, raw=True)


def make_display(*, verbose: bool) -> Display:
    """Returns the display that suits where this program runs."""
    if not verbose:
        return Display()
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    in_notebook = shell is not None and hasattr(shell, "kernel")
    return NotebookDisplay() if in_notebook else ConsoleDisplay(terminal_console())


def _text(progress: Progress) -> str:
    if not progress.max_steps:
        return progress.text
    filled = round(_BAR * min(progress.step / progress.max_steps, 1.0))
    return f"{'━' * filled}{'╌' * (_BAR - filled)} {progress.text}"
