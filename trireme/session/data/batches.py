"""The batches of a loader, which a program may iterate over again and again."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Self

from trireme.data.batch import Batch


class Batches(Iterator[Batch]):
    """An iterator over the batches of `Session.loader`.

    Each `for` loop begins an iteration, and goes on with the examples that the last one left.
    """

    def __init__(self, begin: Callable[[], Iterator[Batch]]) -> None:
        self._begin = begin
        self._iteration: Iterator[Batch] | None = None

    def __iter__(self) -> Self:
        """Begins an iteration, and ends an earlier one."""
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
