"""The data of a program's own loop: dealt by the job's ledger, as that of a session is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from trireme.data.batch import Batch
from trireme.data.request import Request, of_dataloader
from trireme.data.streams import is_stream
from trireme.errors import ConfigurationError
from trireme.ps.messages import Span
from trireme.session.data.feed import DataFeed
from trireme.session.worker.job import Job

_COUNTS_NOT = 1e-9
"""The number of examples of a step that only takes part; 0 is that of an update left out."""


class LoopData:
    """Deals batches to a loop, and knows from which examples its next step is computed."""

    def __init__(self, job: Job) -> None:
        self._worker = job.worker
        self._feed = DataFeed(job)
        self._handed: int | None = None  # examples since the last step; None where no batch was
        self._before: float | None = None  # the number of examples of the last batches

    def epochs(self, loader: DataLoader[Any], count: int, name: str) -> Iterator[tuple[int, Any]]:
        request = _request(loader)
        # A step may be of batches of two epochs, where a program accumulates gradients.
        for epoch in self._feed.epochs(count, name, leaves_out_from=count - 1):
            for batch in self._batches(request, name):
                yield epoch, batch.data

    def prepare(self, loader: DataLoader[Any], epochs: int | None, name: str) -> PreparedLoader:
        request = _request(loader)
        count = sys.maxsize if epochs is None else epochs
        # A library may ask for a batch before it has made the step of the last one.
        epochs_left = self._feed.epochs(count, name, leaves_out_from=count)

        def epoch() -> Iterator[Any]:
            if next(epochs_left, None) is not None:
                for batch in self._batches(request, name):
                    yield batch.data

        if is_stream(request.dataset):
            return PreparedLoader(loader, epoch, None)
        # A library makes so many steps of an epoch, whatever is there. Where a fast worker has
        # taken some of another's share, that one takes its rest from the next epoch.
        share = -(-len(loader) // self._worker.setup.replicas)
        everything = (batch.data for _ in epochs_left for batch in self._batches(request, name))
        return PreparedLoader(loader, lambda: islice(everything, share), share)

    def _batches(self, request: Request, name: str) -> Iterator[Batch]:
        batches = self._feed.batches(request, name=name)
        with closing(batches):
            for batch in batches:
                self._handed = (self._handed or 0) + len(batch) * bool(batch.spans)
                with nullcontext() if batch.spans else self._without_gradients():
                    yield batch

    @contextmanager
    def _without_gradients(self) -> Iterator[None]:
        """Adds nothing to gradients, which the program may accumulate over batches that count."""
        parameters = self._worker.setup.trained.parameters.values()
        trained = (p for p in parameters if p.requires_grad)
        hooks = [p.register_hook(torch.zeros_like) for p in trained]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def deals(self) -> bool:
        """Whether the job deals the data of the loop, and so knows the size of each batch."""
        return self._handed is not None or self._before is not None

    def examples(self) -> float:
        """Returns the number of examples of the step to come; 1 where the loop deals its data."""
        if self._handed is not None:
            self._before = self._handed or _COUNTS_NOT
        return 1.0 if self._before is None else self._before

    def spans(self) -> list[Span]:
        return self._feed.spans_of(None)

    def updated(self) -> None:
        self._feed.updated(None)
        self._handed = None


class PreparedLoader(Iterable[Any]):
    """The batches of this worker: each iteration has its share of an epoch, while there are any."""

    def __init__(
        self, loader: DataLoader[Any], epoch: Callable[[], Iterator[Any]], length: int | None
    ) -> None:
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size
        self._epoch = epoch
        self._length = length

    def __iter__(self) -> Iterator[Any]:
        """Iterates over this worker's share of an epoch; over nothing after the last one."""
        return self._epoch()

    def __len__(self) -> int:
        """Returns the number of batches in an iteration; there are fewer in the last one."""
        if self._length is None:
            raise TypeError(f"the {type(self.dataset).__name__} has no length")
        return self._length


def _request(loader: object) -> Request:
    if isinstance(loader, DataLoader):
        return of_dataloader(loader)
    raise ConfigurationError(
        f"the loader is {type(loader).__name__}: give a torch.utils.data.DataLoader over all "
        "examples, without a DistributedSampler; the job deals them to its workers"
    )
