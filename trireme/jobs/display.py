"""How a program shows a job that it has started: a widget, lines in a notebook, or a terminal."""

from __future__ import annotations

import html
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from trireme.jobs.messages import Progress
from trireme.launch.output import Console, terminal_console

_LINES = 12
_BAR = 32
_REFRESH_SECONDS = 0.2


class Display:
    """Shows a job. This one shows nothing."""

    def line(self, task: str, text: str, error: bool) -> None:
        """Shows a line that a task has printed."""

    def say(self, text: str, alarm: bool) -> None:
        """Shows a line of the launcher's."""

    def progress(self, progress: Progress) -> None:
        """Shows how far the job is."""

    def end(self, progress: Progress) -> None:
        """Shows that the job has ended."""


class ConsoleDisplay(Display):
    """Shows a job as `trireme run` does: its lines, and on a terminal one live line below them."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def line(self, task: str, text: str, error: bool) -> None:
        self._console.line(task, text, error)

    def say(self, text: str, alarm: bool) -> None:
        self._console.say(text, alarm=alarm)

    def progress(self, progress: Progress) -> None:
        if self._console.live:
            self._console.status(f"{_bar(progress)} {progress.text}".strip())

    def end(self, progress: Progress) -> None:
        self._console.status(None)


class NotebookDisplay(Display):
    """Shows a job below a notebook's cell: a bar, the progress, and its newest lines."""

    def __init__(self, show: Callable[[Progress, str, bool], object]) -> None:
        self._show = show
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._progress = Progress()
        self._shown = 0.0

    def line(self, task: str, text: str, error: bool) -> None:
        self._lines.append(f"{task} | {text}")
        self._refresh()

    def say(self, text: str, alarm: bool) -> None:
        self._lines.append(f"trireme: {text}")
        self._refresh()

    def progress(self, progress: Progress) -> None:
        self._progress = progress
        self._refresh(due=True)

    def end(self, progress: Progress) -> None:
        self._progress = progress
        self._show(progress, "\n".join(self._lines), True)

    def _refresh(self, *, due: bool = False) -> None:
        """Shows what is new, unless that was done a moment ago."""
        now = time.monotonic()
        if due or now >= self._shown + _REFRESH_SECONDS:
            self._shown = now
            self._show(self._progress, "\n".join(self._lines), False)


def make_display(*, verbose: bool, stop: Callable[[], object] | None) -> Display:
    """Returns the display that suits where this program runs."""
    if not verbose:
        return Display()
    if not _in_notebook():
        return ConsoleDisplay(terminal_console())
    try:
        import ipywidgets
    except ImportError:
        return NotebookDisplay(_plain_view())
    return NotebookDisplay(_widget(ipywidgets, stop))


def _in_notebook() -> bool:
    """Returns whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def _bar(progress: Progress) -> str:
    if not progress.max_steps:
        return ""
    filled = round(_BAR * min(progress.step / progress.max_steps, 1.0))
    return "━" * filled + "╌" * (_BAR - filled)


def _plain_view() -> Callable[[Progress, str, bool], object]:
    """Returns a view of plain text, which is replaced in place."""
    from IPython.display import display

    def content(progress: Progress, lines: str) -> dict[str, str]:
        text = f"{_bar(progress)} {progress.text}".strip()
        return {"text/plain": f"{text}\n{lines}".strip()}

    shown: Any = display  # untyped
    handle = shown(content(Progress(), "starting"), raw=True, display_id=True)

    def show(progress: Progress, lines: str, ended: bool) -> None:
        handle.update(content(progress, lines), raw=True)

    return show


def _widget(
    widgets: Any, stop: Callable[[], object] | None
) -> Callable[[Progress, str, bool], None]:
    """Returns a view made of widgets: a bar, the progress, a button, and the newest lines."""
    from IPython.display import display

    bar = widgets.FloatProgress(min=0.0, max=1.0, layout={"width": "240px"})
    label = widgets.Label("starting")
    text = widgets.HTML()
    row = [bar, label]
    button = None
    if stop is not None:
        button = widgets.Button(description="Stop", tooltip="The workers save and end")
        button.on_click(lambda _: stop())
        row.append(button)
    shown: Any = display  # untyped
    shown(widgets.VBox([widgets.HBox(row), text]))

    def show(progress: Progress, lines: str, ended: bool) -> None:
        if progress.max_steps:
            bar.value = min(progress.step / progress.max_steps, 1.0)
            bar.bar_style = "success" if ended and bar.value == 1.0 else ""
        label.value = progress.text.replace("  ", " · ") or label.value
        style = "margin:0;line-height:1.3;font-size:12px;white-space:pre-wrap"
        text.value = f'<pre style="{style}">{html.escape(lines)}</pre>'
        if button is not None:
            button.disabled = ended

    return show
