"""The iteration of a loop in which training ends: its remaining steps make no updates."""

from __future__ import annotations

__all__ = ["LastIteration"]

_MOST = 1000


class LastIteration:
    """Decides whether a step after the end of training is skipped, or an error.

    A loop learns of the end when it requests the next batch, or calls `should_stop()`. An iteration
    may make several steps, such as one of a discriminator and one of a generator, and training may
    end between them. The remaining steps of that iteration are skipped. A step is an error if the
    loop has already learned of the end, or never asks for it.
    """

    def __init__(self) -> None:
        self._asks = False
        self._told = False
        self._left_out = 0

    def asked(self, ended: bool) -> bool:
        """Notes that the loop has asked whether training has ended; returns the answer."""
        self._asks, self._told = True, ended
        return ended

    def leaves_out(self) -> bool:
        """Returns whether a step after the end is skipped; otherwise it is an error."""
        if self._told or not self._asks or self._left_out == _MOST:
            return False
        self._left_out += 1
        return True
