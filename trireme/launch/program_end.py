"""Whether this program ends by an exception: what a function that runs at exit cannot ask Python.

`sys.last_value` does not say it: an interactive interpreter leaves every exception there that it
has shown, and goes on.
"""

from __future__ import annotations

import inspect
import sys
from types import TracebackType

__all__ = ["ProgramEnd", "program_failed"]


class ProgramEnd:
    """Watches, from `watch` to `forget`, for the exception that ends this program."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._before = sys.excepthook

    def watch(self) -> None:
        """Takes `sys.excepthook` over; what had it before is still called."""
        self._before = sys.excepthook
        sys.excepthook = self._hook

    def forget(self) -> None:
        """Gives `sys.excepthook` back, unless somebody else has taken it over since."""
        self.goes_on()
        if sys.excepthook == self._hook:
            sys.excepthook = self._before

    def goes_on(self) -> None:
        """The program runs: what it has had shown of an exception was not its end."""
        self._error = None

    @property
    def error(self) -> BaseException | None:
        """What the program has ended with; None where it ends by itself, or is interactive."""
        return _FAILED[-1] if _FAILED else self._error

    def _hook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not _prompt_follows(trace) and not _shown_by_program(error):
            self._error = error
        self._before(kind, error, trace)


def program_failed(error: BaseException) -> None:
    """Notes the exception by which a program has ended that did not end with its interpreter."""
    _FAILED.append(error)


_FAILED: list[BaseException] = []
"""What the program of this process has failed with, for the functions that run at exit."""


def _prompt_follows(trace: TracebackType | None) -> bool:
    """Returns whether the interpreter shows an exception and then asks for the next line."""
    if sys.flags.interactive or sys.flags.inspect:
        return True
    # A program that has let somebody type for a while has prompts too, when it fails later on.
    typed = trace is not None and trace.tb_frame.f_code.co_filename.startswith("<")
    return typed and hasattr(sys, "ps1")


def _shown_by_program(error: BaseException) -> bool:
    """Returns whether code that runs has had an exception shown, such as a console's.

    At its end no code of the program runs: beneath us there are hooks alone, which were all given
    the exception.
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # a module, and no function
        return True
    given = [*frame.f_locals.values()]
    return not any(value is error or _holds(value, error) for value in given)


def _holds(value: object, error: BaseException) -> bool:
    return type(value) is tuple and any(each is error for each in value)
