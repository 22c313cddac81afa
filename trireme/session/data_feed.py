"""The batches of a session: leases positions from the job's ledger and loads their examples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import Dataset

from trireme.data.loader import Batch, Loader
from trireme.data.order import Order
from trireme.errors import ConfigurationError, Fenced
from trireme.ps.messages import Span
from trireme.session.observers.phases import Phases
from trireme.session.options import check_whole
from trireme.session.worker import Worker


class DataFeed:
    """Iterates over a worker's batches, and knows which positions each update was computed from.

    Args:
        worker: the worker, which has joined its job.
        phases: counts the time that the worker waits for batches.
        finish: called after the last batch.
    """

    def __init__(self, worker: Worker, phases: Phases, finish: Callable[[], None]) -> None:
        self._worker = worker
        self._finish = finish
        self._phases = phases
        self._since_update: list[Batch] = []  # the batches handed out since the last update
        self._loader: Loader | None = None  # the loader that is being iterated over
        # Positions that were leased and not handed out, by the data set's name and size.
        self._left_over: dict[tuple[str, int], list[tuple[int, int]]] = {}

    def batches(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        name: str,
        shuffle: bool,
        transform: Callable[[Any, torch.Generator], Any] | None,
        workers: int,
        epochs: float | None,
        resized: bool,
    ) -> Iterator[Batch]:
        """Iterates over this worker's batches until training ends; see `Session.loader`."""
        settings, backend = self._worker.setup.settings, self._worker.backend
        size = _size_of(dataset)
        if epochs is not None and not epochs > 0:
            raise ConfigurationError(f"epochs={epochs}: it must be above 0")
        batch_size = check_whole("batch_size", batch_size)
        workers = check_whole("workers", workers, least=0)
        if epochs is not None and settings.max_steps is None:
            per_step = batch_size * settings.batches_per_step
            backend.set_end(-(-int(epochs * size) // per_step))

        def source(count: int) -> list[tuple[int, int]]:
            left = self._left_over.pop((name, size), [])
            return [piece for span in left for piece in _pieces(span, batch_size)] or [
                (span.start, span.stop)
                for span in backend.lease(name, size, batch_size, count, resized=resized)
            ]

        order = Order(size, settings.options.seed, shuffle=shuffle)
        loader = Loader(
            dataset, order, source, batch_size=batch_size, transform=transform, workers=workers
        )
        return self._iterate(loader, name)

    def _iterate(self, loader: Loader, name: str) -> Iterator[Batch]:
        worker = self._worker
        if worker.asked_to_stop():
            self._finish()
            return
        batches = iter(loader)
        self._loader = loader
        rejoined = worker.rejoined
        try:
            with suppress(StopIteration):
                while not worker.backend.stopping:
                    if rejoined != worker.rejoined:
                        # The job had given this worker up, and dealt its positions to others.
                        rejoined = worker.rejoined
                        self._left_over.clear()
                        loader.discard()
                        batches = iter(loader)
                    began = time.monotonic()
                    try:
                        batch = next(batches)
                    except Fenced:  # the servers deal nothing to a worker that is out of the job
                        worker.come_back()
                        continue
                    self._phases.add(("data", began, time.monotonic()))
                    if worker.should_stop:  # the answer to a prefetched push has come
                        break
                    batch.dataset = name
                    self._since_update.append(batch)
                    worker.last_iteration.asked(False)
                    yield batch
            worker.last_iteration.asked(True)
        finally:
            self._loader = None
            left = self._left_over.setdefault((name, loader.order.size), [])
            left += loader.discard()
        self._finish()

    def spans_of(self, batch: Any) -> list[Span]:
        """Returns the positions that an update from a batch finishes.

        A batch that the program made itself counts as made of all batches that loaders have handed
        out since the last update.
        """
        batches = [batch] if isinstance(batch, Batch) else self._since_update
        return [Span(each.dataset, start, stop) for each in batches for start, stop in each.spans]

    def updated(self) -> None:
        """Notes that an update was computed from the batches handed out so far."""
        self._since_update.clear()

    def prepare(self) -> None:
        """Makes the next batch while an update is under way."""
        if self._loader is not None:
            self._loader.prepare()

    def originals(self, batch: Any, count: int) -> Any:
        """Returns the first examples of a batch as they were before the loader's transform."""
        if self._loader is None or not isinstance(batch, Batch):
            return None
        return self._loader.originals(batch, count)


def _size_of(dataset: Dataset[Any]) -> int:
    """Returns the number of examples of a data set.

    Raises:
        ConfigurationError: the data set has no length, or no examples.
    """
    try:
        size = len(dataset)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigurationError(
            f"{type(dataset).__name__} has no length: a loader deals examples by number, so give "
            "it a map-style data set, with __len__ and __getitem__; step also takes batches that "
            "you make yourself"
        ) from None
    if size < 1:
        raise ConfigurationError(f"the {type(dataset).__name__} to train on has no examples")
    return size


def _pieces(span: tuple[int, int], longest: int) -> Iterator[tuple[int, int]]:
    """Splits a span of positions into pieces of at most `longest` positions."""
    start, stop = span
    return ((low, min(low + longest, stop)) for low in range(start, stop, longest))
