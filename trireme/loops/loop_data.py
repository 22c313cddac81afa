"""The data of a program's own loop: dealt by the job's ledger, as that of a session is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import accumulate, islice
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from trireme.data.batch import Batch
from trireme.data.request import Request, of_dataloader
from trireme.data.streams import is_stream
from trireme.errors import ConfigurationError
from trireme.ps.messages import Span
from trireme.session.data.feed import DataFeed
from trireme.session.worker.job import Job
from trireme.tensors import tensors_in

_COUNTS_NOT = 1e-9
"""The number of examples of a step that only takes part; 0 is that of an update left out."""


class LoopData:
    """Deals batches to a loop, and knows from which examples its next step is computed."""

    def __init__(self, job: Job, seen: Callable[[], int]) -> None:
        self._worker = job.worker
        self._feed = DataFeed(job)
        self._seen = seen  # the rows that the model was called with since the last step
        # Without their data, each with its rows, and those that the model had seen before it: the
        # batches that no step was made from yet.
        self._handed: list[tuple[Batch, int, int]] = []
        self._ahead: int | None = None  # how many of them the loop had at its first step
        self._before: float | None = None  # the number of examples of the last step
        self._divides = True  # whether each epoch is of whole batches of all workers
        self._hooks: list[RemovableHandle] = []

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
        if not (request.drop_last or is_stream(request.dataset)):
            at_a_time = request.batch_size * self._worker.setup.replicas
            self._divides = len(request.dataset) % at_a_time == 0
        with closing(batches):
            for batch in batches:
                rows = next((t.size(0) for t in tensors_in(batch.data) if t.dim()), 0)
                self._handed.append((replace(batch, data=None), rows, self._seen()))
                if not (batch.spans or self._hooks):
                    parameters = self._worker.setup.trained.parameters.values()
                    self._hooks = [
                        p.register_hook(self._counted)  # type: ignore[no-untyped-call]
                        for p in parameters
                        if p.requires_grad
                    ]
                yield batch

    def _counted(self, gradient: torch.Tensor) -> torch.Tensor:
        """Adds nothing to gradients, which the program may accumulate over batches that count."""
        used = self.used
        return gradient if not used or used[-1].spans else torch.zeros_like(gradient)

    @property
    def used(self) -> list[Batch]:
        """The batches that the step to come is computed from.

        A library may ask for batches ahead. These are told by the rows that the model has seen;
        where those are of no whole batches, all that the loop has are of the step. A batch for
        which the model was not called since the loop has it is of a later step.
        """
        seen, handed = self._seen(), [*self._handed]
        while handed and handed[-1][2] == seen > 0:
            handed.pop()
        batches = [batch for batch, *_ in handed]
        for number, rows in enumerate(accumulate(rows for _, rows, _ in handed), 1):
            ahead = len(batches) - number
            if rows == seen and (self._ahead is None or ahead <= self._ahead):
                return batches[:number]
        return batches

    @property
    def mixes_epochs(self) -> bool:
        """Whether a worker may have taken batches of the next epoch before a round's step."""
        return bool(self._ahead) and not self._divides

    @property
    def deals(self) -> bool:
        """Whether the job deals the data of the loop, and so knows the size of each batch."""
        return bool(self._handed) or self._before is not None

    def examples(self, given: float | None) -> float:
        """Returns the number of examples of the step to come; 1 where the loop deals its data.

        It is what the program says, unless the step only takes part in those of others.
        """
        if used := self.used:
            self._before = sum(map(len, used)) or _COUNTS_NOT
        if given is None or self._before == _COUNTS_NOT:
            return 1.0 if self._before is None else self._before
        return given

    def spans(self) -> list[Span]:
        return [Span(each.dataset, *span) for each in self.used for span in each.spans]

    def updated(self) -> None:
        used = self.used
        self._feed.updated(*used) if used else self._feed.updated(None)
        self._handed = [(batch, rows, 0) for batch, rows, _ in self._handed[len(used) :]]
        if self._ahead is None:
            self._ahead = len(self._handed)
        if all(batch.spans for batch, *_ in self._handed):
            self.close()

    def close(self) -> None:
        """Lets all gradients count again."""
        while self._hooks:
            self._hooks.pop().remove()


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
