"""The batches of a session: leases positions from the job's ledger and loads their examples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch.utils.data import Dataset

from trireme.data.batch import Batch
from trireme.data.ledger import EpochEnd, parts_of
from trireme.data.loader import Loader, SpanLoader, transform_parts
from trireme.data.order import fingerprint
from trireme.data.request import Request
from trireme.data.streams import STREAMS, is_stream
from trireme.errors import ConfigurationError, Fenced
from trireme.ps.messages import Span
from trireme.session.data.batches import Batches, Lookahead
from trireme.session.data.dealer import Dealer
from trireme.session.data.handed_out import HandedOut
from trireme.session.data.idle_steps import IdleSteps
from trireme.session.model.seeding import Seeding
from trireme.session.options import check_whole
from trireme.session.worker.job import Job

Transform = Callable[[Any, torch.Generator], Any]


class _Epoch(NamedTuple):
    """The epoch in which a program iterates, by `Session.epochs`."""

    number: int  # from 0
    last: bool  # whether the workers wait at its end until all of it is in the parameters
    leaves_out: bool  # whether what no step was made from by its end is left out


class DataFeed:
    """Iterates over a worker's batches, and knows which positions each update was computed from."""

    def __init__(self, job: Job) -> None:
        self._worker = worker = job.worker
        self._finish = job.end
        self._recorder = job.recorder
        self._idle = IdleSteps(worker, job.complete)
        self._epoch: _Epoch | None = None
        self._last_epoch = 0  # of the batch before
        self._seeding = Seeding(worker.setup)
        self._handed = HandedOut()
        self._made: WeakSet[Batches] = WeakSet()
        self._warned: set[str] = set()  # the data sets of which examples were left out
        self._loader: SpanLoader | None = None  # the one that is being iterated over
        self._ahead: Lookahead | None = None  # its batches
        self._latest: dict[str, tuple[SpanLoader, Dealer]] = {}  # iterated over, by data set
        self._left_over: dict[tuple[str, int], list[tuple[int, int]]] = {}  # leased, not handed out

    def epochs(self, count: int, name: str, *, leaves_out_from: int = 0) -> Iterator[int]:
        """Iterates over the epochs that are not finished; see `Session.epochs`.

        In those before `leaves_out_from` the step of a batch may come after its epoch.
        """
        count = check_whole("epochs", count, least=0)
        if self._epoch is not None:
            raise ConfigurationError(
                "session.epochs inside session.epochs: an epoch has no epochs of its own"
            )
        first = self._worker.ask(lambda: self._worker.backend.lease(name, 0, 1, 0).epoch)
        for epoch in range(first, count):
            if self._asked_to_stop():
                return
            self._epoch = _Epoch(epoch, epoch + 1 == count, epoch >= leaves_out_from)
            self._seeding.epoch(epoch)
            try:
                yield epoch
            finally:
                self._epoch = None

    def _asked_to_stop(self) -> bool:
        return self._worker.last_iteration.asked(self._worker.backend.stopping)

    def batches(
        self,
        request: Request,
        *,
        name: str,
        transform: Transform | None = None,
        epochs: float | None = None,
        resized: bool = False,
    ) -> Batches:
        if epochs is not None and not epochs > 0:
            raise ConfigurationError(f"epochs={epochs}: it must be above 0")
        check_whole("batch_size", request.batch_size)
        if (trial := self._worker.task.trial) is not None:
            if transform is not None and trial.joined > 1 and not request.batched:
                transform = partial(transform_parts, transform, request.batch_size)
            request = replace(request, batch_size=request.batch_size * trial.joined)
        for note in request.notes:
            self._worker.progress.warn(note)
        loader: SpanLoader
        if is_stream(request.dataset):
            opened = STREAMS.imported("streams", "open")
            loader, dealer = opened(self._worker, request, name, transform, resized=resized)
        else:
            loader, dealer = self._of_dataset(request, name, transform, resized=resized)
        per_epoch = parts_of(dealer.size) * dealer.size
        batches = Batches(partial(self._iteration, loader, dealer, per_epoch, epochs))
        self._made.add(batches)
        return batches

    def close(self) -> None:
        for batches in list(self._made):
            batches.close()

    def _of_dataset(
        self, request: Request, name: str, transform: Transform | None, *, resized: bool
    ) -> tuple[Loader, Dealer]:
        dataset, batch_size = request.dataset, int(request.batch_size)
        order = request.order(_size_of(dataset), self._worker.setup.settings.options.seed)
        cuts = EpochEnd.SHORT if self._epoch is not None else EpochEnd.CROSS
        dealer = Dealer(
            self._worker.backend,
            name,
            order.size,
            batch_size,
            end=EpochEnd.DROP if request.drop_last else cuts,
            resized=resized,
            order=fingerprint(order, dataset),
        )
        loader = Loader(
            dataset,
            order,
            dealer.spans,
            batch_size=batch_size,
            transform=transform,
            loading=request.loading,
        )
        return loader, dealer

    def _iteration(
        self, loader: SpanLoader, dealer: Dealer, per_epoch: int, epochs: float | None
    ) -> Iterator[Batch]:
        """Begins an iteration: to the end of the epoch, of `epochs`, or of training."""
        within = self._epoch
        dealer.until, patient = 0, True
        if within is not None:
            dealer.until, patient = (within.number + 1) * per_epoch, within.last
            dealer.end_epochs()
        elif epochs is not None and self._worker.setup.settings.max_steps is None:
            dealer.until = max(1, round(epochs * per_epoch))
        if within is not None and within.number:
            return self._iterate_epoch(loader, dealer, within.number, patient=patient)
        self._latest[dealer.name] = loader, dealer
        return self._iterate(loader, dealer, patient=patient)

    def _iterate_epoch(
        self, loader: SpanLoader, dealer: Dealer, epoch: int, *, patient: bool
    ) -> Iterator[Batch]:
        """Iterates over an epoch; where its order is a new one, those before are finished first."""
        before, then = self._latest.get(dealer.name, (loader, dealer))
        if then.order and (then.order, then.size) != (dealer.order, dealer.size):
            then.until = epoch * then.size
            then.end_epochs()
            yield from self._iterate(before, then, patient=True)
        self._latest[dealer.name] = loader, dealer
        if not self._worker.backend.stopping:
            yield from self._iterate(loader, dealer, patient=patient)

    def _iterate(self, loader: SpanLoader, dealer: Dealer, *, patient: bool) -> Iterator[Batch]:
        worker, key = self._worker, (dealer.name, dealer.size)
        if self._asked_to_stop():
            self._finish()
            return
        within, loop, over = self._epoch, self._handed.begin(dealer.name), False
        dealer.begin()
        again, dropped = self._handed.take_back(dealer.name)
        dealer.left += [*again, *self._left_over.pop(key, [])]
        dealer.leave_out(dropped)
        self.warn_of_left_out()
        batches = self._ahead = Lookahead(iter(loader))
        self._loader = loader
        rejoined = worker.rejoined
        try:
            while not worker.backend.stopping:
                if rejoined != worker.rejoined:
                    # The job had given this worker up, and dealt its positions to others.
                    rejoined = worker.rejoined
                    self._left_over.clear()
                    self._handed.forget()
                    dealer.left.clear()
                    loader.discard()
                    batches = self._ahead = Lookahead(iter(loader))
                began = time.monotonic()
                try:
                    with worker.lifecycle.liveness.loading():
                        batch = next(batches, None)
                    if batch is None and loader.pause():
                        batch = self._without_examples(loader, dealer, loop)
                        batches = self._ahead = Lookahead(iter(loader))
                        if batch is None:
                            continue
                    elif batch is None:
                        if within is None or within.leaves_out:
                            dealer.leave_out(self._handed.leave_out(loop))
                        waits = patient and self._handed.may_wait(loop)
                        if not dealer.until or not self._more(dealer, patient=waits):
                            if within is not None and not worker.backend.stopping:
                                self._idle.end_epoch()
                            over = True
                            break
                        batches = self._ahead = Lookahead(iter(loader))
                        continue
                except Fenced:  # the servers deal nothing to a worker that is out of the job
                    worker.come_back()
                    continue
                self._recorder.phase("data", began, time.monotonic())
                if worker.should_stop:  # the answer to a prefetched push has come
                    break
                self._idle.over()
                batch.dataset, self._last_epoch = dealer.name, batch.epoch
                self._handed.add(batch, loop)
                worker.last_iteration.asked(False)
                worker.passed = False
                self._seeding.loop(worker.global_step)
                for observer in worker.observers.values():
                    observer.on_batch(batch)
                yield batch
            worker.last_iteration.asked(True)
        finally:
            self._loader = self._ahead = None
            left = self._left_over.setdefault(key, [])
            left += [*batches.spans, *loader.discard(), *dealer.left]
            dealer.left.clear()
            self._handed.leave(loop, over=over)
        if worker.backend.stopping:
            self._finish()
        worker.passed = within is None

    def _without_examples(self, loader: SpanLoader, dealer: Dealer, loop: int) -> Batch | None:
        """Takes part in steps for which it has no examples; a group gets a batch to compute with.

        A worker that holds examples takes part by the step that the program makes of them.
        """
        if self._worker.backend.group is not None:
            batch = loader.stand_in()
            batch.epoch = self._last_epoch
            return batch
        if self._epoch is None or self._epoch.leaves_out:  # others may wait for what is held
            dealer.leave_out(self._handed.leave_out(loop))
        while not self._worker.backend.stopping and self._handed.may_wait(loop):
            leased = dealer.ask(0)
            if leased.finished:  # the others have left out theirs, and are in the next epoch
                break
            if leased.awaited:
                self._idle.make()
                break
            self._idle.wait(awaited=False)
        return None

    def _more(self, dealer: Dealer, *, patient: bool) -> bool:
        """Returns whether more positions are to be had in this iteration.

        A patient worker waits until all are in the parameters: those of a lost one are dealt again.
        """
        worker = self._worker
        while not worker.backend.stopping:
            rejoined = worker.rejoined
            leased = dealer.ask(1)
            if leased.spans:
                dealer.left += dealer.taken(leased)
                return True
            if leased.finished or not patient:
                return False
            self._idle.wait(awaited=leased.awaited)
            if rejoined != worker.rejoined:
                return True
            if worker.setup.process_group is None:
                if worker.lifecycle.interrupted is not None:
                    return False  # the others wait for this worker, to stop
                if worker.lifecycle.dismissed is not None:
                    self._idle.make()  # with its answer the worker leaves
        return False

    def spans_of(self, batch: Any) -> list[Span]:
        return self._handed.spans_of(batch)

    def updated(self, *batches: Any) -> None:
        for batch in batches:
            self._handed.updated(batch)
        self._idle.updated()

    def warn_of_left_out(self) -> None:
        """Warns, once for each data set, of examples that were left out."""
        for dataset, count in self._handed.left_out().items():
            if dataset not in self._warned:
                self._warned.add(dataset)
                self._worker.progress.warn(
                    f"{count} examples of {dataset!r} were handed out and no step was made from "
                    "them (continue, or a loop that was left twice with the same batch): they "
                    "count as left out of their epoch, and are not dealt again"
                )

    def prepare(self) -> None:
        if self._loader is not None:
            self._loader.prepare()

    def upcoming(self) -> Any:
        """Returns the data of the next batch, which is made now; None where there is none."""
        batch = None if self._ahead is None else self._ahead.peek()
        return None if batch is None else batch.data


def _size_of(dataset: Dataset[Any]) -> int:
    try:
        size = len(dataset)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigurationError(
            f"{type(dataset).__name__} has no length: a loader deals examples by number, so give "
            "it a data set with __len__ and __getitem__, or an IterableDataset; step also takes "
            "batches that you make yourself"
        ) from None
    if size < 1:
        raise ConfigurationError(f"the {type(dataset).__name__} to train on has no examples")
    return size
