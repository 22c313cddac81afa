"""Leases the positions of one data set from the job's ledger."""

from __future__ import annotations

from collections.abc import Sequence

from trireme.data.intervals import joined
from trireme.data.ledger import MOST_POSITIONS, EpochEnd
from trireme.ps.messages import Leased
from trireme.session.backends.base import Backend

Span = tuple[int, int]

_MOST_PAIRS = 1 << 16  # in a request


class Dealer:
    """Leases the positions of one data set, epoch by epoch or without end."""

    def __init__(
        self,
        backend: Backend,
        name: str,
        size: int,
        batch_size: int,
        *,
        end: EpochEnd,
        resized: bool = False,
        whole: bool = False,
        order: int = 0,
    ) -> None:
        self.name = name
        self.size = size
        self.until = 0  # positions from here on are not wanted now; 0 for no limit
        self.left: list[Span] = []  # leased and not handed out
        self._backend = backend
        self.batch_size = batch_size
        self._batch = MOST_POSITIONS if whole else batch_size
        self._end, self._resized, self._whole = end, resized, whole
        self.order = order
        self._lacks: list[Span] = []
        self._left_out: list[Span] = []
        self._compared = False

    def begin(self) -> None:
        if not self._compared:
            self._backend.compare_data(self.name, self.size, self._batch, self.order)
            self._compared = True

    def spans(self, count: int) -> list[Span]:
        """Returns the next spans, fewer than `count` where no more are left.

        This is the source of a loader. Spans that were leased before and not handed out come first.
        """
        wanted = [span for span in self.left if not self.until or span[0] < self.until]
        if wanted:
            self.left = [span for span in self.left if span not in wanted]
            return wanted if self._whole else [p for span in wanted for p in self._pieces(span)]
        return self.taken(self.ask(1 if self._whole else count))

    def ask(self, count: int, until: int | None = None) -> Leased:
        """Asks for spans, and tells which positions have no examples."""
        lacks, self._lacks = tuple(self._lacks), []
        left_out = joined(self._left_out)
        left_out, self._left_out = left_out[:_MOST_PAIRS], left_out[_MOST_PAIRS:]
        return self._backend.lease(
            self.name,
            self.size,
            self._batch,
            count,
            resized=self._resized,
            end=int(self._end),
            until=self.until if until is None else until,
            lacks=lacks,
            order=self.order,
            left_out=left_out,
        )

    @property
    def crosses(self) -> bool:
        """Whether a batch may take the rest from the next epoch."""
        return self._end == EpochEnd.CROSS

    def end_epochs(self) -> None:
        if self.crosses:
            self._end = EpochEnd.SHORT

    def taken(self, leased: Leased) -> list[Span]:
        return [(span.start, span.stop) for span in leased.spans]

    def lack(self, start: int, stop: int) -> None:
        """Notes that positions have no examples; the next request tells it."""
        self._lacks.append((start, stop))
        if self._backend.together:  # each process tells its own copy of the ledger
            self.ask(0)

    def leave_out(self, spans: Sequence[Span]) -> None:
        """Notes that the program has left out positions; the next request tells it."""
        self._left_out += spans

    def _pieces(self, span: Span) -> list[Span]:
        start, stop = span
        if start == stop:
            return [span]
        size = self.batch_size
        return [(low, min(low + size, stop)) for low in range(start, stop, size)]
