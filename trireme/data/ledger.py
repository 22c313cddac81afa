"""The ledger deals the positions of a data set to workers: each example is used once per epoch.

It is pure: it has no tensors and no clock. It lives in shard 0. Finished positions are part of the
checkpoint, and a resumed job continues with exactly the open positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from trireme.data.intervals import IntervalSet, joined

MOST_SPANS = 4096
"""The largest number of spans in one lease; a loader requests 256."""

MOST_DEALT = 1 << 60
"""The largest position: beyond it, numbers would not fit into messages."""

MOST_POSITIONS = 1 << 32
"""The largest number of positions in a span."""


class LedgerState(NamedTuple):
    """All that a ledger knows; see the attributes of `Ledger`.

    Attributes:
        done, open: the ranges that are finished, and those that are dealt next.
        held: the ranges that each member holds, by worker.
        base, places, batch, first: of interleaving.
    """

    size: int
    interleave: bool
    frontier: int
    done: tuple[tuple[int, int], ...]
    open: tuple[tuple[int, int], ...]
    held: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    base: int
    places: tuple[tuple[int, int], ...]
    batch: int
    first: int


class Ledger:
    """Records which worker holds which positions, and which positions are finished.

    Every position below the highest one dealt is in one of three states: held by a worker,
    finished, or open. Open ones are dealt first, lowest first; then come fresh ones, without end.

    Without interleaving, fresh positions go to the worker that requests them. With interleaving
    they do not depend on the order of requests: with n members, the j-th batch of the i-th member
    (both from 0, lowest worker first) is [base + (j * n + i) * batch, ... + batch). So the workers
    of a synchronous round together hold exactly the batch that one process would have taken. When
    the members change, and after `restore`, counting restarts at 0, and `base` is the end of all
    dealt positions.

    Attributes:
        size: the number of examples in the data set; all workers of a job must agree on it.
        interleave: whether fresh positions are dealt by interleaving.
        frontier: the position from which on nothing was ever dealt.
    """

    def __init__(self, size: int, *, interleave: bool) -> None:
        """Makes a ledger from which nothing was dealt, with no members.

        Raises:
            ValueError: the data set is empty.
        """
        if size < 1:
            raise ValueError(f"the data set has {size} examples: there must be at least one")
        self.size = size
        self.interleave = interleave
        self._done = IntervalSet()
        self._open = IntervalSet()
        self._held: dict[int, IntervalSet] = {}
        self.frontier = 0
        # With interleaving: where the rounds begin, the place of each member's next batch, the size
        # of batches, and the worker that requested it first.
        self._base = 0
        self._next: dict[int, int] = {}
        self._batch, self._first = 0, 0

    @property
    def workers(self) -> tuple[int, ...]:
        """The members: those that take part, lowest first."""
        return tuple(self._held)

    @property
    def consumed(self) -> tuple[tuple[int, int], ...]:
        """The finished positions as ranges (start, stop), lowest first."""
        return tuple(self._done)

    def members(self, workers: Sequence[int]) -> None:
        """Sets the members, the workers that take part. The same members again change nothing.

        Positions held by former members are returned; with interleaving, also those that were
        passed over because their worker had not requested them yet.
        """
        members = tuple(sorted(set(workers)))
        if members == self.workers:
            return
        for worker in set(self.workers).difference(members):
            self.release(worker)
        self._held = {worker: self._held.get(worker, IntervalSet()) for worker in members}
        self._begin()

    def release(self, worker: int) -> None:
        """Returns all positions that `worker` holds: a new process has its index."""
        for start, stop in list(self._held.get(worker, ())):
            self.give_back(worker, start, stop)

    def lease(self, worker: int, batch: int, count: int) -> list[tuple[int, int]]:
        """Deals `count` spans (start, stop) of `batch` positions each to `worker`.

        A span is shorter where a returned piece, or a gap between finished positions, is.

        Raises:
            ValueError: the worker is no member; `batch` or `count` is below 1, or above the limit
                of one lease; or, with interleaving, other members have another batch size.
        """
        if worker not in self._held:
            raise ValueError(f"worker {worker} takes no part: the members are {self.workers}")
        if batch < 1 or count < 1:
            raise ValueError(f"cannot deal {count} spans of {batch} positions: both start at 1")
        if count > MOST_SPANS or batch > MOST_POSITIONS:
            raise ValueError(
                f"cannot deal {count} spans of {batch} positions at once: at most {MOST_SPANS} "
                f"spans of {MOST_POSITIONS}"
            )
        if self.frontier + batch * count * len(self._held) > MOST_DEALT:
            raise ValueError(f"all positions up to {MOST_DEALT} are dealt")
        if self.interleave:
            if not self._batch:
                self._batch, self._first = batch, worker
            if self._batch != batch:
                raise ValueError(
                    f"worker {worker} asks for batches of {batch}, worker {self._first} for "
                    f"batches of {self._batch}: a synchronous job needs the same batch size "
                    "everywhere"
                )
        spans = [] if self._open else self._all_fresh(worker, batch, count)
        while len(spans) < count:
            span = self._reopened(batch) or self._fresh(worker, batch)
            if span is not None:
                self._held[worker].add(*span)
                spans.append(span)
        return spans

    def _all_fresh(self, worker: int, batch: int, count: int) -> list[tuple[int, int]]:
        """Deals all spans as fresh ones; returns none if some of these positions are finished."""
        first = self.frontier
        fresh = range(first, first + batch * count, batch)
        if self.interleave:
            fresh = self._ahead(worker, count)
        spans = [(start, start + batch) for start in fresh]
        if self._done.end > fresh[0] and any([self._done.meets(*span) for span in spans]):
            return []
        if self.interleave:
            self._next[worker] += count * len(self._next)
        self.frontier = max(self.frontier, spans[-1][1])
        self._held[worker].add_all(joined(spans))
        return spans

    def finish(self, finished: Sequence[tuple[int, int, int]]) -> None:
        """Notes that updates from positions are applied.

        Each position counts once, whichever worker holds it: the update of a worker that was given
        up for lost may have been applied.

        Args:
            finished: (worker, start, stop) for each span of positions start to stop - 1.
        """
        said: dict[int, list[tuple[int, int]]] = {}
        for worker, start, stop in finished:
            said.setdefault(worker, []).append((start, stop))
        for worker, spans in said.items():
            held = self._held.get(worker)
            if held is not None:
                held.remove_all(joined(spans))
        for start, stop in joined([(start, stop) for _, start, stop in finished]):
            self._done.add(start, stop)
            if self._open:
                self._open.remove(start, stop)

    def give_back(self, worker: int, start: int, stop: int) -> None:
        """Returns the positions of start to stop - 1 that `worker` holds; they are dealt next."""
        held = self._held.get(worker)
        if held is None:
            return
        for piece in held.within(start, stop):
            held.remove(*piece)
            for rest in self._done.gaps(*piece):
                self._open.add(*rest)

    def restore(self, consumed: Iterable[tuple[int, int]]) -> None:
        """Restores the finished positions; the gaps between them are dealt first.

        The members stay, and hold nothing.

        Raises:
            ValueError: a range ends before it begins.
        """
        self._done = IntervalSet(consumed)
        self.frontier = self._done.end
        self._held = {worker: IntervalSet() for worker in self._held}
        self._begin()

    def export(self) -> LedgerState:
        """Returns all that the ledger knows."""
        return LedgerState(
            self.size,
            self.interleave,
            self.frontier,
            tuple(self._done),
            tuple(self._open),
            tuple((worker, tuple(held)) for worker, held in self._held.items()),
            self._base,
            tuple(self._next.items()),
            self._batch,
            self._first,
        )

    @classmethod
    def resumed(cls, state: LedgerState) -> Ledger:
        """Returns a ledger that goes on where another one was exported."""
        ledger = cls(state.size, interleave=state.interleave)
        ledger.frontier = state.frontier
        ledger._done, ledger._open = IntervalSet(state.done), IntervalSet(state.open)
        ledger._held = {worker: IntervalSet(held) for worker, held in state.held}
        ledger._base, ledger._next = state.base, dict(state.places)
        ledger._batch, ledger._first = state.batch, state.first
        return ledger

    def _begin(self) -> None:
        """Opens the positions below the frontier that are neither held nor finished."""
        taken = IntervalSet(chain(self._done, *self._held.values()))
        self._open = IntervalSet(taken.gaps(0, self.frontier))
        self._base, self._batch = self.frontier, 0
        self._next = {worker: place for place, worker in enumerate(self._held)}

    def _reopened(self, batch: int) -> tuple[int, int] | None:
        for start, stop in self._open:
            stop = min(stop, start + batch)
            self._open.remove(start, stop)
            return start, stop
        return None

    def _fresh(self, worker: int, batch: int) -> tuple[int, int] | None:
        """Returns the next fresh span; None if all of it was finished before it was dealt."""
        start = self.frontier
        if self.interleave:
            start = self._ahead(worker, 1)[0]
            self._next[worker] += len(self._next)
        self.frontier = max(self.frontier, start + batch)
        pieces = self._done.gaps(start, start + batch)
        for piece in pieces[1:]:
            self._open.add(*piece)
        return pieces[0] if pieces else None

    def _ahead(self, worker: int, count: int) -> range:
        """Returns where a worker's next batches begin, with interleaving."""
        start = self._base + self._next[worker] * self._batch
        apart = len(self._next) * self._batch
        return range(start, start + count * apart, apart)
