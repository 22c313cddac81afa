"""Decides when training ends, and which workers may begin another update: for all shards."""

from __future__ import annotations

from trireme.ps.rule import Rule


class Ending:
    """Lets workers begin as many updates as make the job end at exactly its last step.

    Where updates are asynchronous, each makes a step: a worker may begin one only if it is not one
    too many, together with all that are under way. Otherwise the worker waits until those are
    decided, as another must be made if one of them is lost with its worker. In synchronous rounds
    all updates under way make one step.

    Where updates are deltas of several steps, each of those under way counts for as many as it may
    bring. Asynchronous, the last may then go beyond the last step, by less than one delta's.
    """

    def __init__(self) -> None:
        self.last: int | None = None  # the job's last step; None where it has none yet
        self.synchronous = False  # whether updates make rounds
        self.period = 1  # how many steps an update may make
        self.under_way: set[int] = set()  # the workers that compute an update now

    def go_by(self, rule: Rule) -> None:
        self.synchronous, self.period = rule.synchronous, rule.period

    def reached(self, step: int) -> bool:
        return self.last is not None and step >= self.last

    def undecided(self, worker: int, step: int) -> bool:
        """Returns whether updates under way decide if a worker may compute another one."""
        if self.synchronous or self.last is None:
            return False
        return step < self.last <= step + self._others(worker)

    def grant(self, worker: int, step: int) -> bool:
        """Returns whether a worker may compute one more update, and notes that it does."""
        if self.last is not None and step + self._others(worker) >= self.last:
            self.under_way.discard(worker)
            return False
        self.under_way.add(worker)
        return True

    def done(self, worker: int) -> None:
        """Notes that a worker's update is decided, or will never come."""
        self.under_way.discard(worker)

    def stop(self, step: int) -> int:
        """Ends the job once no update under way is lost, or earlier; returns its last step."""
        soonest = self._soonest(step)
        self.last = soonest if self.last is None else min(self.last, soonest)
        return self.last

    def set_last(self, step: int, last: int) -> None:
        """Sets the last step where there is none yet, but loses no update under way."""
        if self.last is None:
            self.last = max(last, self._soonest(step))

    def _others(self, worker: int) -> int:
        if self.synchronous:
            return 0
        return (len(self.under_way) - (worker in self.under_way)) * self.period

    def _soonest(self, step: int) -> int:
        count = len(self.under_way)
        return step + (min(1, count) if self.synchronous else count * self.period)
