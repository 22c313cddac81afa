"""When training ends: signals, `should_stop()`, and the last iteration of a loop."""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

from trireme.errors import RolledBack
from trireme.launch.process_setup.loader_processes import shield_loader_processes

_MOST_LEFT_OUT = 1000


class ShouldStop:
    """A callable that returns whether training should end; without parentheses it warns.

    A plain method would always be true, and the loop would end before its first step.
    """

    __slots__ = ("_ask",)

    def __init__(self, ask: Callable[[], bool]) -> None:
        self._ask = ask

    def __call__(self) -> bool:
        """Returns whether training should end; all workers agree on the answer."""
        return self._ask()

    def __bool__(self) -> bool:
        warnings.warn(
            "should_stop is a method: write should_stop(), with parentheses",
            DeprecationWarning,
            stacklevel=2,
        )
        return self._ask()


class LastIteration:
    """Decides whether a step after the end of training is skipped, or an error.

    Training may end between the steps of one iteration, such as a discriminator's and a
    generator's: the rest of them are skipped. A step is an error if the loop has learned of the end
    before, by the next batch or `should_stop()`, or never asks.
    """

    def __init__(self) -> None:
        self._informed: bool | None = None  # None until the loop asks
        self._left_out = 0

    def asked(self, ended: bool) -> bool:
        """Notes that the loop has asked whether training has ended; returns the answer."""
        self._informed = ended
        return ended

    def leaves_out(self) -> bool:
        """Returns whether a step after the end is skipped; otherwise it is an error."""
        self._left_out += 1
        return self._informed is False and self._left_out <= _MOST_LEFT_OUT


class Signals:
    """Handlers of SIGINT and SIGTERM, from now to `restore`; none outside the main thread."""

    def __init__(self, interrupt: Callable[[str], None]) -> None:
        self._interrupt = interrupt
        self._before: dict[int, Any] = {}
        self._seen = False
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
            shield_loader_processes(self)

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._seen:
            self._seen = True
            self._interrupt(signal.Signals(number).name)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt


def rolled_back(before: int, step: int, *, ended: str = "") -> RolledBack:
    """Returns the error of a worker whose job lost all copies of a part of the parameters."""
    again = f". {ended} had ended its training, and must be started again to make those steps"
    return RolledBack(
        f"all copies of a part of the parameters were lost: the job goes back from step {before} "
        f"to step {step}, and what was learned since is lost; more --replicas make such a loss "
        f"less likely{again if ended else ''}",
        step,
    )
