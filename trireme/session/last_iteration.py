"""The iteration of a loop in which training ends: what is left of it makes no updates."""

from __future__ import annotations

__all__ = ["LastIteration"]

_MOST = 1000


class LastIteration:
    """Decides whether a step that comes after the end of training is left out, or a mistake.

    A loop learns of the end when it asks: for the next batch, or whether it should stop. An
    iteration may make several steps, such as one of a discriminator and one of a generator, and the
    end may come between them. Those that follow in the same iteration are left out. A loop that
    makes a step after it was told, or that never asks, would go on for nothing.
    """

    def __init__(self) -> None:
        self._asks = False
        self._told = False
        self._left_out = 0

    def asked(self, ended: bool) -> bool:
        """Takes note that the loop asks, and of the answer, which is returned."""
        self._asks, self._told = True, ended
        return ended

    def leaves_out(self) -> bool:
        """Returns whether a step after the end is left out; if not, it is a mistake."""
        if self._told or not self._asks or self._left_out == _MOST:
            return False
        self._left_out += 1
        return True
