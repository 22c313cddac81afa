"""How long other servers have owed this one something and made no progress with it. Without I/O."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

_LOOK_SECONDS = 1.0
"""The most that the time between two looks counts: a server that was busy itself, or stopped, has
not read what the others sent meanwhile."""
_NEW = object()  # equals no mark
_ALL: Mapping[int, float] = {}


class StallClock:
    """Measures how long each server has made no progress.

    Args:
        patience: after so many seconds without progress a server is overdue.
    """

    def __init__(self, patience: float) -> None:
        self.overdue: frozenset[int] = frozenset()  # the servers that are, as of the last look
        self._patience = patience
        self._looked: float | None = None
        self._marks: dict[int, Hashable] = {}
        self._seconds: dict[int, float] = {}

    def look(
        self, now: float, marks: Mapping[int, Hashable], shares: Mapping[int, float] = _ALL
    ) -> None:
        """Takes how far each server is that owes something.

        Args:
            marks: by server, a value that changes with every progress. A server that owes nothing
                has none.
            shares: by server, the share of the time that counts; 1 where it is left out.
        """
        passed = 0.0 if self._looked is None else min(now - self._looked, _LOOK_SECONDS)
        self._looked = now
        self._seconds = {
            server: (
                self._seconds[server] + passed * shares.get(server, 1.0)
                if self._marks.get(server, _NEW) == mark
                else 0.0
            )
            for server, mark in marks.items()
        }
        self._marks = dict(marks)
        overdue = (server for server, sum_ in self._seconds.items() if sum_ >= self._patience)
        self.overdue = frozenset(overdue)
