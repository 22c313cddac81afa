"""The ledger deals the positions of a data set to workers: each example is used once per epoch.

It is pure: it has no tensors and no clock. It lives in shard 0. Finished positions are part of the
checkpoint, and a resumed job continues with exactly the open positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import chain
from typing import NamedTuple

from trireme.data.intervals import IntervalSet, joined

_MOST_SPANS = 4096  # in one lease; a loader requests 64

MOST_DEALT = 1 << 60  # the largest position: beyond it, numbers would not fit into messages

MOST_POSITIONS = 1 << 32  # the largest number of positions in a span

_MOST_PARTS = 1 << 31


def parts_of(size: int) -> int:
    """Returns how many parts of a given size make an epoch: 1 but for streams.

    A part of a stream, of whose positions only the first ones have examples, has `MOST_POSITIONS`
    less their number: another number of parts is another size, and is noticed.
    """
    parts = MOST_POSITIONS - size
    return parts if 0 < parts < _MOST_PARTS else 1


class EpochEnd(IntEnum):
    """What becomes of the batch that crosses the end of an epoch."""

    CROSS = 0  # it takes the rest from the next epoch, so that every batch is full
    # It is cut. With interleaving, the round in which an epoch ends is cut: together the members
    # hold the rest, and a member for which nothing is left is dealt an empty span.
    SHORT = 1
    # What does not make a batch of each member (without interleaving: one batch) is left out, and
    # counts as finished.
    DROP = 2


class LedgerState(NamedTuple):
    """All that a ledger knows; see `Ledger`."""

    size: int
    interleave: bool
    frontier: int
    done: tuple[tuple[int, int], ...]  # the ranges that are finished
    open: tuple[tuple[int, int], ...]  # those that are dealt next
    held: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]  # by each worker
    base: int  # this and what follows, of interleaving
    places: tuple[tuple[int, int], ...]
    batch: int
    first: int
    end: int = 0
    lengths: tuple[tuple[int, int], ...] = ()  # where those without examples begin, by their end


class Ledger:
    """Records which worker holds which positions, and which positions are finished.

    Every position below the highest one dealt is in one of three states: held by a worker,
    finished, or open. Open ones are dealt first, lowest first; then come fresh ones, without end.

    Without interleaving, fresh positions go to the worker that requests them. With interleaving
    they do not depend on the order of requests: with n members, the j-th batch of the i-th member
    (both from 0, lowest worker first) is [base + (j * n + i) * batch, ... + batch). So the workers
    of a synchronous round together hold exactly the batch that one process would have taken. When
    the members change, and after `restore`, counting restarts at 0, and `base` is the end of all
    dealt positions. Nothing was ever dealt from the `frontier` on.
    """

    def __init__(self, size: int, *, interleave: bool) -> None:
        """Makes a ledger from which nothing was dealt, with no members."""
        if size < 1:
            raise ValueError(f"the data set has {size} examples: there must be at least one")
        self.size = size
        self.interleave = interleave
        self._done = IntervalSet()
        self._open = IntervalSet()
        self._held: dict[int, IntervalSet] = {}
        self.frontier = 0
        # With interleaving: where the rounds begin, the place of each member's next batch, the size
        # of batches, what becomes of the last, and the worker that requested that first.
        self._base = 0
        self._next: dict[int, int] = {}
        self._batch, self._first = 0, 0
        self._end = EpochEnd.CROSS
        self._lengths: dict[int, int] = {}  # where positions without examples begin, by their end

    @property
    def workers(self) -> tuple[int, ...]:
        """The members: those that take part, lowest first."""
        return tuple(self._held)

    @property
    def consumed(self) -> tuple[tuple[int, int], ...]:
        """The finished positions as ranges (start, stop), lowest first."""
        return tuple(self._done)

    def between_epochs(self, worker: int | None = None) -> bool:
        """Returns whether all that was dealt is finished, and makes whole epochs."""
        return not self.frontier % self.size and self.finished(self.frontier, worker)

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

    def lease(
        self,
        worker: int,
        batch: int,
        count: int,
        end: EpochEnd = EpochEnd.CROSS,
        until: int | None = None,
    ) -> list[tuple[int, int]]:
        """Deals `count` spans (start, stop) of `batch` positions each to `worker`.

        A span is shorter where a returned piece, or a gap between finished positions, is; or by
        what is done at the `end` of an epoch. With `batch=MOST_POSITIONS`, which takes all of an
        epoch, spans are not interleaved. Positions from `until` on are not dealt.
        """
        self._check(worker, batch, count)
        rounds = self.interleave and batch < MOST_POSITIONS
        if rounds:
            self._agree(worker, batch, end)
        if end == EpochEnd.DROP and self.size < batch * (len(self._held) if rounds else 1):
            raise ValueError(
                f"an epoch of {self.size} examples has no batch of {batch} for each worker that "
                "steps in the same round, so that all of it would be left out: make batches "
                "smaller, or do not drop the last (drop_last=False)"
            )
        spans: list[tuple[int, int]] = []
        while len(spans) < count:
            span = self._reopened(batch, end, until)
            if span is None:
                begins, start, stop = self._upcoming(worker, batch, end, rounds=rounds)
                if until is not None and begins >= until:
                    break
                if rounds:
                    self._next[worker] += len(self._next)
                span = self._fresh(start, stop if until is None else min(stop, until))
            if span is not None:
                self._held[worker].add(*span)
                spans.append(span)
        return spans

    def _check(self, worker: int, batch: int, count: int) -> None:
        if worker not in self._held:
            raise ValueError(f"worker {worker} takes no part: the members are {self.workers}")
        if not (0 < count <= _MOST_SPANS and 0 < batch <= MOST_POSITIONS):
            raise ValueError(
                f"cannot deal {count} spans of {batch} positions: at least 1 of 1, and at most "
                f"{_MOST_SPANS} of {MOST_POSITIONS}"
            )
        if self.frontier + batch * count * len(self._held) > MOST_DEALT:
            raise ValueError(f"all positions up to {MOST_DEALT} are dealt")

    def _agree(self, worker: int, batch: int, end: EpochEnd) -> None:
        if not self._batch:
            self._batch, self._end, self._first = batch, end, worker
        if self._batch != batch:
            raise ValueError(
                f"worker {worker} asks for batches of {batch}, worker {self._first} for "
                f"batches of {self._batch}: a synchronous job needs the same batch size "
                "everywhere"
            )
        if self._end != end:
            raise ValueError(
                f"worker {worker} asks for epochs that end by {end.name}, and before worker "
                f"{self._first} by {self._end.name}: a synchronous job needs the same loops and "
                "the same drop_last everywhere"
            )

    def finish(self, finished: Sequence[tuple[int, int, int]]) -> None:
        """Notes that updates from positions are applied.

        Each position counts once, whichever worker holds it: the update of a worker that was given
        up for lost may have been applied.
        """
        for worker, start, stop in finished:
            if (held := self._held.get(worker)) is not None:
                held.remove(start, stop)
        for start, stop in joined((start, stop) for _, start, stop in finished):
            self._done.add(start, stop)
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

    def lack(self, worker: int, start: int, stop: int) -> None:
        """Notes that the positions start to stop - 1 have no example: a part of the data ends.

        They count as finished, whoever holds them. Positions before that were passed over are
        dealt next, and fresh ones begin at `stop`. To say it again changes nothing.
        """
        if not 0 <= start <= stop <= MOST_DEALT:
            raise ValueError(f"[{start}, {stop}) is not a range of positions")
        if self._lengths.get(stop, start) != start or (
            stop not in self._lengths
            and self._done.meets(start, stop)
            and self._done.gaps(start, stop)
        ):
            raise ValueError(
                f"the data ends after {start % self.size} examples for worker {worker}, and later "
                "or earlier for others: every worker must read the same examples in the same order"
            )
        if stop in self._lengths:
            return
        self._lengths[stop] = start
        for held in self._held.values():
            held.remove(start, stop)
        self._open.remove(start, stop)
        self._done.add(start, stop)
        if self.frontier < stop:
            self.frontier = stop
            self._begin()

    def finished(self, until: int, worker: int | None = None) -> bool:
        """Returns whether all positions below `until` are finished; see `_taken`."""
        return not self._taken(worker).gaps(0, until)

    def _taken(self, worker: int | None) -> IntervalSet:
        if worker is None:
            return self._done
        held = [each for member, each in self._held.items() if member != worker]
        return IntervalSet(chain(self._done, *held))

    def epoch(self, worker: int | None = None) -> int:
        """Returns the first epoch of which a position is not finished."""
        taken = self._taken(worker)
        gaps = taken.gaps(0, taken.end)
        return (gaps[0][0] if gaps else taken.end) // self.size // parts_of(self.size)

    def restore(self, consumed: Iterable[tuple[int, int]]) -> None:
        """Restores finished positions: gaps are dealt first. Members stay, and hold nothing."""
        self._done = IntervalSet(consumed)
        self.frontier = self._done.end
        self._held = {worker: IntervalSet() for worker in self._held}
        self._begin()

    def export(self) -> LedgerState:
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
            self._end,
            tuple(self._lengths.items()),
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
        ledger._end, ledger._lengths = EpochEnd(state.end), dict(state.lengths)
        return ledger

    def _begin(self) -> None:
        """Opens the positions below the frontier that are neither held nor finished."""
        taken = IntervalSet(chain(self._done, *self._held.values()))
        self._open = IntervalSet(taken.gaps(0, self.frontier))
        self._base, self._batch = self.frontier, 0
        self._next = {worker: place for place, worker in enumerate(self._held)}

    def _reopened(self, batch: int, end: EpochEnd, until: int | None) -> tuple[int, int] | None:
        for start, stop in self._open:
            if until is not None and start >= until:
                return None
            stop = min(stop, start + batch, stop if until is None else until)
            if end != EpochEnd.CROSS:
                stop = min(stop, self._end_of_epoch(start))
            self._open.remove(start, stop)
            return start, stop
        return None

    def _end_of_epoch(self, position: int) -> int:
        return (position // self.size + 1) * self.size

    def _upcoming(
        self, worker: int, batch: int, end: EpochEnd, *, rounds: bool
    ) -> tuple[int, int, int]:
        """Returns where the next round of a worker begins, and its fresh span of it.

        Nothing is dealt by this. Without interleaving each span is a round. With `CROSS`, where no
        round is cut, that of the worker begins with its span.
        """
        base, number, place, members = self.frontier, 0, 0, 1
        if rounds:
            base, members = self._base, len(self._next)
            number, place = divmod(self._next[worker], members)
        if end == EpochEnd.CROSS:
            start = base + (number * members + place) * batch
            return start, start, start + batch
        start, stop = self._round(base, number, batch * members, end)
        low = min(start + place * batch, stop)
        return start, low, min(low + batch, stop)

    def _round(self, base: int, number: int, together: int, end: EpochEnd) -> tuple[int, int]:
        """Returns the positions of a round of `together` positions; none crosses an epoch's end.

        Rounds are counted from `base`. What is left out before the round counts as finished.
        """
        first = self._end_of_epoch(base)

        def rounds_of(examples: int) -> int:
            return (examples if end == EpochEnd.DROP else examples + together - 1) // together

        in_first = rounds_of(first - base)
        start, stop = base, first
        if number >= in_first:
            epochs, number = divmod(number - in_first, rounds_of(self.size))
            start, stop = first + epochs * self.size, first + (epochs + 1) * self.size
            if end == EpochEnd.DROP and not number:
                began = start - self.size if epochs else base
                self._leave_out(began + rounds_of(start - began) * together, start)
        start += number * together
        return start, min(start + together, stop)

    def _leave_out(self, start: int, stop: int) -> None:
        self._done.add(start, stop)
        self.frontier = max(self.frontier, stop)

    def _fresh(self, start: int, stop: int) -> tuple[int, int] | None:
        """Deals a fresh span; returns None if all of it was finished before it was dealt."""
        self.frontier = max(self.frontier, stop)
        if start == stop:
            return start, stop
        pieces = self._done.gaps(start, stop)
        for piece in pieces[1:]:
            self._open.add(*piece)
        return pieces[0] if pieces else None
