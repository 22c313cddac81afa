"""The batches of a loader, which a program may iterate over again and again."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Self

from trireme.data.batch import Batch


class Batches(Iterator[Batch]):
    """An iterator over the batches of `Session.loader`.

    Each `for` loop begins an iteration, and continues with the examples that the last one left.
    """

    def __init__(self, begin: Callable[[], Iterator[Batch]]) -> None:
        self._begin = begin
        self._iteration: Iterator[Batch] | None = None

    def __iter__(self) -> Self:
        self.close()
        self._iteration = self._begin()
        return self

    def __next__(self) -> Batch:
        if self._iteration is None:
            self._iteration = self._begin()
        return next(self._iteration)

    def close(self) -> None:
        """Ends the iteration: examples that it has not handed out are dealt again."""
        iteration, self._iteration = self._iteration, None
        if isinstance(iteration, Generator):
            iteration.close()


class Lookahead(Iterator[Batch]):
    """Iterates over batches, the next of which can be seen before it is taken.

    What the iterator raises is raised where the batch is taken.
    """

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self._seen: Batch | Exception | None = None

    def __next__(self) -> Batch:
        seen, self._seen = self._seen, None
        if isinstance(seen, Exception):
            raise seen
        return next(self._batches) if seen is None else seen

    def peek(self) -> Batch | None:
        """Returns the next batch, which is still to be taken; None where there is none."""
        if self._seen is None:
            try:
                self._seen = next(self._batches)
            except Exception as error:
                self._seen = error
        return self._seen if isinstance(self._seen, Batch) else None

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        return self._seen.spans if isinstance(self._seen, Batch) else ()
