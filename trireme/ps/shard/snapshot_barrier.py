"""The barrier of a consistent cut, which lets all servers copy the same state."""

from __future__ import annotations

from trireme.ps.shard.push_table import Pending
from trireme.ps.snapshot_messages import Cut


class SnapshotBarrier:
    """Holds back decisions while a cut is under way, but for those that the cut asks for.

    Attributes:
        token: names the cut; None while none is under way.
        since: when it began.
        cut: the request for a copy, once it has come.
        route: where its answer goes.
        later: the pushes to decide afterwards, in the order in which they came.
    """

    def __init__(self) -> None:
        self.token: int | None = None
        self.since = 0.0
        self.cut: Cut | None = None
        self.route: object = None
        self.later: list[Pending] = []

    def begin(self, token: int, now: float) -> None:
        """Begins a cut; a repeat changes nothing."""
        if self.token is None:
            self.token, self.since = token, now

    def end(self) -> None:
        """Ends the cut. The pushes that were held back are still in `later`."""
        self.token, self.cut, self.route = None, None, None

    def holds(self, pending: Pending) -> bool:
        """Returns whether a push must wait."""
        if self.token is None:
            return False
        if self.cut is None:
            return True
        return pending.push.sequence > dict(self.cut.decided).get(pending.owner.worker, 0)

    def stops_round(self, step: int) -> bool:
        """Returns whether the round on top of `step` must not be decided now."""
        if self.token is None:
            return False
        return self.cut is None or step >= self.cut.step

    def stops_commit(self, pending: Pending, step: int) -> bool:
        """Returns whether a push that every server has must not be decided now, on top of `step`.

        All servers decide in one order: a push that makes a step of the cut is in it. A stale push,
        which makes none, is told by its sequence.
        """
        return self.token is not None and self.stops_round(step) and self.holds(pending)
