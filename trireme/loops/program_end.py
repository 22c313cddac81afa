"""Tells a function that runs at exit which exception has ended the program, if any has.

`sys.last_value` does not tell: an interactive interpreter keeps every exception there that it has
shown, and goes on.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import TracebackType

from trireme.errors import TriremeError
from trireme.launch.process_setup.program import EXPLAIN, FAILED


class ProgramEnd:
    """Watches, from `watch` to `forget`, for the exception that ends this program."""

    def __init__(
        self, explain: Callable[[BaseException | None], TriremeError | None] = lambda error: None
    ) -> None:
        self.explain = explain
        self._error: BaseException | None = None
        self._before = sys.excepthook

    def watch(self) -> None:
        """Replaces `sys.excepthook`; the hook of before is still called."""
        self._before = sys.excepthook
        sys.excepthook = self._hook
        EXPLAIN.append(self.explain)

    def forget(self) -> None:
        """Restores `sys.excepthook`, unless it has been replaced again since."""
        self.goes_on()
        if self.explain in EXPLAIN:
            EXPLAIN.remove(self.explain)
        if sys.excepthook == self._hook:
            sys.excepthook = self._before

    def goes_on(self) -> None:
        """Notes that the program still runs, so that an exception shown before did not end it."""
        self._error = None

    @property
    def error(self) -> BaseException | None:
        """The exception that ended the program; None if it ended by itself, or is interactive."""
        return FAILED[-1] if FAILED else self._error

    def _hook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        reason = None
        if not _prompt_follows(trace) and not _shown_by_program(error):
            reason = self.explain(error)
            self._error = reason or error
        if reason is None:
            self._before(kind, error, trace)
        else:
            print(f"error: {reason}", file=sys.stderr)


def _prompt_follows(trace: TracebackType | None) -> bool:
    """Returns whether the interpreter prompts for another line after showing an exception."""
    if sys.flags.interactive or sys.flags.inspect:
        return True
    # A program that opened a prompt for a while still has `sys.ps1` when it fails later on.
    typed = trace is not None and trace.tb_frame.f_code.co_filename.startswith("<")
    return typed and hasattr(sys, "ps1")


def _shown_by_program(error: BaseException) -> bool:
    """Returns whether running code, such as a console's, has called the hook to show an exception.

    At the program's end none runs: the callers are other hooks, each of which got the exception.
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # a module, and no function
        return True
    return not any(
        value is error or (type(value) is tuple and any(each is error for each in value))
        for value in [*frame.f_locals.values()]
    )
