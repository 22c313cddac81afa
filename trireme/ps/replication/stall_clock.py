"""How long other servers have owed this one something and made no progress with it. Without I/O."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)  # a server, or a shard and a server

_LOOK_SECONDS = 1.0
"""The most that the time between two looks counts: a server that was busy itself, or stopped, has
not read what the others sent meanwhile."""


class StallClock(Generic[_K]):
    """Measures how long each server has made no progress.

    Args:
        patience: after so many seconds without progress a server is overdue.
    """

    def __init__(self, patience: float) -> None:
        self.overdue: frozenset[_K] = frozenset()  # the servers that are, as of the last look
        self._patience = patience
        self._looked: float | None = None
        self._stalled: dict[_K, tuple[Hashable, float]] = {}  # marks, and for how long

    def look(self, now: float, marks: Mapping[_K, Hashable]) -> None:
        """Takes how far each server is that owes something: a value that any progress changes."""
        most = min(_LOOK_SECONDS, self._patience / 4)
        passed = 0.0 if self._looked is None else min(now - self._looked, most)
        before, self._looked, self._stalled = self._stalled, now, {}
        for server, mark in marks.items():
            same = server in before and before[server][0] == mark
            self._stalled[server] = mark, before[server][1] + passed if same else 0.0
        self.overdue = self.after(self._patience)

    def after(self, seconds: float) -> frozenset[_K]:
        """Returns the servers that had made no progress for so long at the last look."""
        return frozenset(s for s, (_, stalled) in self._stalled.items() if stalled >= seconds)
