"""Whether a server's loop goes on, for the heartbeats that another thread sends. Without I/O."""

from __future__ import annotations

_SHARE = 0.01  # of the time; a loop that waits for a disk or a terminal uses none


class LoopWatch:
    """Counts the signs of life of a loop.

    A turn of the loop is a sign. While one turn takes long, such as that of a large update, it is a
    sign that its thread uses the processor.

    Args:
        patience: without a sign for so many seconds the loop is overdue.
        longest: after so many seconds without a turn the processor's time does not count any more.

    Attributes:
        signs: how many there were, by the looks; 0 before the first.
    """

    def __init__(self, patience: float, longest: float) -> None:
        self.signs = 0
        self._patience = patience
        self._longest = longest
        self._turns = -1
        self._worked = self._looked = self._turned = self._seen = 0.0

    def look(self, now: float, turns: int, worked: float) -> bool:
        """Takes how far the loop is; returns whether there was a sign since the last look.

        Args:
            now: the time.
            turns: how many turns the loop has made.
            worked: how many seconds of the processor its thread has used.
        """
        busy = worked - self._worked >= _SHARE * (now - self._looked)
        if turns != self._turns:
            self._turned = now
        sign = self._turned == now or (busy and now - self._turned < self._longest)
        self._turns, self._worked, self._looked = turns, worked, now
        if sign:
            self.signs += 1
            self._seen = now
        return sign

    @property
    def overdue(self) -> bool:
        """Whether the last look saw that there was no sign for too long."""
        return self._looked - self._seen >= self._patience
