"""The `should_stop` of sessions and distributed optimizers."""

from __future__ import annotations

import warnings
from collections.abc import Callable

__all__ = ["ShouldStop"]


class ShouldStop:
    """A callable that returns whether training should end.

    Used as a boolean, without parentheses, it returns the same and warns: a plain method would
    always be true, and the loop would end before its first step.

    Args:
        ask: returns whether training should end.
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
