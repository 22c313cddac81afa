"""Ctrl-C and SIGTERM: the first requests the job to stop, the second ends the process at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["Signals"]


class Signals:
    """The handlers of SIGINT and SIGTERM while a process trains.

    Args:
        interrupt: called with the name of the first signal; a second raises KeyboardInterrupt.
    """

    def __init__(self, interrupt: Callable[[str], None]) -> None:
        self._interrupt = interrupt
        self._before: dict[int, Any] = {}
        self._seen = False

    def install(self) -> None:
        """Installs the handlers; does nothing outside the main thread."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        """Restores the previous handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._seen:
            raise KeyboardInterrupt
        self._seen = True
        self._interrupt(signal.Signals(number).name)
