"""The methods of a session that train and evaluate on data sets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Unpack

import torch
from torch.utils.data import DataLoader, Dataset

from trireme.data.evaluation_batches import evaluation_batches
from trireme.data.loading import Loading, LoadingValues
from trireme.data.request import By, Request, of_dataloader
from trireme.errors import ConfigurationError
from trireme.session.data.batches import Batches
from trireme.session.data.feed import DataFeed
from trireme.session.job_methods import JobMethods
from trireme.session.model.computation import Computation, Transform
from trireme.session.model.training_setup import TrainingSetup
from trireme.session.options import Options, check_whole


class DataMethods(JobMethods):
    """Deals the examples of data sets to workers, and evaluates on data sets.

    Attributes:
        options: the session's options.
        evaluated_step: the global step of the values that the last evaluation had; None before one.
            Under asynchronous strategies it may be ahead of `global_step`.
    """

    options: Options
    evaluated_step: int | None = None
    _feed: DataFeed
    _setup: TrainingSetup
    _evaluator: Computation

    def loader(
        self,
        dataset: Dataset[Any] | Iterable[Any] | DataLoader[Any],
        batch_size: int | None = None,
        *,
        name: str = "train",
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        weights: Sequence[float] | torch.Tensor | None = None,
        drop_last: bool = False,
        transform: Callable[[Any, torch.Generator], Any] | None = None,
        epochs: float | None = None,
        resized: bool = False,
        generator: torch.Generator | None = None,
        by: By = "auto",
        **loading: Unpack[LoadingValues],
    ) -> Batches:
        """Iterates over this worker's batches, from epoch to epoch, until training should end.

        Each example of an epoch is dealt to one worker, and again where the worker died or its
        update was stale. A resumed job continues at the exact example. A program that leaves the
        loop early and creates another loader over the same data set continues with the batch that
        it made no step from; batches that it goes past (`continue`) count as left out of their
        epoch. Inside `epochs` an iteration ends with the epoch; otherwise a batch that crosses an
        epoch's end takes the rest from the next.

        Args:
            dataset: a data set with `__len__` and `__getitem__`; one that is iterated over, such as
                an `IterableDataset` or a streaming data set of Hugging Face; or a `DataLoader`,
                whose arguments are taken, and whose order is dealt.
            batch_size: the number of examples in each batch of this worker, or of each of its
                replicas. A `DataLoader` has its own.
            name: the data set's name, where a program trains on several data sets.
            shuffle: whether each epoch has an order of its own; by default it has. Of data sets
                that are iterated over, the order of the shards; by default they keep theirs.
            sampler: chooses the examples of an epoch, instead of `shuffle`. It has a length, and
                its random numbers are seeded by epoch, so that all workers compute the same order.
            weights: one number for each example: an epoch is as many draws with replacement, with
                probabilities in proportion, as `WeightedRandomSampler`'s.
            drop_last: whether the rest of each epoch that does not make a full batch, in
                synchronous jobs a full batch for every worker, is left out.
            transform: (batch, generator) -> batch, such as an augmentation; its randomness follows
                from the seed and the batch.
            epochs: the iteration ends after this many passes over the data set, unless `max_steps`
                is set; the last batch is cut. The workers then wait until each example is in the
                parameters. Where there is no other loader, `should_stop()` is true then.
            resized: whether a program may change the data set's size between epochs, or continue
                from a checkpoint of another size, with the next epoch; else it is refused.
            generator: its seed, as set by `manual_seed`, replaces the session's for the order.
            by: of data sets that are iterated over, what is dealt: `position` has every worker
                read all examples and keep its own; `shard` has each read whole shards. `auto`
                takes shards where there are several.
            loading: `collate_fn`, `num_workers`, `pin_memory`, `timeout`, `worker_init_fn`,
                `prefetch_factor`, `persistent_workers` and `multiprocessing_context`, as
                `DataLoader`'s. A data set that is iterated over is read by at most one process.

        Raises:
            ConfigurationError: the data set has no examples, or cannot be dealt as it is asked
                for; `epochs` is not above 0; or `batch_size` is below 1.
            Rejected: the workers disagree about the data set's size, or in synchronous jobs about
                the batch size; or the checkpoint is of a data set of another size.
        """
        _ = self.worker  # raises unless the session was entered
        if isinstance(dataset, DataLoader):
            own = (batch_size, shuffle, sampler, weights, generator, drop_last or None)
            if loading or any(each is not None for each in own):
                raise ConfigurationError(
                    "loader(DataLoader): the DataLoader has the batch size, the order and how "
                    "examples are loaded itself: set them there, or give its data set"
                )
            request = of_dataloader(dataset, by)
        else:
            if batch_size is None:
                raise ConfigurationError(
                    "loader(dataset, batch_size): give the number of examples in a batch"
                )
            request = Request(
                dataset,
                batch_size,
                shuffle=shuffle,
                sampler=sampler,
                weights=weights,
                drop_last=drop_last,
                loading=Loading(**loading),
                seed=None if generator is None else generator.initial_seed(),
                by=by,
            )
        return self._feed.batches(
            request, name=name, transform=transform, epochs=epochs, resized=resized
        )

    def epochs(self, count: int, *, name: str = "train") -> Iterator[int]:
        """Iterates over the epochs of a data set: 0 to `count - 1`, or what a resumed job lacks.

        Inside the loop, each iteration over a `loader` ends with the epoch, at which batches are
        cut. The examples of a worker that is lost may come to another worker in a later epoch;
        `batch.epoch` says which. In the last epoch the workers wait for each other, until each
        example is in the parameters.

            for epoch in session.epochs(3):
                for batch in session.loader(train, batch_size=100):
                    session.step(batch)

        Args:
            count: the number of epochs in all.
            name: the data set's name; see `loader`.

        Raises:
            ConfigurationError: `count` is no whole number of 0 or more.
        """
        _ = self.worker
        return self._all_epochs(count, name)

    def _all_epochs(self, count: int, name: str) -> Iterator[int]:
        yield from self._feed.epochs(count, name)
        if self._trains_parts:
            self.worker.buffers.collect_values()

    @property
    def _trains_parts(self) -> bool:
        setup = self._setup
        cut = setup.part is not None and not setup.lean and not setup.settings.task.servers
        return cut and not self.job.ended

    def evaluate(
        self,
        dataset: Dataset[Any] | Iterable[Any] | DataLoader[Any],
        batch_size: int | None = None,
        *,
        name: str = "validation",
        transform: Transform | None = None,
        **loading: Unpack[LoadingValues],
    ) -> dict[str, float]:
        """Returns the mean loss and metrics of a data set for the values of one consistent step.

        A metric with a state is computed once, over the whole set. The moving average of the
        parameters is evaluated where one is kept, and the mean of the buffers that workers shared
        last. The chief records the result, in TensorBoard as the run `name`. Where no process holds
        the whole model (a graph placed by an example), all must call it, with the same data.

        Args:
            dataset: a data set, of which each example counts once; one that is iterated over must
                end. Or a `DataLoader`, as in `loader`.
            batch_size: the number of examples that are computed at a time; 1000 by default.
            name: the data set's name, such as `validation` or `test`.
            transform: batch -> batch, such as a centre crop.
            loading: `collate_fn`, `num_workers` and so on; see `loader`.

        Raises:
            ConfigurationError: an argument is out of range, or the data set has no examples.
        """
        worker = self.worker
        if batch_size is not None:
            check_whole("batch_size", batch_size)
        batches = evaluation_batches(dataset, batch_size, Loading(**loading))
        excused = worker.lifecycle.liveness.excused("it evaluates")
        values: AbstractContextManager[int | None] = worker.buffers.consistent_values()
        if self._setup.lean:  # no process can evaluate alone
            values = worker.backend.evaluating()
        with excused, values as step:
            self.evaluated_step = worker.global_step if step is None else step
            results = self._evaluator.evaluate(batches, transform=transform)
        if self.is_chief:
            self.recorder.evaluated(name, results, self.evaluated_step)
        for hook in self.options.hooks:
            hook.on_evaluate(self, name, results)
        return results
