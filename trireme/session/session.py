"""The session: a program written for one device, trained however it was launched."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

import torch
from torch import nn
from torch.utils.data import Dataset

from trireme.data.loader import Batch, Loader
from trireme.data.order import Order
from trireme.data.seeds import derive
from trireme.errors import ConfigurationError, Fenced, UsageError
from trireme.launch.here import task_here
from trireme.launch.task_config import TaskConfig
from trireme.monitor.tensorboard import TensorBoard
from trireme.ps.messages import Span, Stale
from trireme.ps.names import named_buffers
from trireme.ps.results import PushResult
from trireme.session.assembly import (
    Assembly,
    Computation,
    assemble,
    computation_of,
    device_of,
)
from trireme.session.choice import Choice, agree_on_optimizer, choose
from trireme.session.dry_run import describe
from trireme.session.evaluation import Transform, evaluate
from trireme.session.last_iteration import LastIteration
from trireme.session.options import Options, OptionValues, make_options
from trireme.session.progress import Progress, make_progress
from trireme.session.recorder import Recorder
from trireme.session.replica import Loss, Replica
from trireme.session.result import Metric, StepResult
from trireme.session.rules import (
    Optimizers,
    overlaps,
    rule_of,
    updates_per_step,
)
from trireme.session.signals import Signals
from trireme.session.stop_sign import StopSign
from trireme.session.supervisor import Supervisor

if TYPE_CHECKING:
    from trireme.parallel.pipeline import Pipeline

__all__ = ["Session", "StepResult"]

_SEED_MODEL, _SEED_WORKER, _SEED_STEP = 11, 12, 13


class Session:
    """Trains a model, alone or as one worker of a job; the program is the same.

    Use it as a context manager: it joins the job on entry, and on exit saves and leaves. An
    exception inside fails the job, with that exception as the reason.

    Args:
        model: a module, or a function without arguments that builds one.
        loss: (outputs, targets) -> a scalar mean over the batch, or a dict whose `loss` is it;
            `trireme.model_loss` for a model that computes its own from a batch with `labels`.
        optimizer: builds the optimizer from the model's parameters, or is one over them. Several,
            such as a generator's and a discriminator's, are a dict of them by name, or a list;
            `step` then names the one that it is a step of. In a dict, a function builds one from
            the parameters of the model's child that has its name.
        metrics: by name, (outputs, targets) -> the mean over the batch.
        run_dir: where checkpoints and records go; the launcher's `--run-dir` takes precedence.
        max_steps: the global step at which training ends; None for no end.
        options: see `trireme.session.options.Options`.

    Raises:
        ConfigurationError: an option is unknown or out of range.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        loss: Loss,
        optimizer: Optimizers,
        *,
        metrics: Mapping[str, Metric] | None = None,
        run_dir: str | Path | None = None,
        max_steps: int | None = None,
        **options: Unpack[OptionValues],
    ) -> None:
        self.task: TaskConfig = task_here()
        self.options: Options = _with_profile(make_options(options), self.task)
        self.metrics = dict(metrics or {})
        self.run_dir = _run_dir(self.task.run_dir or run_dir)
        self.max_steps = max_steps
        self._make_model = model
        self._loss = loss
        self._make_optimizer = optimizer
        self._entered = False
        self._life: Supervisor | None = None
        self._handed_out: list[Batch] = []  # by loaders, since the last update
        self._loader: Loader | None = None  # the one whose batches are asked for
        self._left_over: dict[tuple[str, int], list[tuple[int, int]]] = {}
        self._last_iteration = LastIteration()

    # -- life -----------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Joins the job and has its first values.

        Raises:
            TriremeError: what keeps this worker from taking part.
        """
        if self._entered:
            raise ConfigurationError("this session was entered before: make another one")
        self._entered = True
        if self.options.deterministic:
            torch.use_deterministic_algorithms(True)
        rule = rule_of(self.task, self.options, self.max_steps)
        self._build()
        gang = self._made.gang
        if self.task.dry_run:
            print(describe(self._made.flat.layout, self.optimizer, rule, self.task))
            raise SystemExit(0)
        self._progress: Progress = make_progress(
            "none" if gang is not None and not gang.speaks else self.task.display,
            max_steps=self.max_steps,
            log_every=self.options.log_every,
        )
        self._life = Supervisor(
            self.task,
            self._made.training(self.task, self.options, rule, self.run_dir),
            self._progress,
        )
        self._clip_here = None if rule.clip_norm is not None else self.options.clip_norm
        try:
            self._supervisor.start()
        except UsageError as error:  # where in here it was found, helps nobody
            self._supervisor.fail(error)
            self._progress.close()
            raise error.with_traceback(None) from error.__cause__
        except BaseException as error:
            self._supervisor.fail(error)
            self._progress.close()
            raise
        self._overlaps = (
            gang is None
            and self._choice is None  # backward also makes gradients that are not to be sent
            and overlaps(self.task, self.options)
            and self._supervisor.updates_early
        )
        if gang is None:
            flat = self._made.flat
            flat.keeps_views = self._overlaps or flat.device.type != "cpu"  # memory is short there
        self._place = self.task.index if gang is None or self.task.servers else gang.replica
        torch.manual_seed(derive(self.options.seed, _SEED_WORKER, self._place))
        self._recorder = Recorder(
            self._supervisor,
            self._progress,
            self.run_dir,
            self.options,
            self.batches_per_step,
            self.max_steps,
            counts=gang is None or gang.counts,
        )
        self._handlers = Signals(self._supervisor.interrupt)
        self._handlers.install()
        self._finished = False
        self._supervisor.begin_training()
        try:
            for hook in self.options.hooks:
                hook.on_start(self)
        except BaseException as error:  # `__exit__` is not called for what `__enter__` raises
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Saves and leaves, at `sys.exit(0)` too; after an exception, tells the job why it failed.

        Raises:
            SystemExit: with status 130, when the job was interrupted and saved.
        """
        if isinstance(error, SystemExit) and error.code in (None, 0):
            error = None  # the program ends here, and nothing is wrong
        try:
            self._close(error)
        finally:
            self._handlers.restore()
            self._progress.close()
        if error is None and self._supervisor.interrupted is not None:
            raise SystemExit(130)

    def _close(self, error: BaseException | None) -> None:
        supervisor = self._supervisor
        if error is not None:
            self._recorder.close()
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                supervisor.leave("interrupted", f"{type(error).__name__} in the script")
            else:
                supervisor.fail(error)
            return
        reason = supervisor.interrupted
        try:
            self._finish_training()
            for hook in self.options.hooks:
                hook.on_stop(self, reason or "finished")
            self._recorder.finish()
        except BaseException as failure:
            supervisor.fail(failure)
            raise
        finally:
            self._recorder.close()
        supervisor.leave("interrupted" if reason else "finished", reason or "")

    def _build(self) -> None:
        """Makes the model, the optimizer, the buffers and what computes."""
        self._made: Assembly = assemble(self.task, self.options, self._make, self._make_optimizer)
        self.model: nn.Module = self._made.model
        self.optimizer: torch.optim.Optimizer = self._made.optimizer
        try:
            self._computes: Computation = computation_of(
                self._made, self._loss, self.options, self.metrics
            )
        except BaseException:
            if self._made.gang is not None:
                self._made.gang.close(together=False)
            raise
        self._replica: Replica = self._computes.replica
        self._choice = Choice.of(self._made, self._make_optimizer)

    def _make(self) -> nn.Module:
        """Returns the model on its device, with first values that follow from the seed."""
        torch.manual_seed(derive(self.options.seed, _SEED_MODEL))
        model = self._make_model if isinstance(self._make_model, nn.Module) else self._make_model()
        device = device_of(self.task, self.options)
        if device is not None:
            model = _on_device(model, device)
        return model.train()

    @property
    def _supervisor(self) -> Supervisor:
        if self._life is None:
            raise ConfigurationError(
                "the session has not joined its job yet: train and evaluate inside `with session:`"
            )
        return self._life

    # -- what a program asks ----------------------------------------------------------------------

    @property
    def is_chief(self) -> bool:
        """Whether this is the live worker with the lowest index."""
        return self._supervisor.is_chief

    @property
    def global_step(self) -> int:
        """The global step of the values that this worker has."""
        return self._supervisor.global_step

    @property
    def local_steps(self) -> int:
        """How many of this worker's updates were applied."""
        return self._recorder.applied

    @property
    def restored_from(self) -> int | None:
        """The step of the checkpoint that this worker, as chief, restored; None for none."""
        return self._supervisor.restored_from

    @property
    def pipeline(self) -> Pipeline | None:
        """What drives this process's pipeline stages; None where there is no pipeline."""
        return self._computes.pipeline

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The trained parameters that this process holds, by their names in the model.

        Where processes hold the model together, these are its parts, and may be shards.
        """
        return self._replica.flat.parameters

    @property
    def whole(self) -> bool:
        """Whether this process computes with the whole of `model`."""
        return self._made.part is None

    @property
    def board(self) -> TensorBoard | None:
        """Where records go; None on workers that are not chief, and without a run directory."""
        return self._recorder.board if self.is_chief else None

    def originals(self, batch: Any, count: int = 16) -> Any:
        """Returns the first examples of a loader's batch as they were before its transform.

        None where there was no transform, or where the batch is not of the loader that is used.
        """
        if self._loader is None or not isinstance(batch, Batch):
            return None
        return self._loader.originals(batch, count)

    @property
    def supervisor(self) -> Supervisor:
        """This worker's life in its job; for hooks of Trireme's own."""
        return self._supervisor

    @property
    def recorder(self) -> Recorder:
        """What counts and shows this worker's steps; for hooks of Trireme's own."""
        return self._recorder

    @property
    def launch_dir(self) -> Path | None:
        """The launch's run directory, else the program's; None where there is neither."""
        records = self.task.records
        return self.run_dir if records is None else Path(records).parent

    @property
    def should_stop(self) -> StopSign:
        """`should_stop()` returns whether training should end; agreed by all workers."""
        supervisor, last = self._supervisor, self._last_iteration
        return StopSign(lambda: last.asked(supervisor.should_stop))

    def stop(self, reason: str) -> None:
        """Asks that the job end at the next step at which every worker can; safe on any worker."""
        self._supervisor.stop(reason)

    # -- training -------------------------------------------------------------------------------

    def loader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        name: str = "train",
        shuffle: bool = True,
        transform: Callable[[Any, torch.Generator], Any] | None = None,
        workers: int = 0,
        epochs: float | None = None,
        resized: bool = False,
    ) -> Iterator[Batch]:
        """Iterates over this worker's batches, from epoch to epoch, until the session should stop.

        Each example of an epoch is dealt to one worker. What a worker did not finish, because it
        died or its update was stale, is dealt again. A resumed job goes on at the exact example.
        Who leaves the loop early and comes back for another loader goes on where the first was.

        Args:
            dataset: map-style; tensors in memory (`TensorDataset`) take a path without
                per-example Python.
            batch_size: how many examples a worker takes at a time.
            name: of the data set, where a program trains on several.
            shuffle: give each epoch an order of its own.
            transform: (batch, generator) -> batch, such as an augmentation of
                `trireme.data.augment`; its randomness follows from the seed and the batch.
            workers: processes that load examples, for data sets that are not in memory.
            epochs: ends the job after so many passes, where `max_steps` does not say otherwise.
            resized: a resumed job is refused where its data set has another size than it had. With
                this it goes on with the next epoch of what there is now.

        Raises:
            ConfigurationError: the data set has no length or no examples, `epochs` is not above 0,
                or `batch_size` is below 1.
            Rejected: the workers disagree about the data set's size, or in synchronous jobs about
                the batch size; or the checkpoint is of a data set of another size.
        """
        client = self._supervisor.client
        size = _size_of(dataset)
        if epochs is not None and not epochs > 0:
            raise ConfigurationError(f"epochs={epochs}: it must be above 0")
        if batch_size < 1 or workers < 0:
            raise ConfigurationError(
                f"batch_size={batch_size}, workers={workers}: a batch has at least 1 example, and "
                "workers is 0 or more"
            )
        if epochs is not None and self.max_steps is None:
            per_step = batch_size * self.batches_per_step
            client.set_end(-(-int(epochs * size) // per_step))

        def source(count: int) -> list[tuple[int, int]]:
            left = self._left_over.pop((name, size), [])
            return [piece for span in left for piece in _cut(span, batch_size)] or [
                (s.start, s.stop)
                for s in client.lease(name, size, batch_size, count, resized=resized)
            ]

        order = Order(size, self.options.seed, shuffle=shuffle)
        loader = Loader(
            dataset, order, source, batch_size=batch_size, transform=transform, workers=workers
        )
        return self._iterate(loader, name)

    def _iterate(self, loader: Loader, name: str) -> Iterator[Batch]:
        if not self.should_stop():
            supervisor, client, recorder = self._supervisor, self._supervisor.client, self._recorder
            batches = iter(loader)
            self._loader = loader
            rejoined = supervisor.rejoined
            try:
                with suppress(StopIteration):
                    while not client.stopping:
                        if rejoined != supervisor.rejoined:
                            # Taken for lost: what it had been dealt was dealt to others.
                            rejoined = supervisor.rejoined
                            self._left_over.clear()
                            loader.discard()
                            batches = iter(loader)
                        began = time.monotonic()
                        try:
                            batch = next(batches)
                        except Fenced:  # it is dealt nothing, until it is back
                            supervisor.rejoin()
                            continue
                        recorder.fetched(began, time.monotonic())
                        if supervisor.should_stop:  # the answer to a prefetched push has come
                            break
                        batch.dataset = name
                        self._handed_out.append(batch)
                        self._last_iteration.asked(False)
                        yield batch
                self._last_iteration.asked(True)
            finally:
                self._loader = None
                left = self._left_over.setdefault((name, loader.order.size), [])
                left += loader.discard()
        self._finish_training()

    @property
    def batches_per_step(self) -> int:
        """How many batches make one global step: of a synchronous round, or of all replicas."""
        rule = rule_of(self.task, self.options, self.max_steps)
        return updates_per_step(self.task, self.options, rule)

    def step(
        self, batch: Any, *, optimizer: str | int | None = None, loss: Loss | None = None
    ) -> StepResult:
        """Makes one update of the job from a batch: one global step, or a part of one.

        Of several optimizers one makes the step, with the gradients of its own parameters; those
        that the others update stay as they are, and so do the others' states. Each is a global
        step of its own: a generator and a discriminator in turn make two. Workers that make steps
        together must make those of the same optimizers in the same order.

        Args:
            optimizer: which of several makes it: by name, or by its place in a list.
            loss: in the place of the session's, for this step.
            batch: one of `loader`'s, or anything that holds tensors: a pair of inputs and
                targets, a longer tuple whose last is the target, or a mapping with `targets` or
                `labels`, which stay in it for a model that computes its own loss. What
                loaders have handed out since the last update counts as what such a batch was made
                of.

        Where training ends in the middle of an iteration of the program's loop, the steps that are
        left of it make no update: their verdict is `Stale`.

        Raises:
            ConfigurationError: the loop goes on after training has ended, and what it led to is
                saved; the session was not entered; there is no such optimizer; or a process that
                makes the step together with this one makes one of another.
            SystemExit: with status 130, where training has ended because the job was interrupted.
            NonFiniteError: the loss is NaN or infinite, and the policy is to raise.
            JobFailed: the job has ended elsewhere; says where and why.
        """
        supervisor = self._supervisor
        if supervisor.has_ended:
            return self._leave_out(batch, loss)
        if optimizer is not None or self._choice is not None:
            choose(self._choice, optimizer)
        for hook in self.options.hooks:
            hook.before_step(self, batch)
        began = time.monotonic()
        if self.options.deterministic:
            torch.manual_seed(derive(self.options.seed, _SEED_STEP, self._place, self.global_step))
        supervisor.begin_step()
        if self._choice is not None:
            agree_on_optimizer(self._made)
        spans = _spans([batch] if isinstance(batch, Batch) else self._handed_out)
        begin = partial(supervisor.begin_update, examples=spans) if self._overlaps else None
        if loss is None:
            result = self._replica.backward(batch, begin)
        else:
            with self._replica.another_loss(loss):
                result = self._replica.backward(batch, begin)
        if self._choice is not None:
            self._choice.leave_out_others()
        if self._clip_here is not None:
            self._replica.clip(self._clip_here)
        computed = time.monotonic()
        self._handed_out.clear()
        pushed = supervisor.update(float(result.examples), spans, self._prepare)
        if pushed is not None:
            result.decide(pushed)
        result.global_step = supervisor.client.step
        result.seconds = time.monotonic() - began
        self._recorder.step(result, began, computed)
        for hook in self.options.hooks:
            hook.after_step(self, result)
        if supervisor.storage.saves:
            self._announce_checkpoints()
        return result

    def _leave_out(self, batch: Any, loss: Loss | None) -> StepResult:
        """Computes what a step shows that comes after the end, and makes no update."""
        if not self._last_iteration.leaves_out():
            self._finish_training()
            raise self._supervisor.after_the_end()
        with self._replica.another_loss(loss) if loss is not None else nullcontext():
            result = self._replica.backward(batch)
        self._handed_out.clear()
        result.global_step = self.global_step
        result.decide(PushResult(Stale(self.global_step), self.global_step, 0, True))
        return result

    def _announce_checkpoints(self) -> None:
        for path in self._supervisor.take_saved():
            self._recorder.checkpoint(path)
            for hook in self.options.hooks:
                hook.on_checkpoint(self, path)

    def _prepare(self) -> None:
        """Has the next batch made while an update is under way."""
        if self._loader is not None:
            self._loader.prepare()

    def _finish_training(self) -> None:
        if not self._finished:
            self._finished = True
            last = self._supervisor.complete()
            if last is not None:
                self._recorder.count(last.decided, last.steps)
            self._recorder.check_progress()
            self._recorder.training_ended()
            self._supervisor.finish_training()
            self._announce_checkpoints()
            if self._made.part is not None:
                self._join_parts()

    @torch.no_grad()
    def _join_parts(self) -> None:
        """Leaves the last values in the whole model, where processes have trained parts of it."""
        values = self._supervisor.client.snapshot(state=False).values
        for name, parameter in self._made.flat.parameters.items():
            parameter.copy_(values[name])
        buffers = self._supervisor.buffers.average()
        for name, buffer in named_buffers(self.model):
            if name in buffers:
                buffer.copy_(buffers[name])

    # -- evaluating and recording ---------------------------------------------------------------

    def evaluate(
        self,
        dataset: Dataset[Any],
        *,
        name: str = "validation",
        batch_size: int = 1000,
        transform: Transform | None = None,
    ) -> dict[str, float]:
        """Returns the mean loss and metrics of a data set under the values of one consistent step.

        The moving average is evaluated where one is kept. The chief also records the result, in
        TensorBoard as the run `name`.

        Args:
            dataset: map-style; each example counts once.
            name: what it is, such as `validation` or `test`.
            batch_size: how many examples at a time.
            transform: batch -> batch, such as a centre crop.
        """
        with self._supervisor.pulse.excused("it evaluates"), self._consistent_values():
            results = evaluate(
                self._computes.evaluator,
                dataset,
                self.metrics,
                batch_size=batch_size,
                transform=transform,
            )
        if self.is_chief:
            self._recorder.evaluated(name, results)
        for hook in self.options.hooks:
            hook.on_evaluate(self, name, results)
        return results

    @contextmanager
    def _consistent_values(self) -> Iterator[None]:
        """Puts the values of one step, or their average, into the model for a while."""
        supervisor, flat = self._supervisor, self._made.flat
        if self.task.servers == 0 and self.options.ema is None and self._made.part is None:
            yield
            return
        state = supervisor.client.snapshot(state=False)
        chosen = state.average or state.values
        buffers = supervisor.buffers.average()
        kept = [value.clone() for value in flat.values]
        own = {name: b.clone() for name, b in named_buffers(self.model) if name in buffers}
        with torch.no_grad():
            for name, parameter in flat.parameters.items():
                parameter.copy_(chosen[name])
            for name, buffer in named_buffers(self.model):
                if name in buffers:
                    buffer.copy_(buffers[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for value, before in zip(flat.values, kept, strict=True):
                    value.copy_(before)
                for name, buffer in named_buffers(self.model):
                    if name in own:
                        buffer.copy_(own[name])

    def log(
        self,
        values: Mapping[str, float | torch.Tensor] | None = None,
        *,
        run: str = "train",
        **named: float | torch.Tensor,
    ) -> None:
        """Records numbers at the present global step; on workers that are not chief, nothing."""
        if self.is_chief:
            self._recorder.log({**(values or {}), **named}, run)

    def image(self, name: str, image: Any, **options: Any) -> None:
        """Records an image (channels, height, width), or several; see `TensorBoard.image`."""
        self._record("image", name, image, options)

    def histogram(self, name: str, values: Any, **options: Any) -> None:
        """Records how the values of a tensor are distributed."""
        self._record("histogram", name, values, options)

    def audio(self, name: str, sound: Any, **options: Any) -> None:
        """Records a sound: values in [-1, 1] of shape (1, time)."""
        self._record("audio", name, sound, options)

    def text(self, name: str, text: str, **options: Any) -> None:
        """Records a text in Markdown."""
        self._record("text", name, text, options)

    def embedding(self, name: str, matrix: Any, **options: Any) -> None:
        """Records points (number, dimension) for the projector."""
        self._record("embedding", name, matrix, options)

    def pr_curve(
        self, name: str, predictions: torch.Tensor, *, labels: torch.Tensor, **options: Any
    ) -> None:
        """Records precision and recall by threshold; see `TensorBoard.pr_curve`."""
        self._record("pr_curve", name, predictions, {"labels": labels, **options})

    def figure(self, name: str, figure: Any, **options: Any) -> None:
        """Records a matplotlib figure."""
        self._record("figure", name, figure, options)

    def graph(self, example: Any, **options: Any) -> None:
        """Records the model's graph, traced with an example of its inputs."""
        if self.is_chief:
            self._recorder.graph(self.model, example, options)

    def _record(self, kind: str, name: str, value: Any, options: dict[str, Any]) -> None:
        if self.is_chief:
            self._recorder.record(kind, name, value, options)

    def save(self) -> None:
        """Saves a checkpoint now; the chief only, elsewhere nothing.

        Where processes hold the model together, all of them must ask.
        """
        if self.is_chief or self._made.gang is not None:
            self._supervisor.save()


def _on_device(model: nn.Module, device: str | torch.device) -> nn.Module:
    try:
        return model.to(device)
    except (AssertionError, RuntimeError) as error:  # torch's, where it has no such device
        found = "no CUDA device" if not torch.cuda.is_available() else "CUDA devices"
        raise ConfigurationError(
            f"the model cannot be put on device {str(device)!r} ({error}): PyTorch finds {found} "
            "here; leave `device` out to train where the model is"
        ) from error


def _with_profile(options: Options, task: TaskConfig) -> Options:
    """Adds what the launch wants traced to the hooks."""
    if task.profile is None:
        return options
    from trireme.session.profile import Profile

    return replace(options, hooks=(*options.hooks, Profile(task.profile)))


def _spans(batches: Iterable[Batch]) -> list[Span]:
    spans = []
    for batch in batches:
        for start, stop in batch.spans:
            spans.append(Span(batch.dataset, start, stop))
    return spans


def _size_of(dataset: Dataset[Any]) -> int:
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


def _cut(span: tuple[int, int], longest: int) -> Iterator[tuple[int, int]]:
    """Cuts a span of positions into pieces that are not too long for a batch."""
    start, stop = span
    return ((low, min(low + longest, stop)) for low in range(start, stop, longest))


def _run_dir(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value)
