"""The batches that a program was handed and has not made an update from yet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trireme.data.batch import Batch
from trireme.ps.messages import Span

_Handed = tuple[str, tuple[tuple[int, int], ...]]  # a data set's name, and positions


def _of(batch: Batch) -> _Handed:
    return batch.dataset, batch.spans


def _positions(batches: Iterable[_Handed]) -> list[tuple[int, int]]:
    return [span for _, spans in batches for span in spans]


class HandedOut:
    """The positions of the batches that loaders hand out, until an update finishes them.

    What a program leaves out (`continue`) finishes with the next update from the same data set;
    what it was handed before it left its loop (`break`) is dealt to it once more. What is not
    finished of a loop that has come to its end belongs to the next one over the same data set.
    """

    def __init__(self) -> None:
        self._batches: dict[_Handed, int] = {}  # in their order, with the loops that they went to
        self._loops = 0
        self._open: set[int] = set()  # loops that go on
        self._ended: set[int] = set()  # loops that were left
        self._over: set[int] = set()  # loops that have come to their end
        self._left_out: dict[_Handed, None] = {}  # since the last call of `left_out`
        self._dealt_again: set[_Handed] = set()

    def begin(self, dataset: str) -> int:
        self._loops += 1
        self._open.add(self._loops)
        over = (b for b, its in self._batches.items() if its in self._over and b[0] == dataset)
        self._batches |= dict.fromkeys(over, self._loops)
        return self._loops

    def add(self, batch: Batch, loop: int) -> None:
        if batch.spans:
            self._batches[_of(batch)] = loop

    def spans_of(self, batch: Any) -> list[Span]:
        """Returns the positions that an update finishes; all, if the program made the batch."""
        return [
            Span(dataset, start, stop)
            for dataset, spans in self._finished_by(batch)
            for start, stop in spans
        ]

    def updated(self, batch: Any) -> None:
        for each in self._finished_by(batch):
            self._batches.pop(each, None)
            self._dealt_again.discard(each)
            if isinstance(batch, Batch):
                self._left_out[each] = None
        if isinstance(batch, Batch):
            self._left_out.pop(_of(batch), None)

    def _finished_by(self, batch: Any) -> list[_Handed]:
        if not isinstance(batch, Batch):
            return list(self._batches)
        own = _of(batch)
        if own not in self._batches:
            return [own]
        same = [each for each in self._batches if each[0] == own[0]]
        return same[: same.index(own) + 1]

    def leave(self, loop: int, *, over: bool) -> None:
        """Notes that a program has left a loop with the batches that it was handed last."""
        self._open.remove(loop)
        (self._over if over else self._ended).add(loop)

    def may_wait(self, loop: int) -> bool:
        """Returns whether a loop may wait for others, who may wait for what this worker holds.

        Of loops that a program goes through together (`zip`) only the first waits.
        """
        return loop == min(self._open) and loop not in self._batches.values()

    def leave_out(self, loop: int) -> list[tuple[int, int]]:
        """Leaves out what is not finished of a loop that has come to its end."""
        left = [each for each, its in self._batches.items() if its == loop]
        return self._drop(left)

    def take_back(self, dataset: str) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Takes back what loops over a data set were handed last that were left."""
        left = [b for b, its in self._batches.items() if its in self._ended and b[0] == dataset]
        dropped = self._drop([each for each in left if each in self._dealt_again])
        again = [each for each in left if each in self._batches]
        for each in again:
            del self._batches[each]
        self._dealt_again.update(again)
        return _positions(again), dropped

    def _drop(self, left: list[_Handed]) -> list[tuple[int, int]]:
        for each in left:
            del self._batches[each]
            self._left_out[each] = None
        self._dealt_again.difference_update(left)
        return _positions(left)

    def forget(self) -> None:
        """Forgets everything: the job has dealt the positions to other workers."""
        for held in (self._batches, self._dealt_again, self._left_out):
            held.clear()

    def left_out(self) -> dict[str, int]:
        """Returns how many positions of each data set were left out since the last call."""
        counts: dict[str, int] = {}
        for dataset, spans in self._left_out:
            number = sum(stop - start for start, stop in spans)
            counts[dataset] = counts.get(dataset, 0) + number
        self._left_out.clear()
        return counts
