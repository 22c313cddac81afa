"""Which pushes are on some of several servers only, where servers commit none.

A worker has one push under way at most: when it is lost, the servers have the same last push of it,
or some have one more. Each notes what it has when a worker is out, as it takes nothing of that
worker afterwards. The others tell server 0, which compares.
"""

from __future__ import annotations

from collections.abc import Sequence

from trireme.ps.messages import LastPushes
from trireme.ps.shard.instructions import Send

__all__ = ["HalfApplied"]

Member = tuple[int, int]
"""A worker and its incarnation."""


class HalfApplied:
    """Counts the pushes that are on some servers only.

    Args:
        server: this server's index.
        servers: how many there are.
    """

    def __init__(self, server: int, servers: int) -> None:
        self._server = server
        self._views = dict.fromkeys(range(servers), 0)  # that each server has taken
        self._last: dict[int, dict[Member, int]] = {index: {} for index in range(servers)}
        self._since: dict[Member, int] = {}  # the first view without it

    def left(self, worker: int, incarnation: int, sequence: int, view: int) -> None:
        """A worker is out: this server takes no more pushes of it.

        Args:
            worker: which.
            incarnation: which start of it.
            sequence: its last push that is applied here; 0 for none.
            view: the number of the view without it.
        """
        self._last[self._server][worker, incarnation] = sequence
        self._since.setdefault((worker, incarnation), view)

    def taken(self, view: int) -> Sequence[Send]:
        """This server has taken a view; returns what to tell server 0."""
        self._views[self._server] = view
        if self._server == 0:
            return ()
        pushes = tuple(
            (worker, incarnation, sequence, self._since[worker, incarnation])
            for (worker, incarnation), sequence in self._last[self._server].items()
        )
        return [Send(0, LastPushes(self._server, view, pushes))]

    def hear(self, message: LastPushes) -> None:
        """Notes what another server has. What is said late, or twice, changes nothing."""
        if message.server not in self._views or message.server == self._server:
            return
        self._views[message.server] = max(self._views[message.server], message.view)
        for worker, incarnation, sequence, view in message.pushes:
            self._last[message.server].setdefault((worker, incarnation), sequence)
            self._since.setdefault((worker, incarnation), view)

    @property
    def count(self) -> int:
        """How many there are among the workers of which every server knows that they are out."""
        known = min(self._views.values())
        return sum(
            1
            for member, view in self._since.items()
            if view <= known and len({last.get(member, 0) for last in self._last.values()}) > 1
        )
