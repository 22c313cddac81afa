"""Leases the positions of one data set from the job's ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trireme.data.batch import Span
from trireme.data.intervals import joined
from trireme.data.ledger import MOST_POSITIONS, EpochEnd
from trireme.ps.messages import Leased
from trireme.session.backends.base import Backend

_MOST_PAIRS = 1 << 16  # in a request


@dataclass
class Dealer:
    """Leases the positions of one data set, epoch by epoch or without end."""

    backend: Backend
    name: str
    size: int  # the number of positions in a part of an epoch
    batch_size: int
    end: EpochEnd  # what becomes of the batch that crosses the end of an epoch
    resized: bool = False  # whether the size may be another than before
    whole: bool = False  # whether a span may have all of an epoch, of which batches are cut
    order: int = 0  # the fingerprint of the order of examples; 0 where there is none
    until: int = 0  # positions from here on are not wanted now; 0 for no limit
    left: list[Span] = field(default_factory=list)  # leased and not handed out
    _lacks: list[Span] = field(default_factory=list)
    _left_out: list[Span] = field(default_factory=list)
    _compared: bool = False

    @property
    def _batch(self) -> int:
        return MOST_POSITIONS if self.whole else self.batch_size

    def begin(self) -> None:
        if not self._compared:
            self.backend.compare_data(self.name, self.size, self._batch, self.order)
            self._compared = True

    def spans(self, count: int) -> list[Span]:
        """Returns the next spans, as a loader's source; what was not handed out comes first."""
        wanted = [span for span in self.left if not self.until or span[0] < self.until]
        if wanted:
            self.left = [span for span in self.left if span not in wanted]
            return wanted if self.whole else [p for span in wanted for p in self._pieces(span)]
        return self.taken(self.ask(1 if self.whole else count))

    def ask(self, count: int, until: int | None = None) -> Leased:
        """Asks for spans, and tells which positions have no examples."""
        lacks, self._lacks = tuple(self._lacks), []
        left_out = joined(self._left_out)
        left_out, self._left_out = left_out[:_MOST_PAIRS], left_out[_MOST_PAIRS:]
        return self.backend.lease(
            self.name,
            self.size,
            self._batch,
            count,
            resized=self.resized,
            end=int(self.end),
            until=self.until if until is None else until,
            lacks=lacks,
            order=self.order,
            left_out=left_out,
        )

    def end_epochs(self) -> None:
        """Has batches end with the epoch, and not take the rest from the next."""
        if self.end == EpochEnd.CROSS:
            self.end = EpochEnd.SHORT

    def taken(self, leased: Leased) -> list[Span]:
        return [(span.start, span.stop) for span in leased.spans]

    def lack(self, start: int, stop: int) -> None:
        """Notes that positions have no examples; the next request tells it."""
        self._lacks.append((start, stop))
        if self.backend.together:  # each process tells its own copy of the ledger
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
