"""Whether training should end, as programs ask it: `should_stop()`."""

from __future__ import annotations

import warnings
from collections.abc import Callable

__all__ = ["StopSign"]


class StopSign:
    """What `should_stop` is on a session and on a distributed optimizer: called, it answers.

    Without its parentheses it answers too, and warns: a method that is not called is always true,
    and a loop that asks it so would end before its first step.

    Args:
        ask: returns whether training should end.
    """

    __slots__ = ("_ask",)

    def __init__(self, ask: Callable[[], bool]) -> None:
        self._ask = ask

    def __call__(self) -> bool:
        """Returns whether training should end; agreed by all workers."""
        return self._ask()

    def __bool__(self) -> bool:
        warnings.warn(
            "should_stop is a method: write should_stop(), with parentheses",
            DeprecationWarning,
            stacklevel=2,
        )
        return self._ask()
