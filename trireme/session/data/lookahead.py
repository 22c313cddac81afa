"""An iterator over batches whose next one can be seen before it is taken."""

from __future__ import annotations

from collections.abc import Iterator

from trireme.data.batch import Batch


class Lookahead(Iterator[Batch]):
    """Iterates over batches."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self._seen: Batch | Exception | None = None

    def __next__(self) -> Batch:
        """Takes the next batch."""
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
        """The positions of the batch that was seen and not taken."""
        return self._seen.spans if isinstance(self._seen, Batch) else ()
