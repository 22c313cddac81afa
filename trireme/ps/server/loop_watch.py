"""Whether a server's loop goes on, for the heartbeats that another thread sends. Without I/O."""

from __future__ import annotations

from collections.abc import Mapping

from trireme.cluster.messages import StatusValue
from trireme.cluster.progress import BUSY, STEPS

_SHARE = 0.01  # of the time; a loop that waits for a disk or a terminal uses none
_TURN_SECONDS = 1.0  # what takes longer is a long turn
_BUSY_SHARE = 0.25  # of the patience


class LoopWatch:
    """Counts the signs of life of a loop: its turns, and in a long one, the processor's time.

    A loop within a long turn answers nobody. It is busy then, and for about as long afterwards, as
    it has to catch up. Without a sign for as many seconds as the `patience` it is overdue; after
    the `longest` without a turn the processor's time does not count any more.
    """

    def __init__(self, patience: float, longest: float) -> None:
        self.signs = 0  # how many there were, by the looks; 0 before the first
        self._patience = patience
        self._longest = longest
        self._turns = -1
        self._worked = self._looked = self._turned = self._seen = 0.0
        self._behind = 0.0  # the seconds beyond what turns take, less those in time

    def look(self, now: float, turns: int, worked: float) -> bool:
        """Takes the loop's turns and its thread's processor time; returns whether it goes on."""
        passed = now - self._looked
        busy = worked - self._worked >= _SHARE * passed
        if turns != self._turns:
            self._turned = now
        if self._turns >= 0:
            in_time = min(passed, (turns - self._turns) * _TURN_SECONDS)
            behind = self._behind + passed - 2 * in_time
            self._behind = min(max(behind, 0.0), self._patience)
        sign = self._turned == now or (busy and now - self._turned < self._longest)
        self._turns, self._worked, self._looked = turns, worked, now
        if sign:
            self.signs += 1
            self._seen = now
        return sign

    @property
    def overdue(self) -> bool:
        return self._looked - self._seen >= self._patience

    @property
    def status(self) -> Mapping[str, StatusValue]:
        busy = self._behind >= _BUSY_SHARE * self._patience
        return {STEPS: self.signs, **({BUSY: 1} if busy else {})}
