"""Counts the pushes that are on some of several servers only, where servers commit none.

A worker has one push under way at most: when it is lost, the servers have the same last push of it,
or some have one more. A server takes no more pushes of a worker that is out, so it notes the last
one then. The other servers report theirs to server 0, which compares.
"""

from __future__ import annotations

from collections.abc import Sequence

from trireme.ps.server_messages import LastPushes
from trireme.ps.shard.instructions import Send
from trireme.ps.shard.participants import Participant

__all__ = ["HalfApplied"]


class HalfApplied:
    """Counts the pushes that are on some servers only.

    Args:
        server: this server's index.
        servers: how many there are.
    """

    def __init__(self, server: int, servers: int) -> None:
        self._server = server
        self._views = dict.fromkeys(range(servers), 0)  # that each server has taken
        self._last: dict[int, dict[Participant, int]] = {index: {} for index in range(servers)}
        self._since: dict[Participant, int] = {}  # the first view without it

    def left(self, who: Participant, sequence: int, view: int) -> None:
        """Notes that a worker is out: this server takes no more pushes of it.

        Args:
            who: the participant.
            sequence: its last push that is applied here; 0 for none.
            view: the number of the view without it.
        """
        self._last[self._server][who] = sequence
        self._since.setdefault(who, view)

    def taken(self, view: int) -> Sequence[Send]:
        """Notes that this server has taken a view; returns the message to server 0."""
        self._views[self._server] = view
        if self._server == 0:
            return ()
        pushes = tuple(
            (*who, sequence, self._since[who]) for who, sequence in self._last[self._server].items()
        )
        return [Send(0, LastPushes(view, pushes))]

    def hear(self, server: int, message: LastPushes) -> None:
        """Takes another server's last pushes. A late or repeated message changes nothing."""
        if server not in self._views or server == self._server:
            return
        self._views[server] = max(self._views[server], message.view)
        for worker, incarnation, sequence, view in message.pushes:
            who = Participant(worker, incarnation)
            self._last[server].setdefault(who, sequence)
            self._since.setdefault(who, view)

    @property
    def count(self) -> int:
        """How many there are among the workers of which every server knows that they are out."""
        known = min(self._views.values())
        return sum(
            1
            for member, view in self._since.items()
            if view <= known and len({last.get(member, 0) for last in self._last.values()}) > 1
        )
