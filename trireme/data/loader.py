"""Makes batches of a data set, for spans of positions that a source provides."""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from trireme.data.batch import Batch, Span
from trireme.data.draws import DrawingCollate, DrawingDataset, DrawingInit, Drawn
from trireme.data.loading import Loading
from trireme.data.order import Order
from trireme.data.seeds import derive
from trireme.tensors import joined, map_tensors, tensors_in

Source = Callable[[int], Sequence[Span]]
"""Returns up to the requested number of spans; none when there are no more.

An empty span is a step that others make without this loader's examples."""

BatchTransform = Callable[[Any, torch.Generator], Any]  # draws from the generator alone

_Take = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]

_LEASE_SECONDS = 0.1  # spans that last less are too few: asking takes time, too
_MOST_SPANS = 256
_EPOCH_SHARE = 16
_STOCK = 3  # batches being transformed: one to wait for, one in the making, one in reserve
_MOST_IN_BATCH = 1 << 20
_TRANSFORMS = 0x7472616E  # keeps these streams apart from others derived from the same seed


def transform_generator(seed: int, start: int) -> torch.Generator:
    """Returns the generator of the batch whose first position is `start`."""
    return torch.Generator().manual_seed((derive(seed, _TRANSFORMS) + start) % 2**63)


def transform_parts(transform: BatchTransform, size: int, data: Any, first: torch.Generator) -> Any:
    """Transforms each `size` examples as the batch that they are elsewhere, and joins them."""
    made, examples = [], max((len(each) for each in tensors_in(data) if each.dim()), default=1)
    for at in range(0, examples, size):
        rows = slice(at, at + size)
        part = map_tensors(data, lambda each, rows=rows: each[rows] if each.dim() else each)  # type: ignore[misc]
        seed = (first.initial_seed() + at) % 2**63
        made.append(transform(part, torch.Generator().manual_seed(seed)))
    return joined(made)


class SpanLoader(ABC):
    """Iterates over batches, as long as a source provides spans of positions.

    An iteration ends before an empty span, which `pause` takes away. Another iteration continues
    with the positions that were not handed out: there is one sequence of spans. Exceptions of the
    source, the data set or the transform propagate from the iteration.
    """

    def __init__(
        self, source: Source, batch_size: int, loading: Loading, transform: BatchTransform | None
    ) -> None:
        self.batch_size = batch_size
        self._source, self._loading, self._transform = source, loading, transform
        self._waiting: deque[Span] = deque()  # given by the source, not begun
        self._iteration: weakref.ref[Generator[Batch]] | None = None

    @property
    def unused(self) -> tuple[Span, ...]:
        """The spans of the source whose batches were not returned yet, oldest first."""
        return tuple(self._waiting)

    @property
    def _paused(self) -> bool:
        return bool(self._waiting) and self._waiting[0][0] == self._waiting[0][1]

    def pause(self) -> bool:
        """Returns whether the iteration has ended before an empty span, and takes that away."""
        paused = self._paused
        if paused:
            self._waiting.popleft()
        return paused

    def discard(self) -> tuple[Span, ...]:
        """Ends the iteration; drops and returns the unused spans."""
        self._end_iteration()
        unused = self.unused
        self._waiting.clear()
        return unused

    def __iter__(self) -> Iterator[Batch]:
        self._end_iteration()
        iteration = self._batches()
        self._iteration = weakref.ref(iteration)
        return iteration

    def _end_iteration(self) -> None:
        if self._iteration is not None and (last := self._iteration()) is not None:
            last.close()

    def prepare(self) -> None:  # noqa: B027  # a stream does not
        """Makes the next batch ahead of time, without calling the source, where that helps."""

    @abstractmethod
    def stand_in(self) -> Batch:
        """Returns a batch without positions, for a step that others make."""

    @abstractmethod
    def _batches(self) -> Generator[Batch]: ...


class Loader(SpanLoader):
    """Iterates over the batches of a data set.

    It makes the same batches in three ways. Data sets for which `tensors_of` returns tensors, and
    `Subset`s of them, are gathered batch by batch, without per-example Python. With a transform, a
    thread gathers and transforms the next batches while the caller computes. Any other data set,
    and any with a `collate_fn`, is loaded by torch's `DataLoader`. The source is always called in
    the caller's thread.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        order: Order,
        source: Source,
        *,
        batch_size: int,
        ahead: int = 16,
        transform: BatchTransform | None = None,
        loading: Loading | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Makes a loader; it requests no spans before it is iterated over.

        The first request is for `ahead` spans. If they last less than 0.1 s, the next is for twice
        as many: up to 256, and up to a sixteenth of an epoch, as no other worker can take them. The
        transform of each collated batch has a generator seeded from the order's seed and the span's
        start: the result is the same in every worker and at any time.
        """
        if batch_size < 1 or ahead < 1:
            raise ValueError(
                f"batch_size is {batch_size}, ahead {ahead}: batches and spans ahead start at 1"
            )
        if order.examples not in (None, len(dataset)):  # type: ignore[arg-type]  # map-style
            raise ValueError(
                f"the data set has {len(dataset)} examples and the order "  # type: ignore[arg-type]
                f"{order.examples}: make the order for this data set"
            )
        super().__init__(source, batch_size, loading or Loading(), transform)
        self.dataset = dataset
        self.order = order
        self._ahead = ahead
        part_of_epoch = order.size // (_EPOCH_SHARE * batch_size)
        self._most = max(ahead, min(_MOST_SPANS, part_of_epoch))
        self._now = now
        self._asked_at = float("-inf")
        self._take = _taker(dataset) if self._loading.collate_fn is None else None
        self._processes: DataLoader[Any] | None = None  # kept where they persist
        self._begun: deque[Span] = deque()  # being made, oldest first
        self._ready: Any = None  # the examples of the oldest begun span, made before its time
        self._gathers = False

    @property
    def unused(self) -> tuple[Span, ...]:
        return (*self._begun, *self._waiting)

    def prepare(self) -> None:
        if not self._gathers or self._ready is not None or self._take is None:
            return
        if self._waiting and not self._paused:
            self._ready = self._take(self.order.indices(*self._waiting[0]))
            self._begun.append(self._waiting.popleft())

    def stand_in(self) -> Batch:
        data = self._examples(0, min(self.batch_size, self.order.size))
        if self._transform is not None:
            data = self._transform(data, self._seeded((0, 0)))
        return Batch(self._loading.pinned(data), (), examples=0)

    def _examples(self, start: int, stop: int) -> Any:
        if self._take is not None:
            return self._take(self.order.indices(start, stop))
        found = DrawingDataset(self.dataset, self.order.seed).__getitems__(self._drawn(start, stop))
        return DrawingCollate(self._loading.collate_fn)(found)

    def __iter__(self) -> Iterator[Batch]:
        self._gathers = self._take is not None and self._transform is None
        return super().__iter__()

    def _batches(self) -> Generator[Batch]:
        if self._take is None:
            made = self._collate()
        elif self._transform is None:
            made = self._gather(self._take)
        else:
            made = self._transform_ahead(self._take, self._transform)
        try:
            with closing(made):
                for data in made:
                    span = self._begun.popleft()
                    batch = Batch(data, (span,), epoch=span[0] // self.order.size)
                    if self.order.batched:
                        batch.examples = len(self.order.indices(*span))
                    yield batch
        finally:
            self._ready = None
            self._waiting.extendleft(reversed(self._begun))
            self._begun.clear()

    def _gather(self, take: _Take) -> Generator[Any]:
        while self._ready is not None or self._begin_span() is not None:
            data = self._ready or take(self.order.indices(*self._begun[0]))
            self._ready = None
            yield self._loading.pinned(data)

    def _transform_ahead(self, take: _Take, transform: BatchTransform) -> Generator[Any]:
        def make(span: Span, indices: torch.Tensor) -> Any:
            return transform(take(indices), self._seeded(span))

        spans = iter(self._begin_span, None)
        pending: deque[Future[Any]] = deque()
        # One thread: transforms come one after the other.
        pool = ThreadPoolExecutor(1, "trireme-loader")
        try:
            while True:
                for span in islice(spans, _STOCK - len(pending)):
                    pending.append(pool.submit(make, span, self.order.indices(*span)))
                if not pending:
                    return
                yield self._loading.pinned(pending.popleft().result())
        finally:
            pool.shutdown(cancel_futures=True)

    def _collate(self) -> Generator[Any]:
        batches = self._processes
        if batches is None:
            # The loader has a generator of its own: else it would draw from torch's global one.
            named = self._loading.arguments
            named["collate_fn"] = DrawingCollate(named["collate_fn"])
            if self._loading.num_workers:
                named["worker_init_fn"] = DrawingInit(named["worker_init_fn"])
            batches = DataLoader(
                DrawingDataset(self.dataset, self.order.seed),
                batch_sampler=_Indices(self),
                generator=torch.Generator().manual_seed(derive(self.order.seed, _TRANSFORMS)),
                **named,
            )
            if self._loading.persistent_workers:
                self._processes = batches
        for data in batches:
            if self._transform is not None:
                data = self._transform(data, self._seeded(self._begun[0]))
            yield data

    def begin_indices(self) -> list[Drawn] | None:
        """Begins the next span; returns its examples, or None where there is none."""
        span = self._begin_span()
        return None if span is None else self._drawn(*span)

    def _drawn(self, start: int, stop: int) -> list[Drawn]:
        indices = self.order.indices(start, stop).tolist()
        if self.order.batched:  # they have one position, that of a batch
            start *= _MOST_IN_BATCH
        return list(zip(indices, range(start, start + len(indices)), strict=True))

    def _seeded(self, span: Span) -> torch.Generator:
        return transform_generator(self.order.seed, span[0])

    def _begin_span(self) -> Span | None:
        if not self._waiting:
            before, self._asked_at = self._asked_at, self._now()
            if self._asked_at - before < _LEASE_SECONDS:  # the last ones did not last
                self._ahead = min(2 * self._ahead, self._most)
            for start, stop in self._source(self._ahead):
                if not 0 <= stop - start <= self.batch_size:
                    raise ValueError(
                        f"the source gave the span ({start}, {stop}) for batches of "
                        f"{self.batch_size}"
                    )
                self._waiting.append((start, stop))
        if not self._waiting or self._paused:
            return None
        self._begun.append(self._waiting.popleft())
        return self._begun[-1]


class _Indices:
    """The batch sampler of a loader: the examples of its spans, span by span."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[Drawn]]:
        return iter(self._loader.begin_indices, None)


def tensors_of(dataset: Dataset[Any]) -> tuple[torch.Tensor, ...] | None:
    """Returns the tensors whose rows are a data set's items; None where items are something else.

    That is a `TensorDataset`, or of a class derived from it that leaves items and length alone.
    """
    kind = type(dataset)
    if not isinstance(dataset, TensorDataset) or any(
        getattr(kind, name, None) is not getattr(TensorDataset, name, None)
        for name in ("__getitem__", "__getitems__", "__len__")
    ):
        return None
    return dataset.tensors


def _taker(dataset: Dataset[Any]) -> _Take | None:
    """Returns the function that takes examples of a data set in memory, or of `Subset`s of one.

    It is None for any other data set.
    """
    rows: torch.Tensor | None = None
    # Not isinstance: a subclass may make its items otherwise.
    while type(dataset) is Subset:
        kept = torch.as_tensor(dataset.indices, dtype=torch.int64)
        rows = kept if rows is None else kept.index_select(0, rows)
        dataset = dataset.dataset
    tensors = tensors_of(dataset)
    if tensors is None:
        return None

    def take(indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Copies examples, by `index_select`, which takes a third of the time of indexing."""
        if rows is not None:
            indices = rows.index_select(0, indices)
        return tuple([t.index_select(0, indices.to(t.device)) for t in tensors])

    return take
